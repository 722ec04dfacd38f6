"""`Machine`: numbers of cores and GPUs, and other facts of this machine that a launch depends on."""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import dataclass

from lockstep.launch.agent.child import Child, LostError
from lockstep.launch.devices.gpus import Gpu, Listing, list_gpus, parts, visible
from lockstep.launch.devices.openmp import loaded_unbound
from lockstep.world.cores import Topology, topology, usable_cores

_TIMEOUT = 60.0  # seconds that a driver has to count its GPUs


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Cores, GPUs and network facts of one machine."""

    cores: int  # physical cores that this process may use
    gpus: int = 0  # number of accelerators that torch finds
    cards: tuple[Gpu, ...] = ()  # all GPUs of the machine, if nvidia-smi lists them
    problem: str | None = None  # reason why there are no GPUs, or no list of them
    visible_variable: str = "CUDA_VISIBLE_DEVICES"
    device_type: str = "cuda"  # as torch names it
    topology: Topology = ()  # cores by NUMA node
    loopback: str | None = "lo"


def look(*, gpus: bool = True) -> Machine:
    """Return cores, GPUs and other facts of this machine; import torch without initializing CUDA.

    With `gpus=False`, GPUs are neither counted nor listed.
    """
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
    """Return the number of GPUs that torch would find.

    `listing` is the list of nvidia-smi. If the list does not determine the number, torch counts the GPUs.
    """
    from lockstep.world import accelerator

    left = visible(listing.gpus, os.environ).gpus
    # Versions of CUDA differ in which MIG devices they show: count with the driver instead.
    if listing.gpus and not any(parts(gpu, listing.gpus) for gpu in left):
        return len(left)
    if accelerator.kind() is None:
        return 0
    return accelerator.count() if accelerator.is_initialized() else count_in_a_child()


def count_in_a_child() -> int:
    """Return the number of GPUs that the driver finds; 0 if the driver fails.

    A child process asks the driver, since this process must not initialize CUDA before a fork.
    """

    def count(_: object) -> int:
        from lockstep.world import accelerator

        accelerator.module().init()
        return accelerator.count()

    with contextlib.suppress(LostError):  # workers will report the same failure
        return int(Child(count).give(None).result(_TIMEOUT))
    return 0
