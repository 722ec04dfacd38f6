"""Time to the first batch when a run is resumed at 90 % of an epoch whose samples take 5 ms each.

Claim: at most twice the time of a fresh start of the same script.

Measured: in a process of its own each, everything imported, from before the run or the loader is made
to the first batch; batches of 16, one rank. Beside Lockstep: torchdata's StatefulDataLoader, whose state
is saved with `torch.save`, and a DataLoader whose first 90 % are fetched again and left out.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path

from support import Claim, Report, in_turns, one_thread, options_parser, run_quietly

SCRIPT = Path(__file__).parent / "contestants" / "resumed.py"
NAMES = {"Lockstep": "lockstep", "StatefulDataLoader": "torchdata", "fetched again": "by-hand"}
FRESH, RESUMED = "{}, fresh", "{}, resumed"
LIMIT = 2.0


def start(who: str, directory: Path, batches: int, workers: int, what: str) -> None:
    """Start a contestant, and wait for its end."""
    command = [sys.executable, str(SCRIPT), who, str(batches), str(workers)]
    run_quietly(command, env={**one_thread(), "BENCHMARK_DOES": what}, cwd=directory)


def first_batch(who: str, saved: Path, batches: int, workers: int, what: str) -> float:
    """Return the seconds to the first batch, from a copy of what was saved."""
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place) / "copy"
        if what == "resume":
            shutil.copytree(saved, directory)
        else:
            directory.mkdir()
        start(who, directory, batches, workers, what)
        return float((directory / "seconds").read_text(encoding="utf-8"))


def main() -> None:
    parser = options_parser(__doc__, pairs=7)
    parser.add_argument("--workers", nargs="+", type=int, default=[0, 2])
    parser.add_argument("--batches", type=int, default=60, help="of an epoch")
    options = parser.parse_args()
    report = Report("To the first batch at 90 % of an epoch", options.json)
    for workers in options.workers:
        with tempfile.TemporaryDirectory() as place:
            cases = {}
            for name, who in NAMES.items():
                saved = Path(place) / who
                saved.mkdir()
                start(who, saved, options.batches, workers, "save")
                measure = partial(first_batch, who, saved, options.batches, workers)
                cases[FRESH.format(name)] = partial(measure, "fresh")
                cases[RESUMED.format(name)] = partial(measure, "resume")
            rounds = in_turns(cases, options.pairs)
        fresh, resumed = FRESH.format("Lockstep"), RESUMED.format("Lockstep")
        report.compare(
            f"num_workers={workers}, {options.batches} batches of 80 ms",
            "s",
            rounds,
            reference=fresh,
            claims=[Claim(resumed, fresh, LIMIT, at_most=True)],
            digits=3,
        )
    report.close()


if __name__ == "__main__":
    main()
