"""In which order layouts are launched, and what becomes of one that fails."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.errors import UsageError
from lockstep.tools.bench.benchmark import Launches
from lockstep.tools.bench.combinations import Combination
from lockstep.tools.bench.measuring import Measurements
from lockstep.tools.bench.results import Trial

RUN = Measurements(
    steps=10,
    batch=64.0,
    step_seconds=0.1,
    slowest_step=0.2,
    compute_seconds=0.1,
    exchange_seconds=0.0,
    data_seconds=0.0,
    exchange_share=0.0,
    data_share=0.0,
)


class Runner:
    """Launches nothing, and notes what would have been launched."""

    def __init__(self, fails_at: int | None = None, measured: Measurements | None = RUN) -> None:
        self.fails_at, self.measured = fails_at, measured
        self.done: list[str] = []

    def run(self, combination: Combination, directory: Path) -> Trial:
        directory.mkdir()
        self.done.append(str(combination.ranks))
        failed = combination.ranks == 2 and self.done.count("2") == self.fails_at
        return Trial(
            combination=combination,
            exit_code=int(failed),
            wall_seconds=5.0 + len(self.done),
            measured=None if failed else self.measured,
            verdict="it broke" if failed else "",
        )

    def restart(self, run: Measurements, combination: Combination, directory: Path) -> float:
        assert run is RUN
        directory.mkdir()
        self.done.append(f"{combination.ranks} killed")
        return 0.5


@pytest.fixture
def launches(tmp_path: Path) -> Callable[..., tuple[Launches, list[str]]]:
    def make(
        runner: Runner, *, keep: bool = False, ranks: tuple[int, ...] = (1, 2)
    ) -> tuple[Launches, list[str]]:
        said: list[str] = []
        combinations = [Combination(count) for count in ranks]
        return Launches(runner, combinations, tmp_path, keep, said.append), said  # type: ignore[arg-type]

    return make


def test_rounds_are_interleaved_and_leave_nothing(launches, tmp_path: Path) -> None:
    work = Runner()
    one, said = launches(work)
    one.run(2, restarts=True)
    assert work.done == ["1", "2", "1", "2", "1 killed", "2 killed"]
    assert list(tmp_path.iterdir()) == []
    assert said[0] == "round 1 of 2: 1 rank: 640.0 samples/s, 6.0 s"
    assert said[-1] == "restart after a kill: 2 ranks: 0.50 s"
    rows = one.rows(cores=4)
    assert [row["repeats"] for row in rows] == [2, 2]
    assert rows[0]["wall_seconds_range"] == [6.0, 8.0]
    assert [row["restart_seconds"] for row in rows] == [0.5, 0.5]


def test_runs_are_kept_where_that_is_asked_for(launches, tmp_path: Path) -> None:
    one, _ = launches(Runner(), keep=True)
    one.run(2, restarts=False)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["1-rank.1", "1-rank.2", "2-ranks.1", "2-ranks.2"]


def test_what_fails_is_not_tried_again_and_keeps_what_was_measured(launches) -> None:
    work = Runner(fails_at=2)
    one, _ = launches(work)
    one.run(3, restarts=True)
    assert work.done == ["1", "2", "1", "2", "1", "1 killed"]
    first, second = one.rows(cores=4)
    assert (first["repeats"], first["verdict"]) == (3, None)
    assert (second["repeats"], second["verdict"], second["exit_code"]) == (1, "it broke", 1)
    assert second["speedup"] == 1, "both take as long in this test"


def test_strategies_of_a_script_without_a_run(launches) -> None:
    work = Runner(measured=None)
    one, _ = launches(work)
    one.run(1, restarts=True)
    assert work.done == ["1", "2"], "no restart either"
    asked = Launches(work, [Combination(1, "ddp")], one.directory, False, print)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="ddp was asked for, and the script makes no"):
        asked.run(1, restarts=False)
