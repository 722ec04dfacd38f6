"""Parser of `--devices`: a word, or a list of indices and ids.

auto                     a GPU for every rank if there are GPUs, otherwise the CPU
cpu, gpu                 the CPU, or a GPU for every rank
2,3                      GPUs by index, among those that CUDA_VISIBLE_DEVICES leaves visible
GPU-8f5c1a2b,MIG-41b3…   devices by id; the id of a GPU (not of a MIG device) may be shortened
"""

from __future__ import annotations

import re
from typing import Literal

from lockstep.errors import UsageError

Word = Literal["auto", "cpu", "gpu"]
Ids = tuple[str, ...]

#: Environment variables that `lockstep run` sets for a worker: its device, such as `cuda:0`; the value of
#: `CUDA_VISIBLE_DEVICES`; and the number of cores of all ranks of the node, before ranks were bound to
#: cores.
CHOSEN, SHOWN, CORES = "LOCKSTEP_DEVICE", "LOCKSTEP_VISIBLE_DEVICES", "LOCKSTEP_CORES"

#: A complete or shortened UUID; older drivers write MIG devices as MIG-GPU-<UUID>/<instance>/<instance>.
_GPU = re.compile(r"GPU-[0-9a-fA-F][0-9a-fA-F-]*")
_MIG = re.compile(r"MIG-(GPU-)?[0-9a-fA-F][0-9a-fA-F-]*(/\d+/\d+)?")


def parse(text: str, origin: str) -> Word | Ids:
    """Parse a value of `--devices`: return its word, or its indices and ids as a tuple.

    `origin` is the name of the flag or variable with the value, for messages.

    Raises:
        UsageError: if `text` is neither a known word nor a list of indices and ids.
    """
    match text:
        case "auto" | "cpu" | "gpu":
            return text
        case _:
            return tuple(_id(part.strip(), text, origin) for part in text.split(","))


def _id(part: str, text: str, origin: str) -> str:
    if part.isdecimal() and part.isascii():
        return str(int(part))
    if _GPU.fullmatch(part) or _MIG.fullmatch(part):
        return part
    # Name the invalid part of a list.
    where = f"; {part!r} is no id" if "," in text else ""
    raise UsageError(
        f"{origin} is {text!r}{where}; expected auto, cpu, gpu, or a list of indices and ids",
        hint="for example 0,2 or GPU-8f5c1a2b; `nvidia-smi -L` lists them",
    )
