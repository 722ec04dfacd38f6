"""What snapshots in host memory cost: Lockstep with and without them, ResNet-18, two ranks.

Claim: less than 2 % of the step time.

Measured: one epoch per turn, both contestants running at the same time and taking turns, one thread per
rank, like `step.py`; an epoch has 24 steps of 16 images of 32x32 per rank. Both are started by
`lockstep run`; one takes the launcher's memory away before it opens its run, so that it has no
snapshots. The second table says how many the other one took, at the interval that it chose itself.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from support import Claim, Report, options_parser
from teams import Contestant, Work, compete

WITH, WITHOUT = "with snapshots", "without"
WORKS = {
    "resnet18": Work("resnet18", batch=16, steps=24),
    "mlp": Work("mlp", batch=32, steps=1000),
}
LIMIT = 1.02
_WARM_UP = 2


@dataclass(frozen=True)
class Launched(Contestant):
    """A contestant that `lockstep run` starts."""

    def command(self, n: int, words: Sequence[str]) -> list[str]:
        """Return the command that starts `n` ranks of it."""
        script = Path(__file__).parent / "contestants" / f"{self.script}.py"
        run = [sys.executable, "-m", "lockstep", "run", "-n", str(n)]
        return [*run, "--checkpoint-every", "0", str(script), *words]


def contestant(counted: Path, *words: str) -> Contestant:
    """Return a contestant that leaves its counts at `counted`."""
    return Launched("with_snapshots", ("--counted", str(counted), *words), records=True)


def main() -> None:
    parser = options_parser(__doc__, pairs=25)
    parser.add_argument("--models", nargs="+", choices=WORKS, default=["resnet18"])
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    report = Report("Snapshots in host memory", options.json)
    for model in options.models:
        with tempfile.TemporaryDirectory() as place:
            counted = Path(place) / "with"
            contestants = {
                WITH: contestant(counted),
                WITHOUT: contestant(Path(place) / "without", "--without"),
            }
            work, n = WORKS[model], options.ranks
            rounds = compete(contestants, n, work, options.pairs, warm_up=_WARM_UP)
            taken = json.loads(counted.read_text(encoding="utf-8"))
        claims = [Claim(WITH, WITHOUT, LIMIT, at_most=True)]
        heading = f"{model}, {n} ranks"
        report.compare(heading, "µs/step", rounds, reference=WITHOUT, claims=claims)
        steps = work.steps * (options.pairs + _WARM_UP)
        tell(report, heading, taken, steps, statistics.median(rounds[WITH]) * steps / 1e6)
    report.close()


def tell(report: Report, heading: str, taken: list[float], steps: int, seconds: float) -> None:
    """Print how many snapshots there were, and what they took by themselves."""
    columns = ["snapshots", "of steps", "median ms", "min to max", "part of all time"]
    row = [
        str(len(taken)),
        str(steps),
        f"{1e3 * statistics.median(taken):.2f}",
        f"{1e3 * min(taken):.2f} to {1e3 * max(taken):.2f}",
        f"{sum(taken) / seconds:.2%}",
    ]
    report.table(f"{heading}, what was taken by rank 0", columns, [row])


if __name__ == "__main__":
    main()
