"""Events and traces: one JSON object per line."""

from __future__ import annotations

import contextlib
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.engine.data.microbatch import LoopKey, Microbatch
from lockstep.errors import RunDirectoryError
from lockstep.state.record import events
from lockstep.state.record.events import Events
from lockstep.state.record.reading import LineReader
from lockstep.state.record.trace import Trace, loss_bits


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_that_a_kill_has_torn_spoils_no_other(tmp_path: Path) -> None:
    log = Events(tmp_path, 0)
    log.add(kind="first")
    log.close()
    path = tmp_path / "events" / "rank-0.jsonl"
    with path.open("a") as file:
        file.write('{"time": 1, "ki')
    log = Events(tmp_path, 0)
    log.add(kind="second")
    log.close()
    assert [event["kind"] for event in LineReader(path).events()] == ["first", "second"]


def test_a_launcher_that_was_killed_in_a_line_spoils_no_later_one(tmp_path: Path) -> None:
    path = tmp_path / "events" / "launcher-0.jsonl"
    events.append(tmp_path, "launcher-0", kind="first")
    with path.open("a") as file:
        file.write('{"time": 1, "ki')
    events.append(tmp_path, "launcher-0", kind="second")
    events.append(tmp_path, "launcher-0", kind="third")
    assert [event["kind"] for event in LineReader(path).events()] == ["first", "second", "third"]
    assert len(path.read_text().splitlines()) == 4


def test_events_are_written_at_the_end(tmp_path: Path) -> None:
    log = Events(tmp_path, 3)
    log.add(kind="log", step=1, loss=torch.tensor(0.5), name="x", vector=torch.arange(3))
    log.add(kind="epoch", epoch=0)
    assert lines(tmp_path / "events" / "rank-3.jsonl") == []
    log.close()
    log.close()
    first, second = lines(tmp_path / "events" / "rank-3.jsonl")
    assert {k: v for k, v in first.items() if k != "time"} == {
        "kind": "log",
        "step": 1,
        "loss": 0.5,
        "name": "x",
        "vector": [0, 1, 2],
    }
    assert second["kind"] == "epoch"
    assert second["time"] >= first["time"] > 0


def test_flush_and_later_runs_append(tmp_path: Path) -> None:
    for number in range(2):
        log = Events(tmp_path, 0)
        log.add(number=number)
        log.flush()
        assert [line["number"] for line in lines(tmp_path / "events/rank-0.jsonl")] == [
            *range(number + 1)
        ]
        log.close()


def test_events_are_written_now_and_then(tmp_path: Path, monkeypatch) -> None:
    log = Events(tmp_path, 0)
    monkeypatch.setattr(events, "_FLUSH_SECONDS", -1.0)
    log.add(number=1)
    assert len(lines(tmp_path / "events/rank-0.jsonl")) == 1
    log.close()


@pytest.mark.parametrize(
    "value", [np.float32(0.5), np.float64(0.5), np.int64(2), np.bool_(True), np.arange(2)]
)
def test_numpys_values_are_plain_too(tmp_path: Path, value: Any) -> None:
    log = Events(tmp_path, 0)
    log.add(value=value)
    log.close()
    assert lines(tmp_path / "events/rank-0.jsonl")[0]["value"] == value.tolist()


def test_a_full_disk(tmp_path: Path) -> None:
    log = Events(tmp_path, 0)
    log._file.close()
    log._file = Path("/dev/full").open("w")  # noqa: SIM115 - closed by the events
    log.add(number=1)
    with pytest.raises(RunDirectoryError, match="No space left on device"):
        log.flush()
    with pytest.raises(RunDirectoryError, match="No space left on device"):
        log.close()


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "events").write_text("")
    with pytest.raises(RunDirectoryError, match="cannot be written"):
        Events(tmp_path, 0)


def logged(run: Any) -> list[dict[str, Any]]:
    return [line for line in lines(run.directory / "events/rank-0.jsonl") if line["kind"] == "log"]


def test_what_a_run_logs(make_run) -> None:
    with make_run() as run:
        for _ in run.epochs(2):
            run.log(loss=torch.tensor(1.5, requires_grad=True), rate=0.1)
    assert [(e["epoch"], e["step"], e["loss"], e["rate"]) for e in logged(run)] == [
        (0, 0, 1.5, 0.1),
        (1, 0, 1.5, 0.1),
    ]


def test_a_tensor_that_changes_later_is_logged_as_it_was(make_run) -> None:
    with make_run() as run:
        total = torch.zeros(())
        for _ in range(3):
            total += 1
            run.log(total=total)
    assert [event["total"] for event in logged(run)] == [1, 2, 3]


