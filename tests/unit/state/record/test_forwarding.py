"""Forwarding to loggers: a generation continues after the last step that was forwarded."""

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import RunDirectoryError
from lockstep.state.record import forwarding
from lockstep.state.record.loggers import Backend


class Memory(Backend):
    """A logger that remembers its values; it may fail at a step."""

    def __init__(self, fails_at: float) -> None:
        self.losses: list[tuple[int, float]] = []
        self.fails_at = fails_at
        self.flushed = 0

    def log(self, values: Mapping[str, float], step: int) -> None:
        if step == self.fails_at:
            raise OSError("no route to the server")
        self.losses += [(step, value) for value in values.values()]

    def flush(self) -> None:
        self.flushed = len(self.losses)


class Run:
    """A run directory in which generations log, and are killed."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory = directory
        self.messages: list[str] = []
        self._patch = monkeypatch
        self._time = 0
        monkeypatch.setattr(forwarding, "_EVERY", 0.01)
        (directory / "events").mkdir()

    @property
    def progress(self) -> Path:
        return self.directory / "loggers/progress.json"

    def event(self, rank: int, kind: str, step: int, **fields: Any) -> None:
        self._time += 1
        with (self.directory / f"events/rank-{rank}.jsonl").open("a") as file:
            file.write(
                json.dumps({"time": self._time, "kind": kind, "step": step, **fields}) + "\n"
            )

    def forwarding(self, ranks: int, resumed: int) -> forwarding.Forwarding:
        return forwarding.Forwarding(
            ["wandb"],
            self.directory,
            {"name": "run"},
            ranks=ranks,
            resumed=resumed,
            say=self.messages.append,
        )

    def generation(
        self, ranks: int, resumed: int, last: int, *, fails_at: float = math.inf
    ) -> list[tuple[int, float]]:
        """Train from step `resumed + 1` to `last`, to be killed then; return what a logger got.

        Rank k logs the step and 6 k; a logger gets the mean.
        """
        memory = Memory(fails_at)
        self._patch.setattr(forwarding, "make", lambda *_: memory)
        for rank in range(ranks):
            self.event(rank, "start", resumed)
        opened = self.forwarding(ranks, resumed)
        for rank in range(ranks):
            for step in range(resumed + 1, last + 1):
                loss = float(step + 6 * rank)
                self.event(rank, "log", step, replica=rank, weight=1 / ranks, loss=loss)
            self.event(rank, "pace", last)
        deadline = time.monotonic() + 20
        while not self.progress.exists() or json.loads(self.progress.read_text())["step"] < last:
            assert time.monotonic() < deadline, (memory.losses, self.messages)
            time.sleep(0.01)
        opened._ends.set()
        opened._thread.join()
        assert memory.flushed == len(memory.losses) or fails_at < math.inf
        return memory.losses


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(tmp_path, monkeypatch)


def test_steps_that_are_computed_again_are_forwarded_once(run: Run) -> None:
    assert run.generation(1, 0, 6) == [(k, float(k)) for k in range(1, 7)]
    assert run.generation(1, 4, 8) == [(7, 7.0), (8, 8.0)]


def test_steps_that_fewer_ranks_compute_again_are_forwarded_once(run: Run) -> None:
    assert run.generation(4, 0, 6) == [(k, k + 9.0) for k in range(1, 7)]
    assert run.generation(2, 3, 7) == [(7, 10.0)]


def test_a_value_of_the_last_step_that_came_after_its_others_is_forwarded(run: Run) -> None:
    run.generation(1, 0, 3)
    run.event(0, "log", 3, replica=None, accuracy=0.5)
    assert run.generation(1, 3, 4) == [(3, 0.5), (4, 4.0)]


def test_a_kill_before_progress_is_noted_repeats_steps_and_loses_none(run: Run) -> None:
    run.generation(1, 0, 3)
    noted = run.progress.read_text()
    run.generation(1, 3, 6)
    run.progress.write_text(noted)
    assert run.generation(1, 6, 7) == [(k, float(k)) for k in range(4, 8)]


def test_a_logger_that_has_failed_gets_values_again_after_a_restart(run: Run) -> None:
    assert run.generation(1, 0, 6, fails_at=4) == [(1, 1.0), (2, 2.0), (3, 3.0)]
    (message,) = run.messages
    assert "logger wandb has failed, and gets no more values: OSError: no route" in message
    assert run.generation(1, 6, 8) == [(7, 7.0), (8, 8.0)]


def test_damaged_progress_is_named(run: Run) -> None:
    run.progress.parent.mkdir()
    run.progress.write_text("[3]")
    with pytest.raises(RunDirectoryError, match=r"progress\.json cannot be read"):
        run.forwarding(1, 0)
