"""What the command line and the import cost before any work is done.

Claims: `import lockstep` takes at most 50 ms and does not import torch; `lockstep --help` takes at
most 400 ms.

Measured: whole processes, in turns; `python -c pass` is what Python itself takes.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from support import Report, in_turns, options_parser, run_quietly

PYTHON, IMPORT, HELP = "python -c pass", "python -c 'import lockstep'", "lockstep --help"


def milliseconds(command: list[str], directory: Path) -> float:
    """Return how long `command` takes as a whole."""
    started = time.perf_counter()
    run_quietly(command, cwd=directory)
    return 1e3 * (time.perf_counter() - started)


def lockstep_command() -> list[str]:
    """Return the installed command, or the module where there is none beside this Python."""
    script = Path(sys.executable).with_name("lockstep")
    return [str(script)] if script.exists() else [sys.executable, "-m", "lockstep"]


def imported() -> list[str]:
    """Return which heavy packages `import lockstep` brings along."""
    code = "import sys, lockstep; print(*{n.partition('.')[0] for n in sys.modules})"
    names = run_quietly([sys.executable, "-c", code]).split()
    return sorted({"torch", "numpy", "rich", "tqdm"} & set(names))


def verdict(what: str, value: float, limit: float) -> str:
    """Return a line about a claim in milliseconds."""
    holds = "holds" if value <= limit else "does not hold"
    return f"{what}: {value:.0f} ms; claim: at most {limit:.0f} ms: {holds}"


def main() -> None:
    options = options_parser(__doc__, pairs=15).parse_args()
    report = Report("Importing and asking for help", options.json)
    with tempfile.TemporaryDirectory() as place:
        commands = {
            PYTHON: [sys.executable, "-c", "pass"],
            IMPORT: [sys.executable, "-c", "import lockstep"],
            HELP: [*lockstep_command(), "--help"],
            "lockstep run --help": [*lockstep_command(), "run", "--help"],
        }
        cases = {name: partial(milliseconds, c, Path(place)) for name, c in commands.items()}
        rounds = in_turns(cases, options.pairs)
    report.compare("whole processes", "ms", rounds, reference=PYTHON, digits=1)
    own = [a - b for a, b in zip(rounds[IMPORT], rounds[PYTHON], strict=True)]
    heavy = ", ".join(imported()) or "none"
    notes = [
        verdict("import lockstep, beyond Python itself", statistics.median(own), 50),
        verdict(HELP, statistics.median(rounds[HELP]), 400),
        f"imported along with lockstep, of torch, numpy, rich and tqdm: {heavy}",
    ]
    print("\n" + "\n".join(f"- {note}" for note in notes))
    report.tables[-1]["notes"] = notes
    report.close()


if __name__ == "__main__":
    main()
