"""GPUs of this machine, and those that the environment leaves visible, without touching CUDA.

Asked is `nvidia-smi -L`. NVML by its Python bindings would say the same, and NVIDIA promises more for
its stability; but a library in the launcher cannot be given up on when a driver hangs, and leaves open
files in every process that is forked afterwards. The few lines that are read have kept their form since
2013; where one day they don't, `read_listing` says so instead of guessing.

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
    """One GPU, or one MIG device: a part of one."""

    index: int  # of a MIG device: among the parts of its GPU
    label: str  # such as `GPU 2`, or `GPU 2 MIG 0`
    uuid: str | None = None  # `GPU-…` or `MIG-…`
    name: str | None = None  # of the model
    parent: str | None = None  # uuid of the GPU that a MIG device is a part of

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.label, self.short, self.name)))

    @property
    def entry(self) -> str:
        """The entry for CUDA_VISIBLE_DEVICES: the id where it is known, else the index."""
        return self.uuid or str(self.index)

    @property
    def short(self) -> str | None:
        """The id for messages: CUDA takes the beginning of a GPU's id, but a MIG device's only whole."""
        return self.uuid if self.uuid is None or self.parent else self.uuid[: len("GPU-") + 8]


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """The GPUs of a machine, as nvidia-smi lists them."""

    gpus: tuple[Gpu, ...] = ()  # each followed by its MIG devices
    problem: str | None = None  # why there are no facts


def list_gpus(tool: str | None = None) -> Listing:
    """Ask nvidia-smi for the GPUs of this machine."""
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
    """Return what the output of `nvidia-smi -L` says."""
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
class Visible:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves.

    On a machine with several models CUDA counts the fastest first, and nvidia-smi does not: then the order
    is known only with CUDA_DEVICE_ORDER=PCI_BUS_ID.
    """

    gpus: tuple[Gpu, ...]  # in the order of CUDA's indices
    ordered: bool = True


def parts(gpu: Gpu, everything: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """Return the MIG devices that `gpu` is split into; itself, where it is one."""
    return tuple(one for one in everything if gpu.uuid in (one.parent, one.uuid) and one.parent)


def visible(everything: Sequence[Gpu], environ: Mapping[str, str]) -> Visible:
    """Return what `environ` leaves visible of `everything`, as CUDA reads it."""
    whole = tuple(gpu for gpu in everything if gpu.parent is None)
    in_order = len({gpu.name for gpu in whole}) <= 1 or (
        environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    )
    asked = environ.get("CUDA_VISIBLE_DEVICES")
    if asked is None:
        return Visible(gpus=whole, ordered=in_order)
    found: list[Gpu] = []
    by_id = asked.strip().startswith(("GPU-", "MIG-"))
    for entry in map(str.strip, asked.split(",")):
        same = [gpu for gpu in whole if entry == str(gpu.index)]
        named = fits(entry, everything) if by_id else same
        # CUDA stops at the first entry that it does not know, or that is not of the first one's kind.
        if len(named) != 1 or not entry.startswith(asked.strip()[: len("GPU-") if by_id else 0]):
            break
        if named[0] in found:  # and shows none if one is named twice
            return Visible(gpus=())
        found.append(named[0])
    return Visible(gpus=tuple(found), ordered=by_id or in_order)


def fits(uuid: str, everything: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """Return the GPUs whose id is `uuid`, or begins with it where it is that of a whole GPU."""
    wanted = uuid.lower()
    if wanted.startswith("mig-"):
        return tuple(one for one in everything if one.uuid and one.uuid.lower() == wanted)
    if not wanted.startswith("gpu-"):
        return ()
    return tuple(one for one in everything if one.uuid and one.uuid.lower().startswith(wanted))
