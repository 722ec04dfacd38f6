"""Checksums of a run's state, which ranks compare before they save the state.

A restart gives all ranks the state of one rank. If the ranks' states were different before, the result
would be one that no run without a restart has.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.engine.training.tensor_bits import bits, read
from lockstep.state.checkpoint import state_codec
from lockstep.state.checkpoint.parts import cut_of, is_dtensor

#: Parts of a state that are compared; the others follow from them, or differ between ranks.
COMPARED = ("models", "optimizers", "registered")


@dataclass(frozen=True, slots=True)
class Checksums:
    """Checksums of the state of one rank.

    Attributes:
        whole: checksums, by name, of the tensors and numbers that every rank has completely.
        cut: checksums, by name, of this rank's shards of the tensors that are sharded over ranks.
        part: which shards `cut` has, such as `0/2`, shard 0 of 2; equal on ranks with the same shards.
    """

    whole: dict[str, str]
    cut: dict[str, str]
    part: str

    @staticmethod
    def of(tensors: Mapping[str, torch.Tensor], registered: Mapping[str, Any]) -> Checksums:
        """Return the checksums of this rank's state, without communication.

        `tensors`: the state's tensors by name, as `state_codec.flatten` returns them. `registered`: states
        of the objects of `run.register` by name, whose numbers are compared, too.
        """
        own = {name: t for name, t in tensors.items() if name.partition(".")[0] in COMPARED}
        cuts = {name for name, tensor in own.items() if cut_of(tensor) is not None}
        sums = checksums(own)
        whole = {name: value for name, value in sums.items() if name not in cuts}
        for path, value in _entries(registered):
            # Of a tensor, `whole` has a checksum already; the text adds what is no element, as strides.
            text = json.dumps(state_codec.encode(value, path, {}))
            whole[path] = f"{whole.get(path, '')} {hashlib.sha256(text.encode()).hexdigest()}"
        part = sorted({_part(own[name]) for name in cuts})
        return Checksums(whole, {name: sums[name] for name in cuts}, ",".join(part))

    def brief(self) -> str:
        """Return a short text that is equal on two ranks if their `whole`, `cut` and `part` are equal."""
        return f"{_short(self.whole)} {_short(self.cut)} {self.part}"

    def differing(self, other: Checksums) -> list[str]:
        """Return the names of the values whose checksums differ from those of another rank, `other`.

        Shards of sharded tensors are compared only if both ranks have the same shards.
        """
        names = {**self.whole, **other.whole}
        found = [name for name in names if self.whole.get(name) != other.whole.get(name)]
        if self.part == other.part:
            found += [name for name, value in self.cut.items() if other.cut.get(name) != value]
        return found


def _entries(registered: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the values in the states of registered objects, each with a name as `flatten` gives it.

    The first value of an object's state is the list of its keys.
    """
    for name, state in registered.items():
        if isinstance(state, Mapping):
            yield f"registered.{name}", [type(state).__name__, *map(repr, state)]
            yield from ((f"registered.{name}.{key}", value) for key, value in state.items())
        else:
            yield f"registered.{name}", state


def checksums(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return for each tensor, by name, a text with its dtype, its shape and a hash of its elements.

    Of a tensor that is sharded over ranks only this rank's shard is hashed.
    """
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
