"""Forwarding to a logger that may lose what it was given: what a later generation gives it again."""

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lockstep.state.record import forwarding
from lockstep.state.record.given import Given, GivenFile
from lockstep.state.record.loggers import Backend


class Memory(Backend):
    """A logger that remembers what it was given.

    Args:
        held: what it says that it has of earlier generations.
    """

    keeps = False

    def __init__(self, held: Given | None) -> None:
        self.held = held
        self.losses: list[tuple[int, float]] = []
        self.fails_at = math.inf
        self.flushed = 0

    def log(self, values: Mapping[str, float], step: int) -> None:
        if step == self.fails_at:
            raise OSError("no route to the server")
        self.losses.append((step, values["loss"]))

    def flush(self) -> None:
        self.flushed = len(self.losses)


class Run:
    """A run directory in which generations log, and are killed."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory = directory
        self.said: list[str] = []
        self._patch = monkeypatch
        self._time = 0
        monkeypatch.setattr(forwarding, "_EVERY", 0.01)
        (directory / "events").mkdir()

    def _event(self, rank: int, kind: str, step: int, **fields: Any) -> None:
        self._time += 1
        with (self.directory / f"events/rank-{rank}.jsonl").open("a") as file:
            file.write(
                json.dumps({"time": self._time, "kind": kind, "step": step, **fields}) + "\n"
            )

    def generation(
        self,
        ranks: int,
        resumed: int,
        last: int,
        held: Given | None,
        *,
        killed: bool = True,
        fails_at: float = math.inf,
    ) -> list[tuple[int, float]]:
        """Train from step `resumed + 1` to `last`; return what a logger got.

        Rank k logs the step and 6 k; a logger gets the mean.
        """
        for rank in range(ranks):
            self._event(rank, "start", resumed)
        memory = Memory(held)
        memory.fails_at = fails_at
        self._patch.setattr(forwarding, "make", lambda *_: memory)
        opened = forwarding.Forwarding(
            ["wandb"],
            self.directory,
            {"name": "run"},
            ranks=ranks,
            resumed=resumed,
            say=self.said.append,
        )
        for rank in range(ranks):
            for step in range(resumed + 1, last + 1):
                loss = float(step + 6 * rank)
                self._event(rank, "log", step, replica=rank, weight=1 / ranks, loss=loss)
            self._event(rank, "pace", last)
        deadline = time.monotonic() + 20
        while memory.losses[-1:] < [(min(last, fails_at - 1), 0.0)]:
            assert time.monotonic() < deadline, (memory.losses, self.said)
            time.sleep(0.01)
        if killed:
            opened._ends.set()
            opened._thread.join()
        else:
            opened.close(ended=False, failed=False)
            assert memory.flushed == len(memory.losses)
        return memory.losses


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(tmp_path, monkeypatch)


def test_a_kill_makes_a_logger_lose_steps(run: Run) -> None:
    assert run.generation(1, 0, 6, None) == [(k, float(k)) for k in range(1, 7)]
    # It holds two of six; four of them were done before the newest snapshot.
    got = run.generation(1, 4, 8, (2, {"loss"}))
    assert got == [(k, float(k)) for k in range(3, 9)]


def test_a_logger_holds_more_than_was_noted(run: Run) -> None:
    run.generation(1, 0, 3, None)
    assert run.generation(1, 3, 6, (5, {"loss"})) == [(6, 6.0)]


def test_a_logger_that_tells_nothing_gets_what_is_new(run: Run) -> None:
    run.generation(1, 0, 6, None)
    assert run.generation(1, 4, 8, None) == [(7, 7.0), (8, 8.0)]


def test_a_logger_that_was_closed_has_lost_nothing(run: Run) -> None:
    """Its files may have been sent and removed."""
    run.generation(1, 0, 6, None, killed=False)
    assert run.generation(1, 6, 7, (0, frozenset())) == [(7, 7.0)]
    assert run.generation(1, 7, 8, (0, frozenset())) == [(7, 7.0), (8, 8.0)]


def test_steps_that_fewer_ranks_computed_again_have_the_later_values(run: Run) -> None:
    assert run.generation(4, 0, 6, None) == [(k, k + 9.0) for k in range(1, 7)]
    assert run.generation(2, 3, 7, (6, {"loss"})) == [(7, 10.0)]
    # Steps 4 to 6 were computed again without the other two ranks.
    got = run.generation(2, 7, 8, (2, {"loss"}))
    assert got == [(3, 12.0), *((k, k + 3.0) for k in range(4, 9))]


def test_a_logger_that_has_failed_gets_later_what_it_lacks(run: Run) -> None:
    assert run.generation(1, 0, 6, None, fails_at=4) == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert len(run.said) == 1
    assert "logger wandb has failed, and gets no more values: OSError: no route" in run.said[0]
    assert run.generation(1, 5, 8, None) == [(k, float(k)) for k in range(4, 9)]


def test_a_logger_that_is_new_when_nothing_is_left_to_train_gets_all(run: Run) -> None:
    run.generation(1, 0, 3, None, killed=False)
    (run.directory / "loggers/given-wandb-0.json").unlink()
    got = run.generation(1, 3, 3, None, killed=False)
    assert got == [(k, float(k)) for k in range(1, 4)]


def test_what_was_given_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "given.json"
    certain: Given = (0, frozenset())
    for value in ((3, {"loss", "accuracy"}), (20, {"x"})):
        file = GivenFile(path)
        file.write(value)
        file.close()
        again = GivenFile(path)
        assert (again.value, again.certain) == (value, certain)
        again.write(value, closed=True)
        again.close()
        certain = value
    assert path.stat().st_mode & 0o077 == 0


def test_a_damaged_file_is_named_and_left_closed(tmp_path: Path) -> None:
    path = tmp_path / "given.json"
    path.write_text("[3]")
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    with pytest.raises(ValueError, match=r"given\.json is damaged .*; remove it"):
        GivenFile(path)
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
