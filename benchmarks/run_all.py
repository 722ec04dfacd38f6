"""Runs all benchmarks one after the other and prints their tables; `make bench` calls it.

`--pairs K` gives every benchmark K rounds instead of its own number, `--json DIRECTORY` keeps all
numbers in one file each.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

NAMES = (
    *("imports", "order", "start", "step", "exchange", "unused", "mpi"),
    *("segmentation", "article", "develop", "recording", "audit", "same_weights"),
    *(
        "restart",
        "goodput",
        "checkpoint",
        "resume",
        "snapshot",
        "sharded_state",
        "slow_link",
        "hosts",
        "launchers",
        "staleness",
        "projection",
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, metavar="K")
    parser.add_argument("--json", type=Path, metavar="DIRECTORY")
    parser.add_argument("names", nargs="*", default=NAMES, metavar="NAME", help=", ".join(NAMES))
    options = parser.parse_args()
    here = Path(__file__).parent
    for name in options.names:
        command = [sys.executable, str(here / f"{name}.py")]
        if options.pairs:
            command += ["--pairs", str(options.pairs)]
        if options.json:
            options.json.mkdir(parents=True, exist_ok=True)
            command += ["--json", str(options.json / f"{name}.json")]
        if subprocess.run(command, check=False).returncode:
            print(f"{name} did not come to its end\n", flush=True)


if __name__ == "__main__":
    main()
