"""From the command to the first collective: `lockstep run` against torchrun.

Claims, at 4 ranks: at most 1.3 times `python -c 'import torch'`, and at least 2.5 times faster than
torchrun.

Measured: the same plain torch.distributed script, which writes the time when its first all-reduce
is done; launchers in turns, each in a fresh process. `import torch` is measured twice: as the
process as a whole, which also takes torch down again, and up to the moment when it is imported.
"""

from __future__ import annotations

import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from support import Claim, Report, in_turns, options_parser, run_quietly, torchrun

SCRIPT = Path(__file__).parent / "contestants" / "first_collective.py"
LOCKSTEP, TORCHRUN, IMPORT = "lockstep run", "torchrun", "import torch"
_IMPORTED = "import sys, time, torch; open(sys.argv[1], 'w').write(repr(time.time()))"


def until_written(command: list[str], place: Path) -> float:
    """Return the seconds from the start of `command` to the time that it writes to `place`."""
    place.unlink(missing_ok=True)
    started = time.time()
    run_quietly([*command, str(place)], cwd=place.parent)
    return float(place.read_text(encoding="utf-8")) - started


def until_ended(command: list[str], directory: Path) -> float:
    """Return the seconds that `command` takes as a whole."""
    started = time.time()
    run_quietly(command, cwd=directory)
    return time.time() - started


def main() -> None:
    parser = options_parser(__doc__, pairs=7)
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    options = parser.parse_args()
    report = Report("Launch to first collective", options.json)
    for n in options.ranks:
        with tempfile.TemporaryDirectory() as place:
            directory = Path(place)
            written = directory / "time"
            lockstep = [sys.executable, "-m", "lockstep", "run", "-n", str(n), str(SCRIPT)]
            torch_alone = [sys.executable, "-c", "import torch"]
            cases = {
                LOCKSTEP: partial(until_written, lockstep, written),
                TORCHRUN: partial(until_written, torchrun(n, SCRIPT), written),
                IMPORT: partial(until_ended, torch_alone, directory),
                "import torch, until imported": partial(
                    until_written, [sys.executable, "-c", _IMPORTED], written
                ),
            }
            rounds = in_turns(cases, options.pairs)
        report.compare(
            f"{n} ranks",
            "s",
            rounds,
            reference=LOCKSTEP,
            claims=[
                Claim(LOCKSTEP, IMPORT, 1.3, at_most=True),
                Claim(TORCHRUN, LOCKSTEP, 2.5, at_most=False),
            ],
            digits=2,
        )
    report.close()


if __name__ == "__main__":
    main()
