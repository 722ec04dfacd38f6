"""`run.mean`, `run.sum`, `run.gather`, `run.all_gather`: metrics over the samples of all ranks.

Each sample is counted once, and sums over replicas are added in the order of one fixed binary tree, so that
results have the same bits on any number of ranks. Results, and partial sums of a metric that is not
finished, are saved with the run, so that a resumed run does not compute them again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from lockstep.engine.data.loader import GlobalBatch
from lockstep.engine.data.microbatch import Microbatch
from lockstep.engine.training.columns import Columns, of_all
from lockstep.engine.training.loop import Loop
from lockstep.errors import StepError
from lockstep.state.checkpoint.position import MetricEvent

Value = torch.Tensor | np.ndarray[Any, Any] | float | int | bool
#: The value of a metric on one microbatch; for `run.mean` also a pair of a value and its weight.
Item = Value | tuple[Value, Value]
Number = float | int


class _Partial(Protocol):
    """Interface of a metric, such as `run.mean`, that is being computed: `add` is called per microbatch."""

    def add(self, item: Any, microbatch: Microbatch) -> None:
        """Add the script's value `item` for a microbatch to the metric."""

    def partial(self) -> Any:
        """Return the metric over the microbatches of all ranks so far, to be saved: a collective call."""

    def resume(self, partial: Any) -> None:
        """Continue from `partial`, which the method `partial` returned before a restart."""

    def result(self) -> Any:
        """Return the metric's final value over all ranks: a collective call."""


