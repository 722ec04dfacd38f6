"""Checksums of a state, at the speed of memory: ranks compare them before it is kept.

A restart gives all ranks one state. If they differed before, that would be forgotten, with a result that
no layout has.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.engine.training.tensor_bits import bits, read
from lockstep.state.checkpoint import state_codec
from lockstep.state.checkpoint.parts import cut_of, is_dtensor

#: What is compared of a state; the rest follows from it, or is of a rank's own.
_COMPARED = ("models", "optimizers", "registered")


@dataclass(frozen=True, slots=True)
class Checksums:
    """What a rank holds, in numbers.

    Attributes:
        whole: by name, of what all ranks hold.
        cut: by name, of what is cut over ranks.
        part: which part of that this rank holds.
    """

    whole: dict[str, str]
    cut: dict[str, str]
    part: str

    @staticmethod
    def of(state: Mapping[str, Any]) -> Checksums:
        """Return those of what `State.capture` has returned; no rank needs another one for it."""
        _, tensors = state_codec.flatten({name: state[name] for name in _COMPARED})
        numbers, _ = state_codec.flatten({"registered": state["registered"]})
        cuts = {name for name, tensor in tensors.items() if cut_of(tensor) is not None}
        sums = checksums(tensors)
        whole = {name: value for name, value in sums.items() if name not in cuts}
        whole["numbers"] = hashlib.sha256(numbers.encode()).hexdigest()
        part = sorted({_part(tensors[name]) for name in cuts})
        return Checksums(whole, {name: sums[name] for name in cuts}, ",".join(part))

    def brief(self) -> str:
        """Return one text, which two ranks have alike if they hold the same."""
        return f"{_short(self.whole)} {_short(self.cut)} {self.part}"

    def differing(self, other: Checksums) -> list[str]:
        """Return the names of what another rank holds otherwise; of parts only of the same one."""
        names = {**self.whole, **other.whole}
        found = [name for name in names if self.whole.get(name) != other.whole.get(name)]
        if self.part == other.part:
            found += [name for name, value in self.cut.items() if other.cut.get(name) != value]
        return found


def checksums(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return by name a hash of what this rank holds of each tensor, with its type and shape."""
    hashes = read([bits(tensor) for tensor in tensors.values()])
    return {
        name: f"{tensor.dtype} {tuple(tensor.shape)} {first:x} {second:x}"
        for (name, tensor), (first, second) in zip(tensors.items(), hashes, strict=True)
    }


def _part(tensor: torch.Tensor) -> str:
    assert is_dtensor(tensor), "it is cut"
    mesh = tensor.device_mesh
    return f"{mesh.get_local_rank()}/{mesh.size()}"


def _short(sums: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(sums, sort_keys=True).encode()).hexdigest()[:32]
