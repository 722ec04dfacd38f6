"""Hangs, without processes: who moves, for how long nobody does, and what is said of it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lockstep.launch.agent import hang
from lockstep.launch.agent.failure import FailureReport, Kind
from lockstep.launch.agent.hang import HangWatch, RankPosition
from lockstep.launch.plan import WorkerPlan
from lockstep.state.checkpoint.shared_memory import AFTER_RUN, COLLECTIVES, ProgressSlot
from lockstep.state.record import stacks
from lockstep.state.record.stacks import Frame

BACKWARD = COLLECTIVES.index("run.backward")


class Clock:
    """Stands in for the module `time`: goes when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(hang, "time", clock)
    return clock


@pytest.fixture
def slots() -> list[ProgressSlot]:
    return [ProgressSlot() for _ in range(2)]


@pytest.fixture
def workers(tmp_path: Path) -> list[WorkerPlan]:
    return [worker(rank, tmp_path) for rank in range(2)]


def worker(rank: int, directory: Path) -> WorkerPlan:
    return WorkerPlan(
        rank=rank,
        local_rank=rank,
        command=("python", "train.py"),
        env={},
        device="cpu",
        log=directory / f"rank-{rank}.log",
        error_file=directory / f"rank-{rank}.0.json",
    )


class Looks:
    """A watch that is asked every second, as the agent does."""

    def __init__(
        self, slots: list[ProgressSlot], workers: list[WorkerPlan], timeout: float
    ) -> None:
        self.slots, self.workers = slots, workers
        self.watch = HangWatch(slots, timeout)
        # No process has so high a number: there is nothing to dump.
        self.pids = {worker.rank: (1 << 30) + worker.rank for worker in workers}

    def after(
        self, clock: Clock, seconds: int, *, moving: int | None = None
    ) -> FailureReport | None:
        for _ in range(seconds):
            clock.now += 1.0
            if moving is not None:
                self.slots[moving].beat += 1
            found = self.watch.look(self.workers, self.pids, 2)
            if found is not None:
                return found
        return None


@pytest.fixture
def looks(clock: Clock, slots: list[ProgressSlot], workers: list[WorkerPlan]) -> Looks:
    return Looks(slots, workers, 10.0)


def opened(slots: list[ProgressSlot]) -> None:
    for slot in slots:
        slot.beat = 1
        slot.entered, slot.step = 7, 5
        slot.waiting = BACKWARD


def test_ranks_that_have_opened_no_run_owe_no_sign(looks: Looks, clock: Clock) -> None:
    assert looks.after(clock, 1000) is None


def test_nobody_moves(looks: Looks, clock: Clock, slots: list[ProgressSlot]) -> None:
    opened(slots)
    slots[1].waiting = 0
    assert looks.after(clock, 10) is None
    found = looks.after(clock, 2)
    assert found is not None
    assert (found.verdict.name, found.verdict.kind) == ("rank 1", Kind.HANG)
    assert found.time == 7.0


def test_one_that_moves_keeps_all_alive(
    looks: Looks, clock: Clock, slots: list[ProgressSlot]
) -> None:
    opened(slots)
    assert looks.after(clock, 100, moving=1) is None
    assert looks.after(clock, 12) is not None


def test_no_timeout_no_hang(
    clock: Clock, slots: list[ProgressSlot], workers: list[WorkerPlan]
) -> None:
    opened(slots)
    assert Looks(slots, workers, 0).after(clock, 100_000) is None


def test_after_the_run_the_script_may_do_what_it_wants(
    looks: Looks, clock: Clock, slots: list[ProgressSlot]
) -> None:
    opened(slots)
    for slot in slots:
        slot.waiting = AFTER_RUN
    assert looks.after(clock, 1000) is None


def test_a_launcher_that_was_stopped_has_seen_nothing(
    looks: Looks, clock: Clock, slots: list[ProgressSlot]
) -> None:
    opened(slots)
    assert looks.after(clock, 3) is None
    clock.now += 100_000  # nobody could move: the job was suspended
    assert looks.after(clock, 3) is None
    assert looks.after(clock, 5) is not None


