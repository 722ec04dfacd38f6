"""The training of `with_lockstep.py` under Lockstep's own launcher; counts its snapshots.

`--without` takes the memory for snapshots away, as if another launcher had started this rank.
`--counted FILE` says where to write how many there were, and what they took.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from contestants import with_lockstep

from lockstep.state.checkpoint.shared_memory import VARIABLE
from lockstep.state.checkpoint.snapshot_schedule import SnapshotSchedule


def count() -> list[float]:
    """Return a list to which every snapshot adds its seconds."""
    taken: list[float] = []
    take = SnapshotSchedule.take

    def timed(self: SnapshotSchedule, number: int, text: str, tensors: Any, began: float) -> None:
        take(self, number, text, tensors, began)
        taken.append(time.monotonic() - began)

    SnapshotSchedule.take = timed  # type: ignore[method-assign]
    return taken


def argument(name: str) -> str:
    """Take an argument of this script's own out of the command line, and return its value."""
    place = sys.argv.index(name)
    _, value = sys.argv[place : place + 2]
    del sys.argv[place : place + 2]
    return value


def main() -> None:
    counted = Path(argument("--counted"))
    if "--without" in sys.argv:
        sys.argv.remove("--without")
        del os.environ[VARIABLE]
    taken = count()
    with_lockstep.main()
    if os.environ["RANK"] == "0":
        counted.write_text(json.dumps(taken), encoding="utf-8")


if __name__ == "__main__":
    main()
