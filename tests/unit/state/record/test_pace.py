"""How fast a run trains, and what it waits for."""

import json
import time
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

import lockstep
from lockstep.errors import RunDirectoryError, UsageError
from lockstep.state.record.monitor import Monitor
from lockstep.state.record.pace import Pace, Stopwatch
from lockstep.state.record.reading import LineReader, RunRecords


def test_a_stopwatch_measures_how_long_items_take_to_come() -> None:
    watch = Stopwatch()

    def slow():
        time.sleep(0.02)
        yield 1
        time.sleep(0.02)
        yield 2

    for _ in watch.over(slow()):
        time.sleep(0.05)
    assert 0.04 <= watch.seconds < 0.1  # and not what the body does


def test_the_first_step_is_a_window_of_its_own() -> None:
    pace = Pace()
    assert pace.step(8)
    first = pace.window()
    assert first is not None
    assert (first["steps"], first["samples"], first["exchange"]) == (1, 8, None)
    assert not pace.step(8)
    assert not pace.step(4)
    with pace.exchanging("cpu"):
        pass
    second = pace.window()
    assert second is not None
    assert (second["steps"], second["samples"]) == (2, 12)
    assert second["exchange"] >= 0
    assert second["median"] <= second["slowest"] <= second["seconds"]
    assert pace.window() is None


def test_on_a_gpu_the_host_does_not_measure_the_exchange() -> None:
    pace = Pace()
    with pace.exchanging("cuda"):
        pass
    assert not pace.exchange.is_used


def test_the_machine_is_sampled_beside_the_run() -> None:
    samples: list[dict] = []
    monitor = Monitor(torch.device("cpu"), samples.append)
    deadline = time.monotonic() + 30
    while not samples and time.monotonic() < deadline:
        sum(range(10_000))
    monitor.close()
    assert samples[0]["host"] > 1 << 20
    assert samples[0]["cpu"] > 0.1
    assert samples[0]["device"] is samples[0]["busy"] is None


def test_a_run_records_its_pace_and_its_checkpoints(tmp_path: Path) -> None:
    with lockstep.Run("paced", run_dir=tmp_path / "run", progress=False) as run:
        model = run.model(torch.nn.Linear(2, 1))
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        loader = run.loader(TensorDataset(torch.ones(10, 2)), batch_size=4)
        for _ in run.epochs(2):
            for (x,) in loader:
                run.backward(model(x).mean())
                optimizer.step()
                optimizer.zero_grad()
            run.save(best=0.5)
    recorded = RunRecords.of(tmp_path / "run")
    events = recorded.ranks[0]
    assert events[0]["kind"] == "start"
    assert (events[0]["ranks"], events[0]["step"], events[0]["device"]) == (1, 0, "cpu")
    pace = [event for event in events if event["kind"] == "pace"]
    assert [(one["epoch"], one["step"], one["steps"], one["samples"]) for one in pace] == [
        (0, 1, 1, 4),
        (0, 3, 2, 6),
        (1, 6, 3, 10),
    ]
    saved = [event for event in events if event["kind"] == "checkpoint"]
    assert [(one["step"], one["name"], one["best"]) for one in saved] == [
        (3, "step-00000003", 0.5),
        (6, "step-00000006", 0.5),
    ]


def test_a_line_that_is_a_part_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    path.write_text('{"time": 1, "ki\n{"time": 1, "kind": "a"}\n{"time": 2, "ki')
    assert list(LineReader(path).events()) == [{"time": 1, "kind": "a"}]
    path.write_text('{"time": 1, "kind": "a"}\n[]\n')
    with pytest.raises(RunDirectoryError, match="no event"):
        list(LineReader(path).events())


def test_directories_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has no run\.json"):
        RunRecords.of(tmp_path)
    (tmp_path / "run.json").write_text(json.dumps({"format": 2}))
    with pytest.raises(RunDirectoryError, match="format 2; expected 1 at most"):
        RunRecords.of(tmp_path)
