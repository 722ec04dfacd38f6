"""What is read out of a run's events: run directories written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.state.record.reading import RunRecords
from lockstep.tools.bench.measuring import Measurements, measure, restart_seconds

LAUNCHED = 1000.0


def pace(time: float, step: int, steps: int, seconds: float, **more: Any) -> dict[str, Any]:
    times = {"median": seconds / steps, "slowest": seconds / steps}
    fields = {"kind": "pace", "epoch": 0, "samples": 64 * steps, "data": 0.0, "exchange": None}
    return {
        **fields,
        "time": time,
        "step": step,
        "steps": steps,
        "seconds": seconds,
        **times,
        **more,
    }


def start(rank: int, generation: int = 0, name: str | None = None) -> dict[str, Any]:
    device = "cpu" if name is None else "cuda"
    fields = {"rank": rank, "generation": generation, "device": device, "device_name": name}
    return {"time": LAUNCHED, "kind": "start", "step": 0, **fields}


def machine(step: int, cpu: float, host: int, **more: Any) -> dict[str, Any]:
    fields = {"device": None, "busy": None, **more}
    return {"time": LAUNCHED, "kind": "machine", "step": step, "cpu": cpu, "host": host, **fields}


@pytest.fixture
def recorded(tmp_path: Path) -> Any:
    """Write files of events, and read them as the records of a run."""

    def write(**files: list[dict[str, Any]]) -> RunRecords:
        (tmp_path / "events").mkdir()
        (tmp_path / "run.json").write_text(json.dumps({"format": 1, "status": "finished"}))
        for name, events in files.items():
            path = tmp_path / "events" / f"{name.replace('_', '-')}.jsonl"
            path.write_text("".join(json.dumps(event) + "\n" for event in events))
        return RunRecords.of(tmp_path)

    return write


def measured(records: RunRecords) -> Measurements:
    found = measure(records, LAUNCHED)
    assert found is not None
    return found


def test_the_first_step_warms_up_and_the_others_are_added(recorded: Any) -> None:
    found = measured(
        recorded(
            rank_0=[
                start(0),
                pace(1003.0, 1, 1, 9.0, exchange=5.0),
                pace(1004.0, 11, 10, 1.0, data=0.1, exchange=0.2),
                pace(1005.0, 16, 5, 1.0, data=0.1, exchange=0.1),
                {"time": 1006.0, "kind": "traffic", "model": 0, "sent": 1600},
                {"time": 1006.0, "kind": "memory", "gradients": 800, "peak_host": 5000},
            ],
            rank_1=[
                start(1),
                pace(1003.0, 1, 1, 9.0),
                pace(1004.0, 16, 15, 2.0, exchange=0.6),
                {"time": 1006.0, "kind": "traffic", "model": 0, "sent": 3200},
                {"time": 1006.0, "kind": "traffic", "model": 1, "received": 1},
                {"time": 1006.0, "kind": "memory", "gradients": 800, "peak_host": 7000},
            ],
        )
    )
    assert (found.steps, found.batch) == (15, 64)
    assert found.step_seconds == pytest.approx(2 / 15)
    assert found.slowest_step == pytest.approx(0.2)
    # Rank 0 waits least: the others wait for that rank.
    assert found.exchange_seconds == pytest.approx(0.3 / 15)
    assert found.data_seconds == pytest.approx(0.2 / 15)
    assert found.compute_seconds + 0.5 / 15 == pytest.approx(2 / 15)
    assert found.exchange_share == pytest.approx((0.15 + 0.3) / 2)
    assert found.data_share == pytest.approx(0.05)
    assert found.sent == pytest.approx(4800 / 2 / 16)
    assert found.gradients == 800
    assert found.host == {0: 5000, 1: 7000}
    assert (found.device, found.busy, found.cpu) == ({}, None, None)
    assert found.start_seconds == pytest.approx(3.0)
    assert found.devices == ["cpu"]


def test_where_the_host_does_not_wait_the_exchange_is_not_known(recorded: Any) -> None:
    rank = [
        start(0, name="NVIDIA H100"),
        machine(0, 9.0, 99, device=99, busy=0.0),
        pace(1001.0, 1, 1, 1.0),
        pace(1002.0, 9, 8, 1.0),
        machine(5, 1.0, 10, device=70, busy=0.8),
        machine(9, 2.0, 30, device=50, busy=0.6),
    ]
    found = measured(recorded(rank_0=rank, rank_1=rank))
    assert found.exchange_seconds is found.exchange_share is None
    assert found.compute_seconds == pytest.approx(1 / 8)
    assert found.devices == ["NVIDIA H100"]
    assert (found.cpu, found.busy) == (pytest.approx(1.5), pytest.approx(0.7))
    assert found.device == {0: 99, 1: 99}, "peaks count from the start"
    assert found.sent is None


def test_one_rank_has_no_exchange(recorded: Any) -> None:
    rank = [start(0), pace(1001.0, 1, 1, 1.0), pace(1002.0, 9, 8, 1.0)]
    assert measured(recorded(rank_0=rank)).exchange_seconds == 0


@pytest.mark.parametrize("events", [[], [start(0)], [start(0), pace(1001.0, 1, 1, 1.0)]])
def test_nothing_is_left_after_the_warm_up(recorded: Any, events: list[dict[str, Any]]) -> None:
    assert measure(recorded(rank_0=events), LAUNCHED) is None


def test_a_restart_lasts_from_the_failure_to_the_next_step(recorded: Any) -> None:
    rank = [
        start(0),
        pace(1001.0, 1, 1, 1.0),
        pace(1002.0, 9, 8, 0.8),
        start(0, generation=1),
        pace(1004.5, 9, 1, 5.0),
        pace(1006.0, 15, 6, 0.6),
    ]
    failure = {"time": 1004.0, "kind": "failure", "generation": 0, "text": "rank 1 was killed"}
    records = recorded(rank_0=rank, launcher_0=[failure, {"time": 1004.1, "kind": "restart"}])
    assert restart_seconds(records) == pytest.approx(0.5)
    found = measured(records)
    assert found.steps == 14, "the first step of each generation is left out"
    assert found.step_seconds == pytest.approx(1.4 / 14)


def test_a_run_that_did_not_go_on_has_no_restart(recorded: Any) -> None:
    rank = [start(0), pace(1001.0, 1, 1, 1.0)]
    failure = {"time": 1004.0, "kind": "failure", "generation": 0}
    assert restart_seconds(recorded(rank_0=rank, launcher_0=[failure])) is None


def test_without_a_launcher_of_ours_there_is_no_restart(recorded: Any) -> None:
    assert restart_seconds(recorded(rank_0=[start(0)])) is None
