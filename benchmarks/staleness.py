"""Two workers and a parameter server, where a worker is late: the time of a step, by staleness.

Claims: where workers take turns at being late, a staleness of 4 takes at most 0.8 of the time that a
staleness of 0 takes. Where the same worker is always late nothing can be gained: every update is made of
the gradients of all workers, so that the slowest sets the pace.

Measured: a perceptron, global batches of 64, one thread each, SGD with momentum; mean time of a step of the
main rank over 200 steps, after 20 others. A late worker sleeps 50 ms before its pass: `turns`, each worker
in two batches in a row; `one`, worker 1 in every batch. The contestants take turns, a launch each.

`--other PATH` adds the same from another checkout of Lockstep, whose interpreter is PATH/.venv/bin/python.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from support import Claim, Report, one_thread, options_parser

SCRIPT = Path(__file__).parent / "contestants" / "late_workers.py"
WAYS = {
    "ddp": ("--strategy", "ddp"),
    **{
        f"ps, staleness {k}": ("--strategy", "ps", "--servers", "1", "--staleness", str(k))
        for k in (0, 1, 4)
    },
}
_TOLD = "told: "


def train(python: str, way: tuple[str, ...], late: str, steps: int) -> float:
    """Return the mean time of a step in milliseconds."""
    # The other checkout may refuse a staleness with --exact.
    command = [python, "-m", "lockstep", "run", "-n", "2", "--no-exact", *way]
    env = one_thread()
    env.pop("PYTHONPATH", None)
    with tempfile.TemporaryDirectory() as directory:
        done = subprocess.run(
            [*command, str(SCRIPT), "--late", late, "--steps", str(steps)],
            cwd=directory,
            env=env,
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        )
    (line,) = (line for line in done.stdout.splitlines() if line.startswith(_TOLD))
    return float(json.loads(line.removeprefix(_TOLD))["ms"])


def main() -> None:
    parser = options_parser(__doc__, pairs=5)
    parser.add_argument("--other", type=Path, metavar="PATH")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    pythons = {"": sys.executable}
    if options.other is not None:
        pythons[f" ({options.other.name})"] = str(options.other / ".venv/bin/python")
    report = Report("Staleness", options.json)
    for late in ("turns", "one", "none"):
        rounds: dict[str, list[float]] = defaultdict(list)
        for _ in range(options.pairs):
            for name, way in WAYS.items():
                for suffix, python in pythons.items():
                    rounds[name + suffix].append(train(python, way, late, options.steps))
        claims = [Claim("ps, staleness 4", "ps, staleness 0", 0.8, at_most=True)]
        report.compare(
            f"Late: {late}",
            "ms per step",
            rounds,
            reference="ps, staleness 0",
            claims=claims if late == "turns" else [],
            digits=1,
        )
    report.close()


if __name__ == "__main__":
    main()