class Metrics:
    """Implementation of `run.mean`, `run.sum`, `run.gather` and `run.all_gather`.

    `block`: the replicas that this rank computes, one or more. `collective(name)` returns a context for a
    collective call of this name.
    """

    def __init__(
        self,
        loop: Loop,
        replicas: int,
        block: range,
        group: dist.ProcessGroup | None,
        collective: Callable[[str], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._loop = loop
        self._replicas, self._block = replicas, block
        self._group = group
        self._collective = collective
        self._under_way: list[tuple[MetricEvent, _Partial]] = []

    def mean(self, items: Iterable[Item | Mapping[str, Item]]) -> Any:
        """Return the weighted mean of `items` over all samples; of mappings, one mean per key.

        `items`: as for `run.mean`.
        """
        sums, weights = (Columns(self._replicas, self._block, self._group) for _ in range(2))
        return self._compute("run.mean", items, _Mean(sums, weights))

    def sum(self, items: Iterable[Value | Mapping[str, Value]], *, per_sample: bool = True) -> Any:
        """Return the sum over all samples of a loop, on all ranks, of the values in `items`.

        `items` yields one item for each microbatch: a tensor with one value per sample or, with
        `per_sample=False`, the sum over the microbatch; or a mapping from names to such items.
        """
        sums = Columns(self._replicas, self._block, self._group)
        return self._compute("run.sum", items, _Sum(sums, per_sample=per_sample))

    def gather(self, items: Iterable[torch.Tensor], pad: float | None = None) -> torch.Tensor:
        """Return one row per sample, in dataset order, from tensors of shape `(samples, …)`.

        `items`: one tensor per microbatch. `pad`: value that fills shorter rows up to the longest; `None`
        if all rows have one shape.
        """
        gathered: torch.Tensor = self._compute("run.gather", items, self._rows(pad))
        return gathered

    def all_gather(
        self, function: Callable[[Any], torch.Tensor], batch: GlobalBatch
    ) -> torch.Tensor:
        """Return one row per sample of a global batch, in the order of replicas, on the CPU.

        `function` is called with each microbatch of this rank, without gradients, and returns its rows.
        """
        call = "run.all_gather"
        if not isinstance(batch, GlobalBatch):
            raise StepError(
                f"{call} was given a {type(batch).__name__}; expected a global batch",
                hint="for batch in run.batches(loader): run.all_gather(function, batch)",
            )
        self._loop.require_common_point(call)
        seen = self._rows()
        with torch.no_grad(), self._loop.first_error.recording():
            for data in batch.ahead():
                item = function(data)
                if not isinstance(item, torch.Tensor):
                    raise StepError(
                        f"the function of {call} was given a microbatch and returned a "
                        f"{type(item).__name__}; expected a tensor with one row per sample",
                        hint="torch.stack several of one shape along dimension 1",
                    )
                seen.add(item, self._loop.require_microbatch(call))
        # The result is not recorded, since replay computes it again with the batch.
        with self._collective(call):
            indices_turns_rows = seen.partial()
        assert indices_turns_rows is not None, "a global batch has samples"
        rows: torch.Tensor = indices_turns_rows[-1]
        return rows

    def once(self, call: str, compute: Callable[[], str]) -> str:
        """Return the text that `compute()` returns, and record it; a replay returns the record.

        `call`: name of the run's method. Before a rank's last microbatch of a batch the text is recorded
        under another name, since only ranks that compute several replicas make the call there.
        """
        loop = self._loop
        if loop.closed or loop.is_audited:
            return compute()
        event = loop.progress.metric_begins(
            call if loop.acts_now() else f"{call}, earlier microbatch"
        )
        if event.done:
            loop.arrive()
            return str(event.value)
        try:
            value = compute()
        except BaseException:
            loop.progress.metric_left(event)
            raise
        loop.progress.metric_ends(event, value, None)
        return value

    def _rows(self, pad: float | None = None) -> _Rows:
        return _Rows(self._group, self._replicas, is_first=self._block.start == 0, pad=pad)

    def _compute(self, call: str, items: Iterable[Any], seen: _Partial) -> Any:
        loop = self._loop
        loop.approach()
        event = loop.progress.metric_begins(call)
        if event.done and event.key is not None:
            loop.generators.set(event.key)
        loop.arrive()  # the saved position may be at, or in, this metric
        if event.done:
            return _copy(event.value)
        event.key = loop.generators.key
        loop.require_common_point(call)
        if event.value is not None:
            seen.resume(event.value)
        self._under_way.append((event, seen))
        try:
            self._add(call, items, seen)
            with self._collective(call):
                value = seen.result()
        except BaseException:
            loop.progress.metric_left(event)
            raise
        finally:
            self._under_way.pop()
        key = None if loop.generators.key == event.key else loop.generators.key
        if key is not None:  # so that a resumed run continues with the same random numbers
            loop.generators.set(key)
        loop.progress.metric_ends(event, value, key)
        return _copy(value)

    def _add(self, call: str, items: Iterable[Any], seen: _Partial) -> None:
        # The partial result already contains an item that replay computes again.
        again = self._loop.progress.is_repeating
        with self._loop.first_error.recording():
            for item in items:
                microbatch = self._loop.require_microbatch(call)
                if not (microbatch.audit or (again and self._loop.is_replaying)):
                    seen.add(item, microbatch)

    def note_partial(self) -> None:
        """Record partial results of metrics under way, to be saved with the run: a collective call."""
        for event, seen in self._under_way:
            with self._collective(event.call):
                event.value = seen.partial()


class _Mean:
    """Computation of `run.mean`: sums of values and of weights, for mappings one pair per key."""

    def __init__(self, sums: Columns, weights: Columns) -> None:
        self._sums, self._weights = sums, weights

    def add(self, item: Item | Mapping[str, Item], microbatch: Microbatch) -> None:
        for name, value in _named(item).items():
            summed, weight = _weighed(value, microbatch)
            self._sums.add(name, microbatch.replica, summed)
            self._weights.add(name, microbatch.replica, weight)

    def partial(self) -> Any:
        return [self._sums.complete(), self._weights.complete()]

    def resume(self, partial: Any) -> None:
        self._sums.resume(partial[0])
        self._weights.resume(partial[1])

    def result(self) -> Any:
        sums, weights = self._sums.totals(), self._weights.totals()
        empty = [name for name, weight in weights.items() if not weight]
        if empty or not weights:
            what = f" of {empty[0]!r}" if any(empty) else ""
            raise StepError(f"run.mean saw no samples{what}; expected at least one")
        return _unwrap({name: sums[name] / weights[name] for name in sums})


class _Sum:
    """Computation of `run.sum`: one sum, or for mappings one sum per key."""

    def __init__(self, sums: Columns, *, per_sample: bool) -> None:
        self._sums, self._per_sample = sums, per_sample

    def add(self, item: Value | Mapping[str, Value], microbatch: Microbatch) -> None:
        for name, value in _named(item).items():
            if self._per_sample:
                summed: Any = _summed(value, microbatch)
            else:
                summed = _whole(value) if microbatch.size else 0 * _whole(value)
            self._sums.add(name, microbatch.replica, summed)

    def partial(self) -> Any:
        return self._sums.complete()

    def resume(self, partial: Any) -> None:
        self._sums.resume(partial)

    def result(self) -> Any:
        return _unwrap(self._sums.totals() or {"": 0})


class _Rows:
    """Computation of `run.gather`: one row per sample, with the sample's dataset index and its `turn`.

    `turn`, which grows with batch and replica, orders the rows of a sample that is drawn repeatedly.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, replicas: int, *, is_first: bool, pad: float | None
    ) -> None:
        self._group, self._replicas, self._is_first, self._pad = group, replicas, is_first, pad
        self._parts: list[tuple[torch.Tensor, ...]] = []

    def add(self, item: torch.Tensor, microbatch: Microbatch) -> None:
        _check_rows(item, microbatch)
        size = microbatch.size
        turn = microbatch.step * self._replicas + microbatch.replica
        indices = torch.from_numpy(microbatch.indices[:size])
        # A copy, since the script may reuse its tensor.
        rows = item[:size].detach().as_subclass(torch.Tensor).to("cpu", copy=True)
        self._parts.append((indices, torch.full((size,), turn), rows))

    def partial(self) -> Any:
        parts = of_all(_joined(self._parts, self._pad), self._group)
        return _joined([part for part in parts if part], self._pad)

    def resume(self, partial: Any) -> None:
        if self._is_first:
            self._parts = [tuple(partial)]

    def result(self) -> torch.Tensor:
        if (partial := self.partial()) is None:
            raise StepError("run.gather saw no samples; expected at least one")
        index, turn, rows = partial
        by_turn = torch.argsort(turn, stable=True)
        ordered: torch.Tensor = rows[by_turn[torch.argsort(index[by_turn], stable=True)]]
        return ordered


def _joined(
    parts: Sequence[Sequence[torch.Tensor]], pad: float | None
) -> list[torch.Tensor] | None:
    columns = list(zip(*parts, strict=True))
    if pad is not None and columns:
        columns[-1] = _padded(columns[-1], pad)
    return [torch.cat(column) for column in columns] if parts else None


def _padded(rows: Sequence[torch.Tensor], value: float) -> tuple[torch.Tensor, ...]:
    """Return `rows`, padded with `value` to the same size in each dimension but the first."""
    sizes = [max(dimension) for dimension in zip(*(own.shape[1:] for own in rows), strict=True)]
    return tuple(
        nn.functional.pad(
            own,
            [
                e
                for size, had in zip(sizes[::-1], own.shape[:0:-1], strict=True)
                for e in (0, size - had)
            ],
            value=value,
        )
        for own in rows
    )


def _named(item: Any) -> Mapping[str, Any]:
    if not isinstance(item, Mapping):
        return {"": item}
    for name in item:
        if not isinstance(name, str):  # names are sent to ranks and saved as text
            raise StepError(
                f"a mapping of metrics has the key {name!r}, of type {type(name).__name__}; expected "
                "names of type str",
                hint=f"take str({name!r})",
            )
    return {str(name): value for name, value in item.items()}  # from subclasses of str, too


def _weighed(item: Item, microbatch: Microbatch) -> tuple[Number, Number]:
    """Return the product of an item of `run.mean` and its weight, and the weight.

    In a pair the second element is the weight. Other items are weighted by the number of samples.
    """
    if not isinstance(item, tuple):
        return _summed(item, microbatch, mean=True), microbatch.size
    if len(item) != 2:
        raise StepError(
            f"run.mean was given a tuple of {len(item)}; expected a value and its weight",
            hint="several metrics are a mapping: {'loss': (loss, tokens), 'top1': …}",
        )
    if not microbatch.size:
        return _zero(item[0]), _zero(item[1])
    value, weight = (_number(part) for part in item)
    return (value * weight if weight else _zero(item[0])), weight


def _summed(value: Value, microbatch: Microbatch, *, mean: bool = False) -> Number:
    """Return the sum of `value` over the samples of a microbatch; 0 if it has no samples.

    `value`: a tensor or array with one element per sample, or a single number. The number is the sum
    already or, with `mean`, the mean, which is multiplied by the number of samples.
    """
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value)
    if isinstance(value, torch.Tensor) and value.dim() > 0:
        _check_rows(value, microbatch)
        value = value[: microbatch.size].detach()
        return _number(value.double().sum() if value.is_floating_point() else value.sum())
    if not microbatch.size:
        return _zero(value)
    number = _number(value)
    return number * microbatch.size if mean else number


def _whole(value: Any) -> Any:
    """Return a script's value for a microbatch as a number or a detached tensor on the CPU."""
    if isinstance(value, np.ndarray | torch.Tensor):
        return torch.as_tensor(value).detach().cpu()
    return _number(value)


def _zero(value: Value) -> Number:
    """Return a zero of the type of `value`, `0.0` or `0`, even where `value` is NaN."""
    return 0.0 if isinstance(_number(value), float) else 0


def _number(value: Value) -> Number:
    if isinstance(value, torch.Tensor | np.ndarray) and math.prod(value.shape) != 1:
        raise StepError(
            f"a metric of shape {tuple(value.shape)} with a weight; expected the mean over what it "
            "weighs, a single number"
        )
    number = value.item() if hasattr(value, "item") else value  # a tensor or a NumPy scalar
    return int(number) if isinstance(number, bool) else number


def _check_rows(value: torch.Tensor, microbatch: Microbatch) -> None:
    expected = len(microbatch.indices)
    if value.dim() == 0 or value.shape[0] != expected:
        raise StepError(
            f"a metric of shape {tuple(value.shape)} for a microbatch of {expected} samples; "
            "expected one number for the microbatch, or one row per sample",
            hint="take .mean() or .sum() over what is not the samples' own dimension; run.sum takes any "
            "shape with per_sample=False",
        )


def _unwrap(values: dict[str, Any]) -> Any:
    return values[""] if list(values) == [""] else values


def _copy(value: Any) -> Any:
    """Return a copy of a metric's result, so that the script cannot change the recorded one."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    return {n: _copy(own) for n, own in value.items()} if isinstance(value, dict) else value
