"""What a person waits for who works on a script: two ranks, from the command to what is to be seen.

Claims: Lockstep's first step is done sooner than with torchrun, Accelerate and spawn. After a bug the
prompt is back sooner than with any of them, and fewer lines of output come after the bug's line.

Measured: `contestants/developing.py`, the same small network by Lockstep, by DDP under torchrun, by
Accelerate under torchrun, and by DDP under `torch.multiprocessing.spawn`. Each launch is fresh; they take
turns.

- first step: from the command to the first completed step;
- bug to line: rank 1 raises in step 5; from there until the terminal first shows the file and the line;
- bug to prompt: until the command has ended;
- lines to prompt: from the last line on the terminal that names the file and the line, to the end;
- launches until the line: 1 where the first one named it. Only the one that did is in the other figures.

The time from a killed process to the next step is in `restart.py`.
"""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from support import Claim, Report, one_thread, options_parser, torchrun

SCRIPT = Path(__file__).parent / "contestants" / "developing.py"
_LINE = next(
    number for number, line in enumerate(SCRIPT.read_text().splitlines(), 1) if "BUG" in line
)
#: How Lockstep's verdict and Python's tracebacks name it.
_NAMES = (f"{SCRIPT.name}:{_LINE}".encode(), f'{SCRIPT.name}", line {_LINE}'.encode())
_BUG = 5
_SECONDS = 120.0
_TRIES = 10
_MEASURED = {
    "first step": "s",
    "bug to line": "s",
    "bug to prompt": "s",
    "lines to prompt": "lines",
    "launches until the line": "launches",
}
LOCKSTEP, TORCHRUN = "lockstep run", "torchrun"
COMMANDS = {
    LOCKSTEP: [sys.executable, "-m", "lockstep", "run", "-n", "2", str(SCRIPT), "lockstep"],
    TORCHRUN: torchrun(2, SCRIPT, "hand"),
    "Accelerate, torchrun": torchrun(2, SCRIPT, "accelerate"),
    "spawn": [sys.executable, str(SCRIPT), "spawn"],
}


@dataclass(frozen=True)
class Seen:
    """When what was seen: moments of `time.time`.

    Attributes:
        line: the bug's line; `None` if it never came.
        below: lines from the last one that names it to the end.
        end: the end of the command.
        marks: what the ranks wrote: kinds and moments.
    """

    line: float | None
    below: int
    end: float
    marks: list[tuple[str, float]]

    def first(self, kind: str) -> float:
        """Return when the first of a kind was."""
        return min(moment for what, moment in self.marks if what == kind)


def watch(command: list[str], directory: Path, *, fails: bool) -> Seen:
    """Run `command`, and look at what it shows while it does."""
    marks = directory / "marks"
    marks.unlink(missing_ok=True)
    process = subprocess.Popen(
        [*command, str(marks), *(("--bug", str(_BUG)) if fails else ())],
        cwd=directory,
        env=one_thread(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.stdout is not None
    shown, line = b"", None
    deadline = time.time() + _SECONDS
    with selectors.DefaultSelector() as selector, process.stdout as output:
        selector.register(output, selectors.EVENT_READ)
        while selector.select(deadline - time.time()):
            part = os.read(output.fileno(), 1 << 16)
            shown += part
            if line is None and any(name in shown for name in _NAMES):
                line = time.time()
            if not part:
                break
    if process.poll() is None and time.time() > deadline:
        process.kill()
    process.wait()
    written = [text.split() for text in marks.read_text(encoding="utf-8").splitlines()]
    last = max(shown.rfind(name) for name in _NAMES)
    return Seen(
        line,
        shown.count(b"\n", last),
        time.time(),
        [(what, float(moment)) for moment, what in written],
    )


def watch_bug(name: str, command: list[str], directory: Path) -> tuple[Seen, int]:
    """Return a launch that named the bug's line, and how many before it did not.

    `torch.multiprocessing.spawn` shows the error of one process, and it may be of the other rank.
    """
    for silent in range(_TRIES):
        if (seen := watch(command, directory, fails=True)).line is not None:
            return seen, silent
    raise SystemExit(f"{name} did not show the line of the bug in {_TRIES} launches")


def main() -> None:
    options = options_parser(__doc__, pairs=5).parse_args()
    report = Report("Developing", options.json)
    rounds: dict[str, dict[str, list[float]]] = {
        what: {name: [] for name in COMMANDS} for what in _MEASURED
    }
    with tempfile.TemporaryDirectory() as place:
        for number in range(options.pairs + 1):
            for name, command in COMMANDS.items():
                began = time.time()
                sound = watch(command, Path(place), fails=False)
                broken, silent = watch_bug(name, command, Path(place))
                assert broken.line is not None, "watch_bug returns no other"
                if number:  # the first round warms the disk
                    bug = broken.first("bug")
                    rounds["first step"][name].append(sound.first("step") - began)
                    rounds["bug to line"][name].append(broken.line - bug)
                    rounds["launches until the line"][name].append(silent + 1)
                    rounds["bug to prompt"][name].append(broken.end - bug)
                    rounds["lines to prompt"][name].append(broken.below)
    others = [name for name in COMMANDS if name != LOCKSTEP]
    claims = {
        "first step": [Claim(name, LOCKSTEP, 1.0, at_most=False) for name in others],
        "bug to prompt": [Claim(name, LOCKSTEP, 1.0, at_most=False) for name in others],
        "lines to prompt": [Claim(name, LOCKSTEP, 1.0, at_most=False) for name in others],
    }
    for what, measured in rounds.items():
        digits = 2 if _MEASURED[what] == "s" else 0
        of = claims.get(what, [])
        report.compare(
            what, _MEASURED[what], measured, reference=LOCKSTEP, claims=of, digits=digits
        )
    report.close()


if __name__ == "__main__":
    main()
