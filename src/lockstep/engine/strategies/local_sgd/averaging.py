"""Averages of parameters and optimizer state over ranks, in tree order."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from lockstep.engine.exchange.base import Forest
from lockstep.engine.exchange.tree import GroupWire, TreeExchange
from lockstep.errors import ModelError

#: Of which parameter, and what it is called there.
_Slot = tuple[int, str]
#: What is told of something that an optimizer remembers: shape and type of a tensor, and what is no tensor
#: with a mean.
_Told = list[Any]
#: How much of a digest ranks compare, in numbers of 64 bits.
_DIGEST = 4


class Averaging:
    """Takes means over the ranks of a group.

    Args:
        group: the ranks.
        device: where tensors are that go between them.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._device, self._wire = device, GroupWire(group)
        self._exchange = TreeExchange(self._wire, Forest.of(self.size, self.size, self.rank))

    def of(self, tensors: Sequence[torch.Tensor], shares: Sequence[float]) -> list[torch.Tensor]:
        """Return the mean of each of `tensors`, which have the same shapes on all ranks.

        Args:
            tensors: of this rank.
            shares: what part of each mean this rank's tensor is; the ranks' parts add up to 1.
        """
        kinds: defaultdict[torch.dtype, list[int]] = defaultdict(list)
        for place, tensor in enumerate(tensors):
            kinds[tensor.dtype].append(place)
        means = list(tensors)
        for places in kinds.values():
            # Optimizers may count their steps elsewhere than where the model is.
            own = [tensors[place].reshape(-1).to(self._device) * shares[place] for place in places]
            total = self._sum(torch.cat(own))
            parts = torch.split(total, [tensors[place].numel() for place in places])
            for place, part in zip(places, parts, strict=True):
                # A copy: the exchange uses its memory again.
                means[place] = part.view(tensors[place].shape).to(tensors[place].device, copy=True)
        return means

    def _sum(self, flat: torch.Tensor) -> torch.Tensor:
        (slot,) = self._exchange.slots(flat)
        if slot.data_ptr() != flat.data_ptr():
            slot.copy_(flat)
        return self._exchange.start([slot], last=True).wait()

    def all_of(self, numbers: Sequence[int], value: Any) -> list[tuple[list[int], Any]]:
        """Return what each rank gives: some numbers, and something that JSON can hold.

        The latter crosses the link only where it is not the same on all ranks.
        """
        text = json.dumps(value).encode()
        digest = torch.tensor(list(hashlib.sha256(text).digest()), dtype=torch.uint8)
        head = [*numbers, len(text), *digest.view(torch.int64).tolist()]
        heads = self._gather(torch.tensor(head, dtype=torch.int64)).tolist()
        told = [one[: -1 - _DIGEST] for one in heads]
        sizes = [one[-1 - _DIGEST] for one in heads]
        if all(one[-_DIGEST:] == head[-_DIGEST:] for one in heads):
            return [(one, value) for one in told]
        # Spaces at its end are no part of a JSON text.
        padded = torch.frombuffer(bytearray(text.ljust(max(sizes))), dtype=torch.uint8)
        texts = [row.numpy().tobytes() for row in self._gather(padded)]
        return [(one, json.loads(theirs)) for one, theirs in zip(told, texts, strict=True)]

    def _gather(self, row: torch.Tensor) -> torch.Tensor:
        """Return the rows of all ranks."""
        own = row.to(self._device)
        rows = own.new_empty(self.size * own.numel())
        self._wire.gather(own, rows).wait()
        return rows.cpu().view(self.size, -1)

    def close(self) -> None:
        """Close the exchange."""
        self._exchange.close()


def shares_of(weights: Sequence[int], has: Sequence[bool] | None = None) -> list[float]:
    """Return what part of a mean each rank's tensor is.

    Args:
        weights: how many samples each rank has seen.
        has: which ranks have something to give; by default all.
    """
    has = [True] * len(weights) if has is None else has
    counted = [weight * there for weight, there in zip(weights, has, strict=True)]
    # Ranks that have seen nothing may be the only ones to have it: then they count alike.
    counted = counted if any(counted) else [int(there) for there in has]
    return [count / sum(counted) for count in counted]


def describe_memory(
    optimizer: Optimizer, parameters: Sequence[torch.Tensor]
) -> list[dict[str, _Told]]:
    """Return what an optimizer remembers of each parameter, without the tensors; JSON can hold it.

    Raises:
        ModelError: for what has no mean, and cannot be told either.
    """
    return [_describe(optimizer.state.get(parameter, {})) for parameter in parameters]


def average_memory(
    optimizer: Optimizer,
    parameters: Sequence[torch.Tensor],
    all_ranks: Sequence[list[dict[str, _Told]]],
    weights: Sequence[int],
    averaging: Averaging,
) -> None:
    """Give an optimizer on all ranks the mean of what it remembers, such as its momentum.

    A rank whose samples have never used a parameter remembers nothing of it: then the mean is over the
    ranks that do, and it is this rank's, too.

    Args:
        optimizer: of this rank.
        parameters: of the model.
        all_ranks: what `describe_memory` returned on each rank.
        weights: how many samples each rank has seen.
        averaging: over the ranks.
    """
    slots: list[_Slot] = []
    for place, parameter in enumerate(parameters):
        memory = optimizer.state[parameter] if any(rank[place] for rank in all_ranks) else {}
        for key, (shape, kind, value) in _merge([rank[place] for rank in all_ranks]).items():
            if kind is None:
                memory[key] = value
                continue
            dtype = getattr(torch, kind)
            if not dtype.is_floating_point:
                memory[key] = _like(memory.get(key), torch.tensor(value, dtype=dtype).view(shape))
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


def _like(own: torch.Tensor | None, value: torch.Tensor) -> torch.Tensor:
    """Return `value` where this rank's own is, if it has one."""
    return value if own is None else value.to(own.device)


def _merge(ranks: Sequence[dict[str, _Told]]) -> dict[str, _Told]:
    """Return what any rank remembers of a parameter; of several values the first rank's."""
    merged: dict[str, _Told] = {}
    for rank in ranks:
        merged = {**rank, **merged}
    return dict(sorted(merged.items()))


def _describe(state: dict[str, Any]) -> dict[str, _Told]:
    """Return shape and type of tensors, and the value of what is the same on all ranks."""
    return {key: _tell(key, value) for key, value in state.items()}


def _tell(key: str, value: Any) -> _Told:
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
    """Whether the other ranks get the same as this one has."""
    try:
        # A NaN is not equal to itself.
        return bool(json.loads(json.dumps(value)) == value) or isinstance(value, float)
    except (TypeError, ValueError):
        return False
