"""`Machine`: the facts about this machine that a plan depends on."""

from __future__ import annotations

import contextlib
import os
import platform
import socket
from dataclasses import dataclass
from pathlib import Path

from lockstep.launch.agent.child import Child, LostError
from lockstep.launch.devices.gpus import Gpu, Listing, list_gpus, parts, visible
from lockstep.launch.devices.openmp import loaded_unbound
from lockstep.world.cores import Topology, topology, usable_cores

_TIMEOUT = 60.0  # seconds; for a driver that hangs


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Facts about one machine."""

    cores: int  # that this process may use
    gpus: int = 0  # accelerators that torch sees
    cards: tuple[Gpu, ...] = ()  # all GPUs of the machine, as far as they can be told apart
    problem: str | None = None  # why there are no GPUs, or no facts about them
    visible_variable: str = "CUDA_VISIBLE_DEVICES"
    device_type: str = "cuda"  # as torch names it
    topology: Topology = ()  # cores by NUMA node
    loopback: str | None = "lo"


def look(*, gpus: bool = True) -> Machine:
    """Return the facts of this machine; imports torch, and does not initialise CUDA."""
    with loaded_unbound():
        import torch  # noqa: F401

        from lockstep.world import accelerator

    listing = _listing() if gpus else Listing(problem="they were not asked for")
    return Machine(
        cores=usable_cores(),
        gpus=_count(listing) if gpus else 0,
        cards=listing.gpus,
        problem=listing.problem,
        visible_variable=accelerator.facts().visible,
        device_type=accelerator.kind() or "cuda",
        topology=topology(),
        loopback="lo" if "lo" in (name for _, name in socket.if_nameindex()) else None,
    )


def _listing() -> Listing:
    import torch

    from lockstep.world import accelerator

    if torch.version.cuda is not None:
        listing = list_gpus()
        return listing if listing.gpus or listing.problem else Listing(problem="there are none")
    if accelerator.kind() is not None:
        return Listing(
            problem=f"ids are read from nvidia-smi, which knows no {accelerator.facts().label}"
        )
    return Listing(problem=f"torch {torch.__version__} is built for processors only")


def _count(listing: Listing) -> int:
    """Return how many GPUs torch sees."""
    from lockstep.world import accelerator

    left = visible(listing.gpus, os.environ).gpus
    # Which MIG devices CUDA shows, and what beside them, has changed with its versions.
    if listing.gpus and not any(parts(gpu, listing.gpus) for gpu in left):
        return len(left)
    if accelerator.kind() is None:
        return 0
    return accelerator.count() if accelerator.is_initialized() else count_in_a_child()


def count_in_a_child() -> int:
    """Return the driver's own count of GPUs; a process that has asked for it cannot be forked any more."""

    def count(_: object) -> int:
        from lockstep.world import accelerator

        accelerator.module().init()
        return accelerator.count()

    with contextlib.suppress(LostError):  # workers will fail for the same reason, and say it
        return int(Child(count).give(None).result(_TIMEOUT))
    return 0


def processor() -> str:
    """Return the model of the processor."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
