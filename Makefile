# Everything a fresh machine needs is made here: a virtual environment with the pinned set, then the target.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Each has an mpiexec and a libmpi of its own: neither can go into the virtual environment with the other.
MPI := .mpi/mpich/.installed .mpi/openmpi/.installed

# The longest first.
TESTS := test-cli-more test-distributed test-cli test-nodes test-unit test-adversarial test-slurm

.PHONY: install mpi demo test $(TESTS) test-adversary lint docs bench test-gpu clean

install: $(STAMP)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test,lint,docs]'
	touch $(STAMP)

mpi: $(MPI)

.mpi/%/.installed: constraints.txt | $(BIN)/python
	rm -rf $(@D)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --ignore-installed --prefix $(@D) $* mpi4py
	touch $@

demo: install
	$(BIN)/lockstep run -n 2 examples/digits.py

# Three at a time: most tests wait for processes that they have started.
test: install mpi
	$(MAKE) --no-print-directory --output-sync=target --keep-going -j 3 $(TESTS)

test-cli:
	$(BIN)/python -m pytest tests/cli/test_[a-o]*.py -m "not wide"

test-cli-more:
	$(BIN)/python -m pytest tests/cli/test_[p-z]*.py

test-distributed:
	$(BIN)/python -m pytest tests/distributed tests/mpi tests/gpu

test-unit:
	$(BIN)/python -m pytest tests/unit

test-adversarial:
	$(BIN)/python -m pytest tests/adversary -m "not wide"

test-slurm:
	$(BIN)/python -m pytest tests/slurm

test-nodes:
	$(BIN)/python -m pytest tests/nodes

# All scripts of tests/adversary, with the libraries that some of them need, and the manual's long console sessions.
test-adversary: install
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[adversary]'
	$(BIN)/python -m pytest tests/adversary tests/cli/test_console_blocks.py

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The site, from scratch: a link, an anchor or a page that leads nowhere is an error.
docs: install
	$(BIN)/python -m sphinx --builder html --fail-on-warning --keep-going --fresh-env --quiet docs build/site
	@echo "build/site/index.html"

test-gpu: install
	$(BIN)/python -m pytest -m gpu

bench: install mpi
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[bench]'
	$(BIN)/python benchmarks/run_all.py

clean:
	rm -rf $(VENV) .mpi build dist .mypy_cache .ruff_cache .pytest_cache
