"""Time to the first batch when a run is resumed at 90 % of an epoch whose samples take 5 ms each.

Claim: at most twice the time of a fresh start of the same script.

Measured: in a process of its own each, batches of 16, one rank; once from the start of the process to
the first batch, once from the `for` alone. Beside Lockstep: torchdata's StatefulDataLoader, whose state
is saved with `torch.save`, and a DataLoader whose first 90 % are fetched again and left out.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from support import Claim, Report, in_turns, one_thread, options_parser, run_quietly

SCRIPT = Path(__file__).parent / "contestants" / "resumed.py"
NAMES = {"Lockstep": "lockstep", "StatefulDataLoader": "torchdata", "fetched again": "by-hand"}
LIMIT = 2.0


def start(who: str, directory: Path, batches: int, workers: int, what: str) -> None:
    """Start a contestant, and wait for its end."""
    command = [sys.executable, str(SCRIPT), who, str(batches), str(workers)]
    run_quietly(command, env={**one_thread(), "BENCHMARK_DOES": what}, cwd=directory)


def first_batch(
    who: str, saved: Path, batches: int, workers: int, what: str, loops: list[float]
) -> float:
    """Return the seconds to the first batch, from a copy of what was saved; add those of the loop."""
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place) / "copy"
        shutil.copytree(saved, directory)
        began = time.time()
        start(who, directory, batches, workers, what)
        moment, loop = map(float, (directory / "times").read_text(encoding="utf-8").split())
    loops.append(loop)
    return moment - began


def main() -> None:
    parser = options_parser(__doc__, pairs=7)
    parser.add_argument("--workers", nargs="+", type=int, default=[0, 2])
    parser.add_argument("--batches", type=int, default=60, help="of an epoch")
    options = parser.parse_args()
    report = Report("To the first batch at 90 % of an epoch", options.json)
    for workers in options.workers:
        with tempfile.TemporaryDirectory() as place:
            cases: dict[str, Callable[[], float]] = {}
            loops: dict[str, list[float]] = {}
            for name, who in NAMES.items():
                saved, empty = Path(place) / who, Path(place) / f"{who}-fresh"
                saved.mkdir()
                empty.mkdir()
                start(who, saved, options.batches, workers, "save")
                for what, there in (("fresh", empty), ("resume", saved)):
                    case = f"{name}, {what}"
                    loops[case] = []
                    cases[case] = partial(
                        first_batch, who, there, options.batches, workers, what, loops[case]
                    )
            starts = in_turns(cases, options.pairs)
        heading = f"num_workers={workers}, {options.batches} batches of 80 ms"
        counted = {name: values[-options.pairs :] for name, values in loops.items()}
        tell(report, f"{heading}, from the start of the process", starts)
        tell(report, f"{heading}, from the loop", counted)
    report.close()


def tell(report: Report, heading: str, rounds: Mapping[str, list[float]]) -> None:
    """Print one table, and judge the claim by it."""
    fresh, resumed = "Lockstep, fresh", "Lockstep, resume"
    claims = [Claim(resumed, fresh, LIMIT, at_most=True)]
    report.compare(heading, "s", rounds, reference=fresh, claims=claims, digits=3)


if __name__ == "__main__":
    main()
