"""Means of tensors over ranks, taken in tree order: of weights, and of what optimizers remember."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from lockstep.errors import ModelError
from lockstep.exchange.base import Forest
from lockstep.exchange.tree import GroupWire, TreeExchange

#: Of which parameter, and what it is called there.
_Slot = tuple[int, str]


class Means:
    """Takes means over the ranks of a group, each of the same weight.

    Args:
        group: the ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.size = dist.get_world_size(group)
        forest = Forest.of(self.size, self.size, dist.get_rank(group))
        self._exchange = TreeExchange(GroupWire(group), forest)

    def of(
        self, tensors: Sequence[torch.Tensor], counts: Sequence[int] | None = None
    ) -> list[torch.Tensor]:
        """Return the mean of each of `tensors`, which have the same shapes on all ranks.

        Args:
            tensors: of this rank.
            counts: how many ranks have each of them, the others giving zeros; by default all.
        """
        kinds: defaultdict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
        for place, tensor in enumerate(tensors):
            kinds[tensor.device, tensor.dtype].append(place)
        means = list(tensors)
        for places in kinds.values():
            total = self._sum(torch.cat([tensors[place].reshape(-1) for place in places]))
            parts = torch.split(total, [tensors[place].numel() for place in places])
            for place, part in zip(places, parts, strict=True):
                count = self.size if counts is None else counts[place]
                means[place] = (part / count).view(tensors[place].shape)
        return means

    def _sum(self, flat: torch.Tensor) -> torch.Tensor:
        (slot,) = self._exchange.slots(flat)
        if slot.data_ptr() != flat.data_ptr():
            slot.copy_(flat)
        return self._exchange.start([slot], last=True).wait()

    def all_of(self, value: Any) -> list[Any]:
        """Return what each rank gives; small things only."""
        given: list[Any] = [None] * self.size
        dist.all_gather_object(given, value, group=self._group)
        return given

    def close(self) -> None:
        """Close the exchange."""
        self._exchange.close()


def describe_memory(
    optimizer: Optimizer, parameters: Sequence[torch.Tensor]
) -> list[dict[str, Any]]:
    """Return what an optimizer remembers of each parameter, without the tensors.

    Raises:
        ModelError: for what has no mean.
    """
    return [_describe(optimizer.state.get(parameter, {})) for parameter in parameters]


def average_memory(
    optimizer: Optimizer,
    parameters: Sequence[torch.Tensor],
    all_ranks: Sequence[list[dict[str, Any]]],
    means: Means,
) -> None:
    """Give an optimizer on all ranks the mean of what it remembers, such as its momentum.

    A rank whose samples have never used a parameter remembers nothing of it: then the mean is over the
    ranks that do, and it is this rank's, too.

    Args:
        optimizer: of this rank.
        parameters: of the model.
        all_ranks: what `describe_memory` returned on each rank.
        means: over the ranks.
    """
    union = [_merge([rank[place] for rank in all_ranks]) for place in range(len(parameters))]
    slots: list[_Slot] = []
    for place, parameter in enumerate(parameters):
        for key, (shape, value) in union[place].items():
            if shape is None:
                optimizer.state[parameter][key] = value
                continue
            slots.append((place, key))
            if key not in optimizer.state[parameter]:
                dtype = getattr(torch, cast("str", value))
                optimizer.state[parameter][key] = torch.zeros(
                    shape, dtype=dtype, device=parameter.device
                )
    tensors = [optimizer.state[parameters[place]][key] for place, key in slots]
    counts = [sum(key in rank[place] for rank in all_ranks) for place, key in slots]
    if tensors:
        torch._foreach_copy_(tensors, means.of(tensors, counts))


def _merge(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what any rank remembers of a parameter; of several values the first rank's."""
    merged: dict[str, Any] = {}
    for rank in ranks:
        merged = {**rank, **merged}
    return dict(sorted(merged.items()))


def _describe(state: dict[str, Any]) -> dict[str, tuple[list[int] | None, Any]]:
    """Return shape and type of what has a mean, and the value of what is the same on all ranks."""
    found: dict[str, tuple[list[int] | None, Any]] = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            found[key] = (list(value.shape), str(value.dtype).removeprefix("torch."))
        elif isinstance(value, torch.Tensor) and value.numel() > 1:
            raise ModelError(
                f"the optimizer remembers {key}, a tensor of {value.dtype}, which has no mean over ranks",
                hint="take another optimizer, or an exchange of gradients",
            )
        else:
            found[key] = (None, value.cpu() if isinstance(value, torch.Tensor) else value)
    return found
