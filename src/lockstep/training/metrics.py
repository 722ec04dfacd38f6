"""Metrics over all samples: each counted once, summed in tree order, the same on every rank."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from lockstep.data.microbatch import Microbatch
from lockstep.errors import StepError
from lockstep.layout.tree import total
from lockstep.training.loop import Loop
from lockstep.training.wire import gather_bytes, pack, unpack

#: What a metric may be computed from, one per microbatch.
Item = torch.Tensor | float | int | bool
Number = float | int


def _alone(_call: str) -> AbstractContextManager[None]:
    return nullcontext()


class Metrics:
    """Sums and means of what a script computes per microbatch.

    Args:
        loop: where the run stands, for the samples behind each value.
        replicas: number of replicas in all.
        group: the process group, or `None` for a single rank.
        meeting: given a call's name, returns what is entered while ranks meet in it.
    """

    def __init__(
        self,
        loop: Loop,
        replicas: int,
        group: dist.ProcessGroup | None,
        meeting: Callable[[str], AbstractContextManager[None]] = _alone,
    ) -> None:
        self._loop = loop
        self._replicas = replicas
        self._group = group
        self._meeting = meeting

    def mean(self, items: Iterable[Item | Mapping[str, Item]]) -> Any:
        """Return the mean over all samples; of each entry, where the items are mappings."""
        own, samples = self._collect(items, means=True)
        with self._meeting("run.mean"):
            sums = self._agree_on_names(own)
            count = self._reduce(samples)
            if not count:
                raise StepError("run.mean saw no samples; expected at least one")
            return _unwrap({name: self._reduce(values) / count for name, values in sums.items()})

    def sum(self, items: Iterable[Item | Mapping[str, Item]]) -> Any:
        """Return the sum over all samples; of each entry, where the items are mappings."""
        own, _ = self._collect(items, means=False)
        with self._meeting("run.sum"):
            sums = self._agree_on_names(own)
            return _unwrap({name: self._reduce(values) for name, values in sums.items()})

    def _collect(
        self, items: Iterable[Item | Mapping[str, Item]], *, means: bool
    ) -> tuple[dict[str, list[Number]], list[Number]]:
        """Sum per local replica: a list over all replicas with zeros at those of other ranks."""
        sums: dict[str, list[Number]] = {}
        samples: list[Number] = [0] * self._replicas
        for item in items:
            microbatch = self._loop.require_microbatch("run.mean or run.sum of values per batch")
            samples[microbatch.replica] += microbatch.size
            named = item if isinstance(item, Mapping) else {"": item}
            for name, value in named.items():
                per_replica = sums.setdefault(name, [0] * self._replicas)
                per_replica[microbatch.replica] += _summed(value, microbatch, mean=means)
        return sums, samples

    def _agree_on_names(self, sums: dict[str, list[Number]]) -> dict[str, list[Number]]:
        """A rank without any microbatch takes part all the same, with zeros."""
        if self._group is None:
            return sums or {"": [0] * self._replicas}
        kinds = {name: any(isinstance(v, float) for v in values) for name, values in sums.items()}
        names = [json.loads(part) for part in gather_bytes(json.dumps(kinds).encode(), self._group)]
        agreed: dict[str, list[Number]] = {}
        for name in dict.fromkeys(name for kinds in names for name in kinds):
            values = sums.get(name, [0] * self._replicas)
            is_float = any(kinds.get(name, False) for kinds in names)
            agreed[name] = [float(v) for v in values] if is_float else values
        return agreed or {"": [0] * self._replicas}

    def _reduce(self, per_replica: list[Number]) -> Number:
        """Return the sum over replicas in tree order, exact for integers."""
        if self._group is not None:
            kind = torch.float64 if isinstance(per_replica[0], float) else torch.int64
            shared = torch.tensor(per_replica, dtype=kind)
            # Every element is non-zero on one rank at most, so that this adds nothing but zeros.
            dist.all_reduce(shared, group=self._group)
            per_replica = shared.tolist()
        return total(per_replica, lambda a, b: a + b)

    def gather(self, items: Iterable[torch.Tensor]) -> torch.Tensor:
        """Return one row per sample, in dataset order, from tensors of shape `(samples, …)`."""
        rows, places, turns = [], [], []
        for item in items:
            microbatch = self._loop.require_microbatch("run.gather")
            _check_rows(item, microbatch)
            size = microbatch.size
            rows.append(item[:size].detach().cpu())
            places.append(torch.from_numpy(microbatch.indices[:size]))
            turns.append(torch.full((size,), microbatch.step * self._replicas + microbatch.replica))
        own = (torch.cat(places), torch.cat(turns), torch.cat(rows)) if rows else None
        with self._meeting("run.gather"):
            parts = [part for part in self._all(own) if part is not None]
        if not parts:
            raise StepError("run.gather saw no samples; expected at least one")
        place, turn, values = (torch.cat(column) for column in zip(*parts, strict=True))
        # By sample; those that a sampler drew twice, in the order in which they came.
        by_turn = torch.argsort(turn, stable=True)
        return values[by_turn[torch.argsort(place[by_turn], stable=True)]]

    def _all(self, own: Any) -> list[Any]:
        if self._group is None:
            return [own]
        parts = gather_bytes(pack(own or ()), self._group)
        return [tuple(tensors) if (tensors := unpack(part)) else None for part in parts]


def _summed(value: Item, microbatch: Microbatch, *, mean: bool) -> Number:
    """Return the sum of a value over the microbatch's samples; those of a stand-in count nothing."""
    if isinstance(value, torch.Tensor) and value.dim() > 0:
        _check_rows(value, microbatch)
        value = value[: microbatch.size].detach()
        return _number(value.double().sum() if value.is_floating_point() else value.sum())
    if not microbatch.size:
        return 0 * _kind(value)
    number = _number(value)
    return number * microbatch.size if mean else number


def _kind(value: Item) -> Number:
    """Return one, as a float where the value is one: a stand-in's value may be no number at all."""
    return 1.0 if isinstance(_number(value), float) else 1


def _number(value: Item) -> Number:
    number = value.item() if hasattr(value, "item") else value  # NumPy's scalars have it too
    return int(number) if isinstance(number, bool) else number


def _check_rows(value: torch.Tensor, microbatch: Microbatch) -> None:
    expected = len(microbatch.indices)
    if value.dim() == 0 or value.shape[0] != expected:
        raise StepError(
            f"a metric of shape {tuple(value.shape)} for a microbatch of {expected} samples; "
            "expected one number for all of them, or one row per sample",
            hint="take .mean() or .sum() over what is not the samples' own dimension",
        )


def _unwrap(values: dict[str, Number]) -> Any:
    return values[""] if list(values) == [""] else values
