"""Entry point of a spawned worker: `-m lockstep.launch.agent.bootstrap [--seeded] KIND TARGET ARGS`.

KIND says what TARGET is: `script`, `module`, or `function` (a file with a pickled function). With
`--seeded` the generators of Python, NumPy and torch are seeded before the script, alike on all ranks.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from pathlib import Path


def main() -> None:
    """Run the script, module or function that the command line names, and exit with its exit code.

    If the script, module or function raises an exception, a report is written for the launcher.
    """
    from lockstep.launch import functions
    from lockstep.launch.agent import worker
    from lockstep.launch.plan import SEEDED
    from lockstep.launch.target import seeding

    is_seeded = sys.argv[1] == SEEDED
    kind, name, *args = sys.argv[1 + is_seeded :]
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable()
    if kind == "function":
        sys.exit(functions.run_spawned(Path(name)))
    if is_seeded:
        seeding.seed_generators(os.environ)
    code = worker.run_target(kind, name, args)
    worker.limit_end(code)
    sys.exit(code)


if __name__ == "__main__":
    main()
