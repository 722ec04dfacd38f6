"""Models that several ranks hold together (pipeline, tensor): base class, and sums of gradients.

The ranks form a mesh: those of a row hold one model together, those of a column the same part of the model.
Gradients of a part are summed over its column.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from lockstep.engine.data.microbatch import Microbatch
from lockstep.engine.exchange.base import Exchange
from lockstep.engine.exchange.flat import FlatLayout, as_typed, form
from lockstep.engine.strategies.gradient_accumulation import Gradients, write
from lockstep.engine.strategies.model_context import ModelContext
from lockstep.engine.strategies.wrapped_model import WrappedModel

_BUCKET_BYTES = 25 << 20  # as in DistributedDataParallel


class SpreadModel(WrappedModel):
    """A model of which each rank of a row of the mesh holds a part (strategies `pipeline` and `tensor`).

    `reducer`: sums gradients over the ranks that hold the same part; `None` if only one rank does.
    """

    is_split = True

    def __init__(self, module: nn.Module, context: ModelContext, reducer: Reducer | None) -> None:
        super().__init__(module, context)
        self._reducer, self._warn = reducer, context.warn

    def _accumulate(self, gradients: Gradients, microbatch: Microbatch) -> Gradients | None:
        """Add one replica's gradients to this rank's partial sums.

        After the rank's last replica, return the total over all ranks; before, return `None`.
        """
        self.accumulation.push(gradients)
        if not microbatch.last:
            return None
        nodes = self.accumulation.take()
        return nodes[0] if self._reducer is None else self._reducer(nodes, microbatch.place)

    def _warn_of_draws(self, where: str) -> None:
        """Set the model's exactness to `approximate`, and print a warning of its random numbers.

        The numbers depend on how the model is split over ranks. The warning is printed only once. `where`:
        how the numbers are drawn, such as "on each rank for its part".
        """
        if self.exactness != "approximate":
            self.exactness = "approximate"
            name = type(self.module).__name__
            self._warn(f"lockstep: {name} draws, {where}: the run is approximate")

    def close(self) -> None:
        """Release the shared memory and connections by which gradients are summed."""
        if self._reducer is not None:
            self._reducer.close()


class Reducer:
    """Sums gradients over the ranks that hold the same part of a model, bucket by bucket."""

    def __init__(self, exchange: Exchange, parameters: Sequence[torch.Tensor]) -> None:
        self._exchange = exchange
        self._parameters = parameters
        self._buckets, _ = dist._compute_bucket_assignment_by_size(
            list(parameters), [_BUCKET_BYTES]
        )
        # Computed once: later a rank may give a parameter other strides in memory.
        self._parts = [FlatLayout(form(parameters[p]) for p in bucket) for bucket in self._buckets]

    def __call__(self, nodes: Sequence[Gradients], place: int) -> Gradients:
        """Return the sum of gradients over all replicas; `None` for parameters that no replica has used.

        Args:
            nodes: this rank's partial sums; each has one gradient per parameter.
            place: number that identifies the batch; the same on all ranks.
        """
        sums = []
        for number, (bucket, parts) in enumerate(zip(self._buckets, self._parts, strict=True)):
            last = number == len(self._buckets) - 1
            first, size = self._parameters[bucket[0]], parts.size
            # After the last gradients, one element per parameter: how many ranks use it.
            notes = len(self._parameters) if last else 0
            memory = first.new_empty(size, dtype=first.dtype.to_real())
            slots = self._exchange.slots(memory, notes)
            for position, (slot, node) in enumerate(zip(slots, nodes, strict=True)):
                write(slot[:size], [node[p] for p in bucket], parts)
                if last:
                    used = [position == 0 and self._is_used(nodes, p) for p in range(notes)]
                    # Without non_blocking the copy to a GPU waits for its stream.
                    slot[size:].copy_(torch.tensor(used, dtype=slot.dtype), non_blocking=True)
            sums.append(self._exchange.start(slots, last=last, place=place))
        return self._read([total.wait() for total in sums], nodes)

    @staticmethod
    def _is_used(nodes: Sequence[Gradients], place: int) -> bool:
        return any(node[place] is not None for node in nodes)

    def _read(self, sums: Sequence[torch.Tensor], nodes: Sequence[Gradients]) -> Gradients:
        number = len(self._parameters)
        used = [self._is_used(nodes, place) for place in range(number)]
        if not all(used):  # else the sum is not read, since reading waits for the device
            used = sums[-1][-number:].tolist()
        result: Gradients = [None] * len(self._parameters)
        for bucket, parts, total in zip(self._buckets, self._parts, sums, strict=True):
            for place, part in zip(bucket, parts.of(total), strict=True):
                if used[place]:
                    # Copied to the memory of this rank's gradient: the exchange reuses the sum's memory.
                    own = next((n[place] for n in nodes if n[place] is not None), None)
                    parameter = self._parameters[place]
                    result[place] = own = torch.empty_like(parameter) if own is None else own
                    own.copy_(as_typed(part, parameter))
        return result

    def close(self) -> None:
        """Release the shared memory and connections by which gradients are summed."""
        self._exchange.close()


def make_reducer(
    parameters: Sequence[torch.Tensor], context: ModelContext, column: int
) -> Reducer | None:
    """Return a `Reducer` for the gradients of one model part; `None` if no sum is needed.

    No sum is needed if only one rank holds the part, or if the part has no `parameters`. `column`: index of
    the part, the same on all ranks that hold it.
    """
    if context.forest.size == 1 or not parameters:
        return None
    exchange = context.make_exchange(parameters, f"{context.number}.{column}", {})
    return Reducer(exchange, parameters)
