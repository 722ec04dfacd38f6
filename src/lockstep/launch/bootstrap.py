"""A worker in an interpreter of its own: `python -m lockstep.launch.bootstrap KIND TARGET ARGS`."""

from __future__ import annotations

import faulthandler
import sys
from pathlib import Path


def main() -> None:
    """Run the target that the command line names, with Lockstep's reporting around it."""
    from lockstep.launch import functions, worker

    kind, name, *args = sys.argv[1:]
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable()
    if kind == "function":
        sys.exit(functions.run_spawned(Path(name)))
    sys.exit(worker.run_target(kind, name, args))


if __name__ == "__main__":
    main()
