"""List the GPUs of this machine, and those that `CUDA_VISIBLE_DEVICES` leaves visible.

CUDA is not initialized. The list comes from the program `nvidia-smi -L`, whose output format has been
stable since 2013; `read_listing` reports lines that it cannot parse. The Python bindings of NVML are a more
stable interface, but a call into a library cannot be interrupted if the driver hangs, and leaves open files
in every process forked later.

https://docs.nvidia.com/cuda/cuda-programming-guide/05-appendices/environment-variables.html describes
CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lockstep.launch.agent import processes

_TIMEOUT = 30.0  # seconds; a driver that is not kept loaded takes some for each GPU

#: `GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-2927d07e-3fe9-7904-9e08-b08b82d9a37d)`
_GPU_LINE = re.compile(r"GPU (\d+): (.+) \(UUID: (GPU-[^)\s]+)\)")
#: `  MIG 1g.10gb     Device  0: (UUID: MIG-6e95ef19-5145-571b-b040-7e731f1c1af3)`
_MIG_LINE = re.compile(r"\s+MIG (?:(\S+)\s+)?Device\s+(\d+): \(UUID: (MIG-[^)\s]+)\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU, or one MIG device, which is a part of a GPU."""

    index: int  # for a MIG device: its number within its GPU
    label: str  # such as `GPU 2`, or `GPU 2 MIG 0`
    uuid: str | None = None  # `GPU-…` or `MIG-…`
    name: str | None = None  # model name
    parent: str | None = None  # for a MIG device: uuid of its GPU

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.label, self.short, self.name)))

    @property
    def entry(self) -> str:
        """Value for `CUDA_VISIBLE_DEVICES`: the uuid if known, otherwise the index."""
        return self.uuid or str(self.index)

    @property
    def short(self) -> str | None:
        """The uuid for messages, in a form that CUDA accepts; `None` if unknown.

        The uuid of a GPU is shortened to eight digits, that of a MIG device is complete.
        """
        return self.uuid if self.uuid is None or self.parent else self.uuid[: len("GPU-") + 8]


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """The GPUs of a machine, as nvidia-smi lists them, or the reason why the list is unknown."""

    gpus: tuple[Gpu, ...] = ()  # each GPU followed by its MIG devices
    problem: str | None = None  # reason why the list is unknown


def list_gpus(tool: str | None = None) -> Listing:
    """List the GPUs of this machine with `nvidia-smi -L`.

    `tool` is the path of nvidia-smi, by default the one in `PATH`.
    """
    tool = tool or shutil.which("nvidia-smi")
    if tool is None:
        return Listing(problem="there is no nvidia-smi")
    try:
        code, out, err = processes.run([tool, "-L"], _TIMEOUT)
    except TimeoutError:
        return Listing(problem=f"nvidia-smi -L did not answer within {_TIMEOUT:g} s")
    except OSError as error:
        return Listing(problem=f"nvidia-smi -L cannot be run: {error.strerror}")
    if code != 0:
        why = (out + err).strip().partition("\n")[0] or f"exit code {code}"
        return Listing(problem=f"nvidia-smi -L failed: {why}")
    return read_listing(out)


def read_listing(text: str) -> Listing:
    """Parse the output of `nvidia-smi -L`."""
    gpus: list[Gpu] = []
    parent = Gpu(index=-1, label="")
    for line in text.splitlines():
        if whole := _GPU_LINE.fullmatch(line.rstrip()):
            index, name, uuid = whole.groups()
            parent = Gpu(index=int(index), label=f"GPU {index}", uuid=uuid, name=name)
            gpus.append(parent)
        elif part := _MIG_LINE.fullmatch(line.rstrip()):
            profile, index, uuid = part.groups()
            name = " ".join(filter(None, ("MIG", profile, "of", parent.name)))
            own = {"uuid": uuid, "name": name, "parent": parent.uuid}
            gpus.append(Gpu(index=int(index), label=f"{parent.label} MIG {index}", **own))
        elif "UUID" in line:
            return Listing(problem=f"nvidia-smi -L told what Lockstep cannot read: {line.strip()}")
    return Listing(gpus=tuple(gpus))


@dataclass(frozen=True, slots=True, kw_only=True)
class VisibleGpus:
    """The GPUs that `CUDA_VISIBLE_DEVICES` leaves visible.

    `ordered` is whether the GPUs are in the order of CUDA's indices. The order is unknown on a machine with
    several GPU models, unless `CUDA_DEVICE_ORDER` is `PCI_BUS_ID`: CUDA counts the fastest GPU first.
    """

    gpus: tuple[Gpu, ...]
    ordered: bool = True


def parts(gpu: Gpu, everything: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """Return the MIG devices of `gpu`, from the list `everything`; if `gpu` is a MIG device, only itself.

    Returns an empty tuple for a GPU that is not split.
    """
    return tuple(one for one in everything if gpu.uuid in (one.parent, one.uuid) and one.parent)


def visible(everything: Sequence[Gpu], environ: Mapping[str, str]) -> VisibleGpus:
    """Return the GPUs of `everything` that `CUDA_VISIBLE_DEVICES` in `environ` leaves visible to CUDA."""
    whole = tuple(gpu for gpu in everything if gpu.parent is None)
    in_order = len({gpu.name for gpu in whole}) <= 1 or (
        environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    )
    asked = environ.get("CUDA_VISIBLE_DEVICES")
    if asked is None:
        return VisibleGpus(gpus=whole, ordered=in_order)
    found: list[Gpu] = []
    by_id = asked.strip().startswith(("GPU-", "MIG-"))
    for entry in map(str.strip, asked.split(",")):
        same = [gpu for gpu in whole if entry == str(gpu.index)]
        named = fits(entry, everything) if by_id else same
        # CUDA stops at the first unknown entry, or at one of another kind than the first entry.
        if len(named) != 1 or not entry.startswith(asked.strip()[: len("GPU-") if by_id else 0]):
            break
        if named[0] in found:  # and shows none if one is named twice
            return VisibleGpus(gpus=())
        found.append(named[0])
    return VisibleGpus(gpus=tuple(found), ordered=by_id or in_order)


def fits(uuid: str, everything: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """Return the GPUs and MIG devices in the list `everything` that `uuid` identifies.

    The id of a GPU may be shortened, so that several GPUs may fit.
    """
    wanted = uuid.lower()
    if wanted.startswith("mig-"):
        return tuple(one for one in everything if one.uuid and one.uuid.lower() == wanted)
    if not wanted.startswith("gpu-"):
        return ()
    return tuple(one for one in everything if one.uuid and one.uuid.lower().startswith(wanted))
