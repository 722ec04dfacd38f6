"""Choose a rank's device and number of intra-op threads; set deterministic mode and memory allocator."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

import torch
from torch.utils import deterministic

from lockstep.errors import DeviceError
from lockstep.world import accelerator, cuda
from lockstep.world.cores import usable_cores
from lockstep.world.devices_asked import CHOSEN, CORES, SHOWN, Ids, Word, parse
from lockstep.world.model import World

#: Parameters of mallopt(3); -1 trims never, and 32 MiB is the largest threshold that glibc accepts.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_NEVER, _LARGEST = -1, 32 << 20
#: Environment variables by which a user configures glibc's allocator.
_MALLOC_VARIABLES = (
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_MMAP_MAX_",
    "MALLOC_TOP_PAD_",
    "GLIBC_TUNABLES",
)


def choose_device(
    wanted: str, world: World, environ: Mapping[str, str] | None = None
) -> torch.device:
    """Return the device of this rank, and make it the current one.

    `wanted` is `cpu`, `gpu`, `auto` (a GPU if there is one for every local rank, else the CPU), or a list
    of indices, one for every local rank, among the GPUs that this process sees. A device that
    `lockstep run` has chosen for this rank takes precedence.

    Raises:
        DeviceError: if there are too few GPUs, or the list does not fit the local ranks.
        UsageError: if `wanted` has another value.
    """
    environ = os.environ if environ is None else environ
    asked = parse(wanted, "devices")
    if world.environment == "lockstep" and CHOSEN in environ:
        _check_shown(environ)
        return accelerator.use(int(environ[CHOSEN].rpartition(":")[2]))
    if asked == "cpu":
        return torch.device("cpu")
    index = _index(asked, world, accelerator.count(), environ)
    return torch.device("cpu") if index is None else accelerator.use(index)


def _index(asked: Word | Ids, world: World, count: int, environ: Mapping[str, str]) -> int | None:
    """Return the index of this rank's GPU, or `None` for the CPU.

    `asked` is the parsed value of `--devices`, and `count` the number of GPUs that this process sees.

    Raises:
        DeviceError: if each rank needs a GPU, and `asked` or `count` does not allow one for each.
    """
    if isinstance(asked, tuple):
        return _listed(asked, world, count)
    if count >= world.local_size:
        return world.local_rank
    if count == 1 and len(_shown(environ)) == 1:
        # As under Slurm's --gpus-per-task: each process was given a GPU of its own. If all of them were
        # given the same GPU, a check after the rendezvous raises an error.
        return 0
    if asked == "gpu" or count:
        raise DeviceError(
            f"{world.local_size} ranks on this node, which has {count} GPUs; expected one for each",
            hint="start fewer ranks, or --devices cpu",
        )
    return None


def _listed(ids: Ids, world: World, count: int) -> int:
    shown = ",".join(ids)
    name = next((part for part in ids if not part.isdecimal()), None)
    if name is not None:
        raise DeviceError(
            f"devices={shown}: {name} is no index, and a process that runs cannot be shown other GPUs",
            hint=f"lockstep run --devices {shown}, or {_variable()}={shown}",
        )
    if not len(set(ids)) == len(ids) == world.local_size:
        raise DeviceError(
            f"devices={shown} for {world.local_size} rank(s) on this node; expected one for each"
        )
    index = int(ids[world.local_rank])
    if index >= count:
        raise DeviceError(
            f"devices={shown}: there is no GPU {index}; this process sees {count}",
            hint=f"indices count from 0 among what {_variable()} leaves visible",
        )
    return index


def _shown(environ: Mapping[str, str]) -> list[str]:
    """Return the devices that `CUDA_VISIBLE_DEVICES` lists in `environ`; empty if it is not set.

    For an accelerator that is no NVIDIA GPU, the corresponding variable is read.
    """
    text = environ.get(_variable())
    return [] if text is None else [entry.strip() for entry in text.split(",")]


def _variable() -> str:
    return accelerator.facts().visible


def _check_shown(environ: Mapping[str, str]) -> None:
    meant, found = environ.get(SHOWN), environ.get(_variable())
    if meant is not None and found != meant:
        raise DeviceError(
            f"the script set {_variable()} to {found!r}; expected what --devices chose, {meant!r}",
            hint="remove the assignment from the script, or start it without --devices",
        )


def check_device(device: torch.device) -> None:
    """Check that an accelerator works before the first step: run a kernel, and seed its random generator.

    Raises:
        DeviceError: if its kernels fail, or if its generators cannot be seeded.
    """
    if not accelerator.holds(device):
        return
    label = f"{device} ({accelerator.facts().label})"
    try:
        torch.ones(1, device=device).add_(1).cpu()
    except RuntimeError as error:
        raise DeviceError(
            f"{label} was found, and its first kernel failed: {_first_line(error)}",
            hint="--devices chooses others; lockstep doctor tries all devices",
        ) from error
    try:
        own = accelerator.module()
        state = own.get_rng_state(device)
        own.manual_seed_all(0)
        own.set_rng_state(state, device)
    except (AttributeError, RuntimeError) as error:
        raise DeviceError(
            f"the generator of {label} cannot be seeded: {_first_line(error)}; expected manual_seed_all, "
            f"get_rng_state and set_rng_state in torch.{device.type}",
            hint="random numbers depend on the step and not on the rank by these; --devices cpu has them",
        ) from error


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def device_identity(device: torch.device) -> str | None:
    """Return an id that is unique among the GPUs of all hosts; `None` for the CPU or if unknown.

    Two ranks whose devices have the same id share a GPU.
    """
    if not accelerator.holds(device):
        return None
    index = accelerator.current_index(device)
    shown = _shown(os.environ)
    if index < len(shown) and shown[index].startswith("MIG-"):
        return shown[index]  # CUDA's properties may have the id of the GPU that it is a part of
    uuid = accelerator.uuid(index)
    return None if uuid is None else f"GPU-{uuid}"


def default_threads(replicas: int, cores: int | None = None) -> int:
    """Return the default number of intra-op threads per process: `cores // replicas`, at least 1.

    On the CPU, the number of threads changes the bits of sums. So it must not depend on the number of
    ranks; the number of replicas is the same on any number of ranks.

    By default, `cores` is the number of cores that this process may use, or could use before
    `lockstep run --bind cores` bound it to some of them.
    """
    if cores is None:
        cores = int(os.environ.get(CORES) or usable_cores())
    return max(1, cores // replicas)


def make_deterministic(device: torch.device) -> None:
    """Make PyTorch use only algorithms on `device` whose results don't vary from call to call.

    For the CPU, nothing is set: its kernels are deterministic for a given number of threads.
    """
    if not accelerator.holds(device):
        return  # PyTorch's CPU kernels are deterministic for a given number of threads
    if cuda.holds(device):
        cuda.make_deterministic()
    torch.use_deterministic_algorithms(True)
    # It would also fill every new tensor, which costs a kernel each and hides no draw of chance.
    deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def keep_freed_memory(device: torch.device, environ: Mapping[str, str] | None = None) -> bool:
    """Let glibc keep the host memory that this process frees; return whether glibc accepted the setting.

    By default glibc gives the memory of a step's gradients and activations back to the system, and the
    system must clear each page again in the next step. After this call, only memory of a tensor above 32
    MiB may still be given back, since glibc maps such blocks separately. Nothing is changed, and the result
    is `False`, if the user has set variables of glibc's allocator, or if `device` is a GPU, whose memory
    PyTorch's own allocator keeps.
    """
    environ = os.environ if environ is None else environ
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl and macOS have none
    if device.type != "cpu" or mallopt is None or any(v in environ for v in _MALLOC_VARIABLES):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST) and mallopt(_M_TRIM_THRESHOLD, _NEVER))
