"""VerifyResult of `lockstep verify`, from the outcomes of all layouts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.errors import RunError, UsageError
from lockstep.tools.verify.comparison import Coverage, Difference, compare, coverage, redone
from lockstep.tools.verify.layouts import Layout
from lockstep.tools.verify.running import Outcome, RunSpec, directory_name, run


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """Whether all layouts agree."""

    outcomes: Sequence[Outcome]
    difference: Difference | None  # the first one
    coverage: Coverage  # of the first layout where it is not exact, or of the first

    @property
    def same(self) -> bool:
        """Whether all layouts end with the same weights and saw the same samples."""
        digests = {outcome.digest for outcome in self.outcomes}
        return self.difference is None and len(digests) == 1 and None not in digests

    @property
    def holds(self) -> bool:
        """Whether the promise holds: the same everywhere, and each sample once per loop."""
        return self.same and self.coverage.is_exact

    def as_json(self) -> dict[str, Any]:
        """Return the verdict for `--json`."""
        difference = self.difference
        return {
            "same": self.same,
            "layouts": [
                {
                    "layout": outcome.layout.name,
                    "strategy": outcome.layout.strategy,
                    "digest": outcome.digest,
                    "steps": outcome.steps,
                    "seconds": round(outcome.seconds, 3),
                    "kills": outcome.kills,
                    "generations": outcome.generations,
                }
                for outcome in self.outcomes
            ],
            "difference": difference
            and {"step": difference.step, "what": difference.what, "text": difference.text},
            "samples": {
                "loops": self.coverage.loops,
                "twice": len(self.coverage.twice),
                "never": len(self.coverage.never),
            },
        }


def outcomes(layouts: Sequence[Layout], work: RunSpec, directory: Path) -> Iterable[Outcome]:
    """Run a script on every layout, and yield the outcomes.

    Raises:
        RunError: if the script fails on a layout otherwise than by a difference that the run has found.
        UsageError: if it makes no run.
    """
    steps = 0
    for number, layout in enumerate(layouts):
        if layout.random_kills is not None and not steps:
            raise UsageError(
                f"the script makes no steps on {layouts[0]}; expected some in which to kill ranks",
                hint="pass the optimizer through run.optimizer(…)",
            )
        outcome = run(layout, work, directory / directory_name(number, layout), steps)
        if outcome.exit_code and not outcome.differs:
            error = UsageError if outcome.exit_code == 2 else RunError
            raise error(f"the script fails on {layout}\n{outcome.complaint}")
        if outcome.digest is None and not outcome.differs:
            raise UsageError(
                "the script ends without a lockstep.Run; expected one to verify",
                hint="train inside `with lockstep.Run(…) as run:`",
            )
        steps = steps or outcome.steps
        yield outcome


def judge(outcomes: Sequence[Outcome]) -> VerifyResult:
    """Compare every layout with the first one, and what a layout did twice with itself."""
    first, *others = outcomes
    differences = [redone(outcome.traces, str(outcome.layout)) for outcome in outcomes]
    differences += [
        compare(first.traces, other.traces, str(first.layout), str(other.layout))
        for other in others
    ]
    found = [difference for difference in differences if difference is not None]
    earliest = min(found, key=lambda difference: difference.step, default=None)
    own = coverage(first.traces)
    # A layout whose ranks diverged stopped early: it has not reached the samples that it lacks.
    ended = [other.traces for other in others if other.digest is not None]
    known = [own, *(coverage(traces, first.traces.complete) for traces in ended)]
    return VerifyResult(outcomes, earliest, next((one for one in known if not one.is_exact), own))
