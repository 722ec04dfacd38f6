"""A node with defects: `python -m tests.nodes.defective DEFECT,… WORD …` is `lockstep WORD …` on it.

What a machine has in hardware or in its system is put in from outside the package, in this process alone.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def clock() -> None:
    """Five minutes ahead; a time namespace has no clock of its own for the time of day."""
    now = time.time
    time.time = lambda: now() + 300


def versions() -> None:
    """Another version of NumPy, as it says itself."""
    import numpy as np

    np.__version__ = "1.26.4"


def bit() -> None:
    """A multiplication whose first result has a wrong bit."""
    import torch

    linear = torch.nn.functional.linear

    def defective(*given: Any) -> Any:
        outputs = linear(*given)
        outputs.data.view(-1).view(torch.int32)[0] ^= 1 << 12
        return outputs

    torch.nn.functional.linear = defective


def shm() -> None:
    """A full /dev/shm: `ip netns exec` has given this process mounts of its own."""
    mount = ("mount", "-t", "tmpfs", "-o", "size=1m", "none", "/dev/shm")
    subprocess.run(mount, check=True)
    Path("/dev/shm/full").write_bytes(bytes(1 << 20))


def interface() -> None:
    """An interface that vanishes as soon as something arrives in a measurement."""
    from lockstep.tools.doctor import links

    receive = links._receive_for

    def vanishing(line: Any, seconds: float) -> float:
        subprocess.run(("ip", "link", "delete", "eth0"), check=True)  # noqa: S607
        return receive(line, seconds)

    links._receive_for = vanishing


if __name__ == "__main__":
    from lockstep.cli import main

    for name in sys.argv[1].split(","):
        globals()[name]()
    sys.exit(main(sys.argv[2:]))
