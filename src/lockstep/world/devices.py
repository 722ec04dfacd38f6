"""Which device a rank computes on, and how many threads."""

from __future__ import annotations

import os

import torch

from lockstep.errors import DeviceError
from lockstep.world.cores import usable_cores
from lockstep.world.model import World

CHOICES = ("auto", "cpu", "gpu")


def choose_device(wanted: str, world: World) -> torch.device:
    """Return the device of this rank.

    Args:
        wanted: `cpu`, `gpu`, or `auto`: a GPU where there is one for every local rank.
        world: this rank's world.

    Raises:
        DeviceError: if GPUs are wanted and there are not enough.
    """
    if wanted == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count >= world.local_size:
        torch.cuda.set_device(world.local_rank)
        return torch.device("cuda", world.local_rank)
    if wanted == "gpu" or count:
        raise DeviceError(
            f"{world.local_size} ranks on this node, which has {count} GPUs; expected one for each",
            hint="start fewer ranks, or --devices cpu",
        )
    return torch.device("cpu")


def default_threads(replicas: int) -> int:
    """Return the intra-op threads per process that every layout of a run can afford.

    They belong to the run's identity on CPU: a sum over two threads has other bits than over one.
    So they follow from the replicas, of which there are as many on every layout.
    """
    return max(1, usable_cores() // replicas)


def make_deterministic(device: torch.device) -> None:
    """Choose algorithms whose results don't vary from call to call."""
    if device.type != "cuda":
        return  # PyTorch's CPU kernels are deterministic for a given number of threads
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    torch.use_deterministic_algorithms(True)
