"""What a plan needs to know about the machine."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from lockstep.world.cores import usable_cores


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Facts about one machine, small enough to make up in a test.

    Attributes:
        cores: processors that this process may use.
        gpus: accelerators that torch sees.
        loopback: name of the loopback interface, `None` where there is none.
    """

    cores: int
    gpus: int = 0
    loopback: str | None = "lo"


def look() -> Machine:
    """Return the facts of this machine; imports torch, and does not initialise CUDA."""
    import torch

    return Machine(
        cores=usable_cores(), gpus=torch.cuda.device_count(), loopback=_loopback_interface()
    )


def _loopback_interface() -> str | None:
    names = [name for _, name in socket.if_nameindex()]
    return "lo" if "lo" in names else None
