# Everything a fresh machine needs is made here: a virtual environment with the pinned set, then the target.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST := $(BIN)/python -m pytest -m "not wide"
# Each has an mpiexec and a libmpi of its own: neither can go into the virtual environment with the other.
MPI := .mpi/mpich/.installed .mpi/openmpi/.installed

# The longest first; the simulated device is compiled in a fresh clone.
TESTS := test-device test-engine test-cli-more test-cli test-unit test-distributed test-nodes test-integrations test-slurm test-mpi test-adversarial

# The lowest versions with which test-frameworks passes, and what they need beside them.
LOWEST := transformers==5.3.0 accelerate==1.10.0 huggingface-hub==1.33.0 tokenizers==0.22.2
NEWEST := transformers accelerate
# Absolute, for processes in other directories; its name tells the code of packages from that of users.
FRAMEWORKS := $(CURDIR)/build/frameworks/site-packages

# Each test starts processes that import torch: without bytecode on disk, that takes them several times as long.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install mpi demo test $(TESTS) test-frameworks test-torch test-wide test-adversary lint docs dist bench test-gpu clean

install: $(STAMP)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[test,lint,docs]'
	touch $(STAMP)

mpi: $(MPI)

.mpi/%/.installed: constraints.txt | $(BIN)/python
	rm -rf $(@D)
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --ignore-installed --prefix $(@D) $* mpi4py
	touch $@

demo: install
	$(BIN)/lockstep run -n 2 examples/digits.py

# Four at a time: most tests wait for processes that they have started.
# More combinations of what these tests show are in `make test-wide`.
test: install mpi
	$(MAKE) --no-print-directory --output-sync=target --keep-going -j 4 $(TESTS)

test-cli:
	$(PYTEST) tests/cli/test_[a-o]*.py

test-cli-more:
	$(PYTEST) tests/cli/test_[p-z]*.py

test-distributed:
	$(PYTEST) tests/distributed tests/gpu

# Builds the simulated accelerator once for each version of torch, in build/device; skips without a compiler.
test-device:
	$(PYTEST) tests/device

test-mpi:
	$(PYTEST) tests/mpi

test-unit:
	$(PYTEST) tests/unit --ignore tests/unit/engine

test-engine:
	$(PYTEST) tests/unit/engine

# The adapters with the lowest and with the newest transformers and accelerate, in place of the pinned ones.
test-frameworks: install
	for set in LOWEST NEWEST; do \
	  if [ $$set = LOWEST ]; then packages="$(LOWEST)"; else packages="$(NEWEST)"; fi; \
	  rm -rf build/frameworks && \
	  $(BIN)/python -m pip install --quiet --no-deps --target $(FRAMEWORKS) $$packages && \
	  PYTHONPATH=$(FRAMEWORKS) $(BIN)/python -m pytest -m "not wide" tests/integrations || exit 1; \
	done

# With a torch, and perhaps a Python, besides the pinned ones: make test-torch TORCH=2.15.0 PYTHON=python3.13
test-torch: TORCH ?= 2.15.0
test-torch: ENV = build/torch-$(TORCH)-$(notdir $(PYTHON))
test-torch:
	$(PYTHON) -m venv $(ENV)
	$(ENV)/bin/python -m pip install --quiet torch==$(TORCH) --editable '.[test]'
	$(ENV)/bin/lockstep verify examples/digits.py --layouts 1 2 3 "2,kill@30"
	$(ENV)/bin/python -m pytest -m "not wide" tests/distributed tests/cli tests/unit/engine tests/unit/state

test-adversarial:
	$(PYTEST) tests/adversary

# Trainers of other frameworks; skips where one is not installed.
test-integrations:
	$(PYTEST) tests/integrations

test-slurm:
	$(PYTEST) tests/slurm

test-nodes:
	$(PYTEST) tests/nodes

# Further layouts, start methods, models, faults and scripts: before a release, and after a change of what they try.
test-wide: install mpi
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[adversary]'
	$(BIN)/python -m pytest -m wide

# All scripts of tests/adversary, with the libraries that some of them need.
test-adversary: install
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[adversary]'
	$(BIN)/python -m pytest tests/adversary

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The site, from scratch: a link, an anchor or a page that leads nowhere is an error.
docs: install
	$(BIN)/python -m sphinx --builder html --fail-on-warning --keep-going --fresh-env --quiet docs build/site
	@echo "build/site/index.html"

# The sdist, and the wheel from it, in dist/. A fresh environment has the wheel and nothing else; what the wheel
# needs comes from .venv, whose own Lockstep is hidden there.
dist: install
	rm -rf dist build/dist
	$(BIN)/python -m venv build/dist
	build/dist/bin/python -m pip install --quiet --no-compile --constraint constraints.txt build
	build/dist/bin/python -m build --quiet --outdir dist .
	build/dist/bin/python -m pip install --quiet --no-compile --no-deps dist/*.whl
	$(BIN)/python tests/built.py build/dist
	@ls -l dist

test-gpu: install
	$(BIN)/python -m pytest -m gpu

bench: install mpi
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[bench]'
	$(BIN)/python benchmarks/run_all.py

clean:
	rm -rf $(VENV) .mpi build dist .mypy_cache .ruff_cache .pytest_cache
