"""A worker in a fresh interpreter: `python -m lockstep.launch.bootstrap KIND TARGET ARGS`."""

from __future__ import annotations

import faulthandler
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from lockstep.launch.spec import TargetKind


def main() -> None:
    """Run the target that the command line names, with Lockstep's reporting around it."""
    from lockstep.launch import functions, seeding, source, worker
    from lockstep.launch.spec import LaunchSpec

    kind, name, *args = sys.argv[1:]
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable()
    if kind == "function":
        sys.exit(functions.run_spawned(Path(name)))
    if source.imports(LaunchSpec(target=name, kind=cast("TargetKind", kind)), "lockstep"):
        seeding.seed_generators(os.environ)
    sys.exit(worker.run_target(kind, name, args))


if __name__ == "__main__":
    main()
