"""A run's directory over several lives of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Subset, TensorDataset

from lockstep.engine.training import context
from lockstep.errors import RunDirectoryError


@pytest.fixture
def again(make_run, tmp_path: Path):
    """Make a run in one directory, each time as if in a process of its own."""

    def make(**settings: Any) -> Any:
        context.taken_directories.clear()
        return make_run(run_dir=tmp_path / "one", **settings)

    return make


def record(path: Path) -> dict[str, Any]:
    return json.loads((path / "one" / "run.json").read_text())


def fail(run: Any) -> None:
    with pytest.raises(ZeroDivisionError), run:  # noqa: PT012
        run.log(life=1)
        raise ZeroDivisionError


def test_a_failed_run_goes_on_in_its_directory(again, tmp_path: Path) -> None:
    fail(again())
    with again() as run:
        assert run.directory == tmp_path / "one"
        assert record(tmp_path)["status"] == "running"
    assert record(tmp_path)["status"] == "finished"
    generations = record(tmp_path)["generations"]
    assert [(g["ranks"], g["nodes"], g["environment"]) for g in generations] == [
        (1, 1, "single")
    ] * 2


def test_another_identity_is_refused(again) -> None:
    fail(again(seed=0))
    with pytest.raises(RunDirectoryError, match="seed: 0 recorded, 1 now"):
        again(seed=1)


def test_fresh_begins_anew(again, tmp_path: Path, monkeypatch) -> None:
    fail(again(seed=0))
    monkeypatch.setenv("LOCKSTEP_FRESH", "1")
    with again(seed=1) as run:
        run.log(life=2)
    assert record(tmp_path)["identity"]["seed"] == 1
    assert len(record(tmp_path)["generations"]) == 1
    events = (tmp_path / "one/events/rank-0.jsonl").read_text().splitlines()
    assert [json.loads(line)["kind"] for line in events] == ["start", "log", "memory"]
    assert json.loads(events[1])["life"] == 2


def test_a_damaged_record_is_refused_before_anything_is_written(again, tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one/run.json").write_text("{")
    with pytest.raises(RunDirectoryError, match="cannot be read"):
        again()
    assert (tmp_path / "one/run.json").read_text() == "{"


def test_a_second_run_of_one_process_goes_below(make_run, tmp_path: Path) -> None:
    context.taken_directories.clear()
    directories = []
    for _ in range(2):
        with make_run(run_dir=tmp_path / "one") as run:
            directories.append(run.directory)
    assert directories[0] == tmp_path / "one"
    assert directories[1].parent == tmp_path / "one"
    assert record(tmp_path)["status"] == "finished"


def test_unnamed_runs_have_directories_of_their_own(make_run, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    directories = []
    for _ in range(2):
        with make_run("digits", run_dir=None) as run:
            directories.append(run.directory)
    assert len(set(directories)) == 2
    assert {path.parent for path in directories} == {tmp_path / "runs" / "digits"}


def test_a_run_that_goes_on_with_other_data_says_so(again, tmp_path: Path, capsys) -> None:
    def made_of(values: torch.Tensor, indices: list[int]) -> None:
        run = again()
        dataset = Subset(TensorDataset(values), indices)
        with pytest.raises(ZeroDivisionError), run:  # noqa: PT012
            run.loader(dataset, batch_size=2)
            raise ZeroDivisionError

    values = torch.arange(6.0)
    made_of(values, [0, 1, 2])
    made_of(values.clone(), [0, 1, 2])
    assert "other data" not in capsys.readouterr().err
    made_of(values, [0, 1, 3])
    assert (
        "loader 0 has different data than this run had before (indices differ)"
        in capsys.readouterr().err
    )
    made_of(values + 1, [0, 1, 3, 4])
    assert "(indices, length, values differ)" in capsys.readouterr().err
    data = record(tmp_path)["data"]["0"]
    assert (data["kind"], data["length"]) == ("Subset of TensorDataset", "4")
