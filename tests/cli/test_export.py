"""`lockstep export`: plain weights from a run directory, without the run's script (A15)."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.cli import main
from lockstep.state.checkpoint.catalog import Catalog
from lockstep.state.checkpoint.manager import CheckpointManager

pytestmark = pytest.mark.forked


def weights(step: int, model: int = 0) -> dict[str, Tensor]:
    return {"0.weight": torch.full((2, 3), float(step + 100 * model)), "0.bias": torch.zeros(2)}


def make_run(directory: Path, models: int = 1) -> Path:
    """A run directory with checkpoints of steps 1, 2 (the best) and 3, whose rating is NaN."""
    directory.mkdir()
    (directory / "run.json").write_text("{}")
    catalog = Catalog(directory / "checkpoints", {"seed": 0})
    checkpoints = CheckpointManager(catalog, rank=0, size=1, store=None, keep=9)
    for step in (1, 2, 3):
        tensors = {
            f"models.{model}.{name}": tensor
            for model in range(models)
            for name, tensor in weights(step, model).items()
        }
        tensors["optimizers.0.state"] = torch.ones(4)
        checkpoints.save(step, tensors, "{}", best=step if step < 3 else math.nan)
    checkpoints.wait()
    checkpoints.close()
    return directory


@pytest.fixture(scope="module")
def run(tmp_path_factory: Any) -> Path:
    """A run with one model."""
    return make_run(tmp_path_factory.mktemp("one") / "run")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: Any) -> Path:
    """A run with two models."""
    return make_run(tmp_path_factory.mktemp("two") / "run", models=2)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_the_command(lockstep, run) -> None:
    done = lockstep("export", str(run), "-o", "a.pt")
    assert done.code == 0, done.err
    assert done.out == "a.pt: step 3\n"
    assert same(torch.load(lockstep.directory / "a.pt", weights_only=True), weights(3))


@pytest.mark.parametrize(
    ("words", "step"), [([], 3), (["--step", "1"], 1), (["--best"], 2), (["--model", "0"], 3)]
)
@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_which_checkpoint(run, tmp_path, words, step, suffix) -> None:
    from safetensors.torch import load_file

    file = tmp_path / f"weights{suffix}"
    assert main(["export", str(run), "-o", str(file), *words]) == 0
    loaded = torch.load(file, weights_only=True) if suffix == ".pt" else load_file(file)
    assert same(loaded, weights(step))


@pytest.mark.parametrize(
    ("steps", "words", "warns"), [(7, [], True), (3, [], False), (7, ["--best"], False)]
)
def test_a_checkpoint_from_before_the_end(tmp_path, capsys, steps, words, warns) -> None:
    directory = make_run(tmp_path / "run")
    (directory / "run.json").write_text(f'{{"steps": {steps}}}')
    assert main(["export", str(directory), *words]) == 0
    assert ("the run has made 7 steps, and this is its newest" in capsys.readouterr().err) == warns


def test_which_model(pair, tmp_path, capsys) -> None:
    file = tmp_path / "weights.pt"
    assert main(["export", str(pair), "-o", str(file)]) == 2
    err = capsys.readouterr().err
    assert re.search(r"the run has models 0 \(\d+ values\), 1 \(\d+ values\)\nhint: --model", err)
    assert main(["export", str(pair), "-o", str(file), "--model", "1"]) == 0
    assert same(torch.load(file, weights_only=True), weights(3, model=1))
    assert main(["export", str(pair), "-o", str(file), "--model", "2", "--force"]) == 2
    assert "there is no model 2; expected one of 0, 1" in capsys.readouterr().err


def test_a_file_that_exists(run, tmp_path, capsys) -> None:
    file = tmp_path / "weights.pt"
    file.write_text("mine")
    assert main(["export", str(run), "-o", str(file)]) == 2
    assert "weights.pt exists\nhint: --force overwrites it" in capsys.readouterr().err
    assert file.read_text() == "mine"
    assert main(["export", str(run), "-o", str(file), "--force"]) == 0
    assert same(torch.load(file, weights_only=True), weights(3))


def test_where_it_goes_by_default(tmp_path, capsys) -> None:
    run = make_run(tmp_path / "run")
    assert main(["export", str(run)]) == 0
    assert capsys.readouterr().out == f"{run}/model.pt: step 3\n"
    assert (run / "model.pt").exists()


def test_damaged_checkpoints(tmp_path, capsys) -> None:
    run = make_run(tmp_path / "run")
    (run / "checkpoints/step-00000003/.metadata").unlink()
    assert main(["export", str(run)]) == 0
    told = capsys.readouterr()
    assert "step-00000003 is skipped: .metadata is missing" in told.err
    assert told.out.endswith("step 2\n")
    assert main(["export", str(run), "--force", "--step", "3"]) == 1
    expected = "cannot be used: .metadata is missing\nhint: --step takes another one, of 1, 2, 3\n"
    assert expected in capsys.readouterr().err
    for step in (1, 2):
        (run / f"checkpoints/step-0000000{step}/manifest.json").write_text("{")
    assert main(["export", str(run), "--force"]) == 1
    assert "is what was written" in capsys.readouterr().err


def test_what_cannot_work(run, tmp_path, capsys) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "new").mkdir()
    (tmp_path / "new/run.json").write_text("{}")
    plain = make_run(tmp_path / "plain", models=0)
    out = ["-o", str(tmp_path / "weights.pt")]
    for words, said in [
        ([str(tmp_path / "nowhere"), *out], "nowhere; expected that of a run"),
        ([str(tmp_path / "other"), *out], "there is no run in"),
        ([str(tmp_path / "new"), *out], "has no checkpoint yet\nhint: run.save()"),
        ([str(plain), *out], "holds no model"),
        ([str(run), *out, "--step", "7"], "no checkpoint of step 7; expected one of 1, 2, 3"),
        ([str(run), "-o", "weights.txt"], "has the suffix '.txt'; expected .pt"),
    ]:
        assert main(["export", *words]) == 2, said
        assert said in capsys.readouterr().err
    assert main(["export", str(run), "-o", str(tmp_path / "no/weights.pt")]) == 1
    assert "cannot be written: No such file or directory" in capsys.readouterr().err
    assert main(["export", str(run), "--step", "1", "--best"]) == 2
    assert "--best: not allowed with argument --step" in capsys.readouterr().err


LOADED = """
import time
import torch
import lockstep
from lockstep.state.checkpoint import weights_only

write = weights_only.write_weights
weights_only.write_weights = lambda *a, here, **k: (time.sleep(here), write(*a, here=here, **k))
with lockstep.Run("loaded", replicas=2) as run:
    model = run.model(torch.nn.Linear(4, 1))
    run.export("model.pt")
    run.load("model.pt")
"""


@pytest.mark.forked
@pytest.mark.ranks(2)
def test_load_waits_for_the_file_of_export(lockstep) -> None:
    done = lockstep("run", "-n", "2", lockstep.script(LOADED))
    assert done.code == 0, done.err


def test_help_does_not_import_torch(lockstep) -> None:
    code = (
        "import sys\nfrom lockstep.cli import main\n"
        "try: main(sys.argv[1:])\nexcept SystemExit as leave: assert not leave.code\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = lockstep.python("-c", code, "export", "--help")
    assert done.code == 0, done.err
    assert "RUN_DIR" in done.out
