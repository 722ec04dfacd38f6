"""All launches of a benchmark, round after round."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from lockstep.errors import UsageError
from lockstep.tools.bench.combinations import Combination
from lockstep.tools.bench.results import Row, add_speedups, row
from lockstep.tools.bench.trials import Runner, Trial

Listener = Callable[[str], None]
Value = TypeVar("Value")


@dataclass(slots=True)
class Launches:
    """Launches of a script on several combinations.

    A run's directory is removed when it has been read, unless `keep`.
    """

    runner: Runner
    combinations: Sequence[Combination]
    directory: Path
    keep: bool
    say: Listener
    _trials: dict[Combination, list[Trial]] = field(default_factory=dict)
    _restarts: dict[Combination, float | None] = field(default_factory=dict)

    def run(self, rounds: int, *, restarts: bool) -> None:
        """Run every combination once per round; one that has failed is left out from then on.

        Raises:
            UsageError: for strategies or exchanges of a script that does not use Lockstep.
        """
        for number in range(1, rounds + 1):
            for combination in self._alive():
                trial = self._in(f"{number}", combination, self.runner.run)
                self._trials.setdefault(combination, []).append(trial)
                asked = combination.strategy or combination.exchange
                if asked and not trial.verdict and trial.measured is None:
                    raise UsageError(
                        f"{asked} was asked for, and the script makes no lockstep.Run; expected one",
                        hint="without --strategies and --exchanges the wall time of the script is measured",
                    )
                self.say(f"round {number} of {rounds}: {combination}: {_described(trial)}")
        for combination in self._alive() if restarts else ():
            self._restart(combination)

    def _alive(self) -> list[Combination]:
        return [
            one
            for one in self.combinations
            if not any(trial.verdict for trial in self._trials.get(one, ()))
        ]

    def _restart(self, combination: Combination) -> None:
        trial = self._trials[combination][-1]
        if trial.measured is None:
            return

        seconds = self._in("restart", combination, partial(self.runner.restart, trial.measured))
        self._restarts[combination] = seconds
        took = "the run did not resume" if seconds is None else f"{seconds:.2f} s"
        self.say(f"restart after a kill: {combination}: {took}")

    def _in(
        self, name: str, combination: Combination, launch: Callable[[Combination, Path], Value]
    ) -> Value:
        layout = re.sub(r"[^0-9a-z]+", "-", str(combination))
        directory = self.directory / f"{layout}.{name}"
        try:
            return launch(combination, directory)
        finally:
            if not self.keep:
                shutil.rmtree(directory, ignore_errors=True)

    def rows(self, cores: int) -> list[Row]:
        """Return a row of results for each combination; `cores` are those of this machine."""
        rows = [
            row(one, self._trials.get(one, ()), self._restarts.get(one), cores)
            for one in self.combinations
        ]
        add_speedups(rows)
        return rows


def _described(trial: Trial) -> str:
    if trial.verdict and not trial.exit_code:
        return trial.verdict.partition("\n")[0]
    if trial.verdict:
        return f"failed, exit code {trial.exit_code}"
    if trial.measured is None:
        return f"{trial.wall_seconds:.1f} s, no lockstep.Run: measured by wall time"
    run = trial.measured
    return f"{run.batch / run.step_seconds:,.1f} samples/s, {trial.wall_seconds:.1f} s"