@pytest.mark.parametrize("name", ["epoch", "step", "kind", "time", "values"])
def test_any_name_may_be_logged_or_is_refused_clearly(make_run, name: str) -> None:
    from lockstep.errors import LockstepError

    with make_run() as run:
        try:
            run.log(**{name: 7, "loss": 1.0})
        except LockstepError:
            return
    (event,) = logged(run)
    assert event["loss"] == 1.0
    assert 7 in event.values()


@pytest.mark.parametrize(
    "make", [lambda t: [t, t], lambda t: {"a": (1, [t])}, lambda t: (1, {"b": t})]
)
def test_tensors_in_containers_are_refused_by_name(make_run, make: Any) -> None:
    from lockstep.errors import UsageError

    with make_run() as run:
        run.log(rates=[0.1, 0.2], sizes={"a": (1, [2])}, none=())
        with pytest.raises(UsageError, match=r"given losses, a \w+ with tensors in it"):
            run.log(losses=make(torch.zeros(())))
    assert [event["rates"] for event in logged(run)] == [[0.1, 0.2]]


# --- traces ----------------------------------------------------------------------------------------


def microbatch(**changes: Any) -> Microbatch:
    numbers = {"loader": 1, "epoch": 2, "round": 0, "step": 3, "replica": 1, "size": 2, "total": 8}
    return Microbatch(
        **{**numbers, "first": False, "last": True, "indices": np.array([5, 9]), **changes}
    )


def test_a_trace_holds_bits_samples_and_digests(tmp_path: Path) -> None:
    with contextlib.closing(Trace(tmp_path / "trace", 2)) as trace:
        trace.loader(1, 10, exhaustive=True)
        trace.microbatch(4, microbatch(), torch.tensor(0.1, requires_grad=True))
        trace.microbatch(4, microbatch(size=0, indices=np.array([5]), turn=1), torch.tensor([0.1]))
        trace.seen(4, microbatch(replica=0))
        trace.step(4, {"parameters": "sha256:abc"})
        trace.end({"parameters": "sha256:abc"})
        trace.loop(LoopKey(1, 2, 0), complete=True)
    loader, first, stand_in, seen, step, end, loop = lines(tmp_path / "trace" / "rank-2.0.jsonl")
    assert loader == {"kind": "loader", "loader": 1, "length": 10, "exhaustive": True}
    assert (first["kind"], first["step"], first["batch"], first["replica"]) == (
        "microbatch",
        4,
        3,
        1,
    )
    assert (first["samples"], stand_in["samples"], stand_in["turn"]) == ([5, 9], [], 1)
    assert first["loss"] == struct.pack("<f", 0.1).hex() == stand_in["loss"]
    assert (seen["kind"], seen["step"], seen["replica"], seen["samples"]) == ("seen", 4, 0, [5, 9])
    assert step == {"kind": "step", "step": 4, "digests": {"parameters": "sha256:abc"}}
    assert end == {"kind": "end", "digests": {"parameters": "sha256:abc"}}
    assert (loop["kind"], loop["complete"]) == ("loop", True)


def test_loss_bits_tell_zeros_and_types_apart() -> None:
    values = [
        torch.tensor(v, dtype=d) for v in (0.0, -0.0, 1.0) for d in (torch.float32, torch.float64)
    ]
    values.append(torch.tensor(1.0, dtype=torch.bfloat16))
    assert len({loss_bits(value) for value in values}) == len(values)
    assert loss_bits(torch.tensor([1.0])) == loss_bits(torch.tensor(1.0))


def test_a_runs_trace_does_not_depend_on_when_it_is_read(
    make_run, tmp_path: Path, monkeypatch
) -> None:
    from torch import nn
    from torch.utils.data import TensorDataset

    def traced(number: int) -> list[dict[str, Any]]:
        monkeypatch.setenv("LOCKSTEP_TRACE", str(tmp_path / f"trace-{number}"))
        with make_run(replicas=2) as run:
            model = run.model(nn.Linear(2, 1))
            optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            for (x,) in run.loader(TensorDataset(torch.randn(7, 2)), batch_size=4, shuffle=True):
                run.backward(model(x).mean())
                optimizer.step()
                optimizer.zero_grad()
            digest = run.digest()
        # Runs of other tests in this process count: a later run writes to a subdirectory.
        (path,) = (tmp_path / f"trace-{number}").rglob("rank-0.0.jsonl")
        found = lines(path)
        steps = [line["digests"] for line in found if line["kind"] == "step"]
        assert steps[-1] == {"parameters": digest}
        assert found[-1] == {"kind": "end", "digests": {"parameters": digest}}
        return found

    first = traced(0)
    assert first == traced(1)
    microbatches = [line for line in first if line["kind"] == "microbatch"]
    assert [(line["step"], line["replica"]) for line in microbatches] == [
        (1, 0),
        (1, 1),
        (2, 0),
        (2, 1),
    ]
    assert sorted(i for line in microbatches for i in line["samples"]) == list(range(7))
