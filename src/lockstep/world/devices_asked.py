"""Parser of `--devices`: a word, or a list of indices and ids.

auto                     a GPU for every rank where there are any, else the processor
cpu, gpu                 the one or the other
2,3                      by index, counted among what CUDA_VISIBLE_DEVICES leaves visible
GPU-8f5c1a2b,MIG-41b3…   by id: a GPU's may be cut short, a MIG device's is written out
"""

from __future__ import annotations

import re
from typing import Literal

from lockstep.errors import UsageError

Word = Literal["auto", "cpu", "gpu"]
Ids = tuple[str, ...]

#: Variables of a worker by which `lockstep run` passes on its choices: what this rank's GPU is called in
#: its process, what was made visible to it, and how many cores the ranks of a node had together before
#: each was bound to its own.
CHOSEN, SHOWN, CORES = "LOCKSTEP_DEVICE", "LOCKSTEP_VISIBLE_DEVICES", "LOCKSTEP_CORES"

#: A UUID or its beginning; older drivers write a MIG device as MIG-GPU-<UUID>/<instance>/<instance>.
_GPU = re.compile(r"GPU-[0-9a-fA-F][0-9a-fA-F-]*")
_MIG = re.compile(r"MIG-(GPU-)?[0-9a-fA-F][0-9a-fA-F-]*(/\d+/\d+)?")


def parse(text: str, origin: str) -> Word | Ids:
    """Return the word or the ids in the text of a flag, variable or setting, which is the `origin`.

    Raises:
        UsageError: if it is neither a word nor a list of ids.
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
    # Naming the part helps in a list; a single word says all by itself.
    where = f"; {part!r} is no id" if "," in text else ""
    raise UsageError(
        f"{origin} is {text!r}{where}; expected auto, cpu, gpu, or a list of indices and ids",
        hint="for example 0,2 or GPU-8f5c1a2b; `nvidia-smi -L` lists them",
    )
