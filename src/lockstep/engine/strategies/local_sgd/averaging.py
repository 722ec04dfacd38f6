"""Averages of parameters and optimizer state over ranks, summed in a fixed order."""

from __future__ import annotations

import hashlib
import json
from collections import ChainMap, defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from lockstep.engine.exchange.base import Forest
from lockstep.engine.exchange.scatter import gather_rows
from lockstep.engine.exchange.tree import GroupWire, TreeExchange
from lockstep.errors import ModelError

#: Index of a parameter, and the name of a value in its optimizer state.
_Slot = tuple[int, str]
#: Description of a value in an optimizer's state: shape and type of a tensor, or the value itself.
_Description = list[Any]
#: Length of a SHA-256 digest in 64-bit integers.
_DIGEST = 4


class Averaging:
    """Computes means of tensors over the ranks of a process group, and gathers numbers from the ranks."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.rank, size = dist.get_rank(group), dist.get_world_size(group)
        self._device, self._group = device, group
        self._exchange = TreeExchange(GroupWire(group), Forest.of(size, size, self.rank))

    def of(self, tensors: Sequence[torch.Tensor], shares: Sequence[float]) -> list[torch.Tensor]:
        """Return the mean of each of `tensors` over the ranks; shapes are equal on all ranks.

        `shares`: for each tensor, this rank's weight in its mean; weights of all ranks add up to 1.
        """
        kinds: defaultdict[torch.dtype, list[int]] = defaultdict(list)
        for place, tensor in enumerate(tensors):
            kinds[tensor.dtype].append(place)
        means = list(tensors)
        for places in kinds.values():
            # An optimizer may have its number of steps on a different device than the model.
            own = [tensors[place].reshape(-1).to(self._device) * shares[place] for place in places]
            total = self._exchange.add([torch.cat(own)], last=True).wait()
            parts = torch.split(total, [tensors[place].numel() for place in places])
            for place, part in zip(places, parts, strict=True):
                # Copied, since the exchange reuses its memory.
                means[place] = part.view(tensors[place].shape).to(tensors[place].device, copy=True)
        return means

    def gather(self, numbers: Sequence[int], value: Any) -> list[tuple[list[int], Any]]:
        """All-gather `numbers` and `value` (JSON data); return both for each rank.

        To save communication, `value` itself is sent only if its checksum differs between ranks.
        """
        text = json.dumps(value).encode()
        digest = torch.tensor(list(hashlib.sha256(text).digest()), dtype=torch.uint8)
        head = [*numbers, len(text), *digest.view(torch.int64).tolist()]
        heads = self._gather(torch.tensor(head, dtype=torch.int64)).tolist()
        given = [row[: -1 - _DIGEST] for row in heads]
        sizes = [row[-1 - _DIGEST] for row in heads]
        if all(row[-_DIGEST:] == head[-_DIGEST:] for row in heads):
            return [(row, value) for row in given]
        # JSON ignores spaces at the end.
        padded = torch.frombuffer(bytearray(text.ljust(max(sizes))), dtype=torch.uint8)
        texts = [row.numpy().tobytes() for row in self._gather(padded)]
        return [(row, json.loads(theirs)) for row, theirs in zip(given, texts, strict=True)]

    def _gather(self, row: torch.Tensor) -> torch.Tensor:
        """All-gather one vector from each rank; return a matrix with one row per rank, on the CPU."""
        return gather_rows(row.to(self._device), self._group).cpu()


def shares_of(weights: Sequence[int], has: Sequence[bool] | None = None) -> list[float]:
    """Return the share of each rank in a weighted mean over ranks; the shares add up to 1.

    `weights`: number of samples of each rank, to which its share is proportional. `has`: for each rank,
    whether it has a value for the mean; a rank without one gets the share 0. By default all have one.
    """
    has = [True] * len(weights) if has is None else has
    counted = [weight * there for weight, there in zip(weights, has, strict=True)]
    # If only ranks without samples have a value, they get equal weights.
    counted = counted if any(counted) else [int(there) for there in has]
    return [count / sum(counted) for count in counted]


def describe_state(
    optimizer: Optimizer, parameters: Sequence[torch.Tensor]
) -> list[dict[str, _Description]]:
    """Return a description of an optimizer's state for each of `parameters`, as JSON data.

    A tensor of floats is described by its shape and dtype, any other value also by itself. A value that
    neither has a mean over ranks nor is JSON data raises a `ModelError`.
    """
    states = (optimizer.state.get(parameter, {}) for parameter in parameters)
    return [{key: _describe(key, value) for key, value in state.items()} for state in states]


def average_state(
    optimizer: Optimizer,
    parameters: Sequence[torch.Tensor],
    all_ranks: Sequence[list[dict[str, _Description]]],
    weights: Sequence[int],
    averaging: Averaging,
) -> None:
    """Set an optimizer's state, such as momentum, to its mean over the ranks.

    A rank whose samples have never used a parameter has no state for this parameter. Then all ranks get the
    mean of the ranks that have state.

    `all_ranks`: the result of `describe_state` on each rank. `weights`: number of samples of each rank.
    `averaging`: computes the means.
    """
    slots: list[_Slot] = []
    for place, parameter in enumerate(parameters):
        described = ChainMap(*(rank[place] for rank in all_ranks))  # the first rank's counts
        memory = optimizer.state[parameter] if described else {}
        for key, (shape, kind, value) in sorted(described.items()):
            if kind is None:
                memory[key] = value
                continue
            dtype = getattr(torch, kind)
            if not dtype.is_floating_point:
                made, own = torch.tensor(value, dtype=dtype).view(shape), memory.get(key)
                memory[key] = made if own is None else made.to(own.device)
                continue
            slots.append((place, key))
            if key not in memory:
                memory[key] = torch.zeros(shape, dtype=dtype, device=parameter.device)
    tensors = [optimizer.state[parameters[place]][key] for place, key in slots]
    shares = [
        shares_of(weights, [key in rank[place] for rank in all_ranks])[averaging.rank]
        for place, key in slots
    ]
    if tensors:
        torch._foreach_copy_(tensors, averaging.of(tensors, shares))


def _describe(key: str, value: Any) -> _Description:
    """Return `[shape, dtype, value]` for one entry of an optimizer's state, as JSON data.

    `key`: name of the entry. A tensor of floats has `None` as value; a value that is no tensor has `None`
    as shape and dtype. An entry that cannot be described so raises a `ModelError`.
    """
    if isinstance(value, torch.Tensor):
        shape, kind = list(value.shape), str(value.dtype).removeprefix("torch.")
        if value.is_floating_point():
            return [shape, kind, None]
        if value.numel() == 1 and not value.is_complex():
            return [shape, kind, value.item()]
        what = f"a tensor of {value.dtype}"
    else:
        if _fits_json(value):
            return [None, None, value]
        what = f"a {type(value).__name__}"
    raise ModelError(
        f"the optimizer remembers {key}, {what}, which has no mean over ranks",
        hint="take another optimizer, or an exchange of gradients",
    )


def _fits_json(value: Any) -> bool:
    """Whether `value` is a float, or is unchanged by a conversion to JSON and back."""
    try:
        return bool(json.loads(json.dumps(value)) == value) or isinstance(value, float)
    except (TypeError, ValueError):
        return False