def test_a_clock_that_jumps_is_not_looked_at(
    monkeypatch: pytest.MonkeyPatch, slots: list[ProgressSlot], workers: list[WorkerPlan]
) -> None:
    """The real module `time`, whose wall clock goes forward by a year and back again."""
    opened(slots)
    watch = HangWatch(slots, 30.0)
    for jump in (0.0, 3e7, -3e7):
        monkeypatch.setattr(time, "time", lambda jump=jump: 1e9 + jump)
        watch._looked -= 1.0
        assert watch.look(workers, {0: 1 << 30, 1: 1 << 30}, 2) is None
    assert watch._still < 5.0


def test_ranks_that_have_ended_are_not_looked_for(
    looks: Looks, clock: Clock, slots: list[ProgressSlot]
) -> None:
    opened(slots)
    del looks.pids[1]
    found = looks.after(clock, 20)
    assert found is not None
    assert found.verdict.name == "rank 0"
    looks.pids.clear()
    assert looks.after(clock, 100) is None


# --- the verdict ---------------------------------------------------------------------------------


def stand(rank: int, tmp_path: Path, **changes: object) -> RankPosition:
    fields: dict[str, object] = {
        "opened": True,
        "entered": 7,
        "waiting": BACKWARD,
        "step": 5,
        "stopped": False,
        "frames": (Frame("/home/me/train.py", 30, "main"),),
        "stacks": None,
    }
    return RankPosition(worker=worker(rank, tmp_path), **{**fields, **changes})  # type: ignore[arg-type]


def test_the_rank_with_fewest_collectives_is_behind(tmp_path: Path) -> None:
    stands = [
        stand(0, tmp_path),
        stand(1, tmp_path, entered=6, waiting=0, frames=(Frame("/home/me/t.py", 3, "spin"),)),
    ]
    verdict = hang.verdict(stands, 2, 1800)
    lines = verdict.text.splitlines()
    assert lines[0].startswith("lockstep: rank 1 of 2 on ")
    assert lines[0].endswith(" hangs: no rank has moved for 1800 s")
    assert lines[1] == "  rank 1 is in step 6 at /home/me/t.py:3 in spin"
    assert lines[2] == "  rank 0 waits in run.backward in step 6 at /home/me/train.py:30 in main"
    assert verdict.brief == "rank 1 hangs at /home/me/t.py:3 in spin"


def test_of_two_the_one_that_does_not_wait_is_behind(tmp_path: Path) -> None:
    found = hang.verdict([stand(0, tmp_path), stand(1, tmp_path, waiting=0)], 2, 5)
    assert found.name == "rank 1"


def test_a_stopped_rank_is_the_cause(tmp_path: Path) -> None:
    stands = [stand(0, tmp_path, entered=3), stand(1, tmp_path, stopped=True, frames=())]
    verdict = hang.verdict(stands, 2, 5)
    assert verdict.brief == "rank 1 is stopped (SIGSTOP)"
    assert "hint: a debugger, kill -STOP" in verdict.text


def test_a_rank_that_never_opened_the_run_is_behind(tmp_path: Path) -> None:
    stands = [stand(0, tmp_path, entered=1), stand(1, tmp_path, opened=False, waiting=0, entered=0)]
    text = hang.verdict(stands, 2, 5).text
    assert "rank 1 has not opened the run yet at /home/me/train.py:30 in main" in text


def test_a_verdict_over_many_ranks_fits_on_a_screen(tmp_path: Path) -> None:
    verdict = hang.verdict([stand(rank, tmp_path) for rank in range(1000)], 1000, 5)
    assert len(verdict.text.splitlines()) < 16
    assert "and 992 more" in verdict.text


# --- processes -----------------------------------------------------------------------------------


def test_a_process_that_does_not_expect_the_signal_is_spared(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        hang.dump([(worker(0, tmp_path), process.pid)])
        assert process.poll() is None
        assert not hang.is_stopped(process.pid)
    finally:
        process.communicate(b"\n", timeout=10)
    assert process.returncode == 0
    assert not hang.is_stopped(process.pid)


def test_a_worker_writes_its_stacks_beside_its_log(tmp_path: Path) -> None:
    code = (
        "import os; from lockstep.state.record import stacks; stacks.offer(os.environ); "
        "print(1, flush=True); input()"
    )
    one = worker(0, tmp_path)
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "TORCHELASTIC_ERROR_FILE": str(one.error_file)},
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"1\n"
        hang.dump([(one, process.pid)])
    finally:
        process.communicate(b"\n", timeout=10)
    (frame,) = stacks.main_thread((tmp_path / "rank-0.stacks").read_text())
    assert frame.function == "<module>"
