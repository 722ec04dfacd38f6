"""Strategy `ddp`: DistributedDataParallel (DDP) fills buckets with gradients, which the run sums itself.

The script calls its own module, not DDP's wrapper: only DDP's buckets and autograd hooks are used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lockstep.engine.data.microbatch import Microbatch
from lockstep.engine.exchange.base import Exchange, Stateful, Sum, done
from lockstep.engine.exchange.flat import FlatLayout, as_typed, form, same_layout
from lockstep.engine.strategies.checks import INEXACT, shares_buffers, spans_devices
from lockstep.engine.strategies.ddp_reducer import DDPReducer
from lockstep.engine.strategies.gradient_accumulation import missing_like, take_gradients, write
from lockstep.engine.strategies.model_context import ModelContext
from lockstep.engine.strategies.wrapped_model import WrappedModel
from lockstep.errors import MismatchError, ModelError
from lockstep.registry import EXCHANGES
from lockstep.world import accelerator

#: The number of the batch is sent as this many bytes, one per element of the bucket: fp32 sums bytes of up
#: to 65,793 ranks exactly.
_PLACE_BYTES = 8


@dataclass(frozen=True, slots=True)
class _DeferredBucket:
    """A bucket of gradients that is not summed over ranks before the backward pass has ended.

    Used for a loss that depends on several models: the order of their buckets may differ between ranks.
    """

    parameters: list[torch.Tensor]
    gradients: torch.Tensor
    last: bool


class ReplicatedModel(WrappedModel):
    """A model of which each rank has a copy; gradients are summed over ranks during the backward pass."""

    def __init__(
        self,
        module: nn.Module,
        context: ModelContext,
        exchange: Exchange,
        settings: Mapping[str, Any],
    ) -> None:
        shares = shares_buffers(settings)
        super().__init__(module, context, shares_buffers=shares)
        self.exactness = "exact" if shares else "approximate"
        assert context.group is not None
        self._size = dist.get_world_size(context.group)
        self._exchange = exchange
        self._stateful = exchange if isinstance(exchange, Stateful) else None
        self._exchanging = context.exchanging
        self._places = {id(p): place for place, p in enumerate(self.parameters)}
        # Layouts in memory at the time at which DDP makes its buckets.
        self._forms = [form(p) for p in self.parameters]
        self._strides = [p.stride() for p in self.parameters]
        self._parts: dict[
            tuple[int, ...], FlatLayout
        ] = {}  # keys: indices of a bucket's parameters
        # DDP must synchronize the first backward pass of a static graph, but of several replicas on a
        # rank only the last one's is synchronized. The setting changes no bits.
        several = context.replicas > self._size
        self._is_static = bool(settings.get("static_graph")) and not several
        self._finds_unused = not self._is_static and settings.get("find_unused_parameters", True)
        self._unused: set[int] = set()
        self._place = 0
        compares = EXCHANGES.find(context.exchange).compares_batches
        self._place_bytes = 0 if compares else _PLACE_BYTES
        self._late: list[_DeferredBucket] | None = None
        self._used_anywhere: torch.Tensor | None = None
        ignored = EXCHANGES.keywords() | INEXACT.keys()  # of an exchange, or about buffers
        of_ddp = {name: v for name, v in settings.items() if name not in ignored}
        if accelerator.holds(context.device) and not spans_devices(module):
            of_ddp = {"device_ids": [context.device.index], **of_ddp}
        ours = {
            "process_group": context.group,
            "static_graph": self._is_static,
            # This class finds unused parameters: DDP would use an additional all-reduce for that.
            "find_unused_parameters": False,
        }
        self._reducer = DDPReducer(module, self._reduce, of_ddp | ours)

    def _before_backward(self, microbatch: Microbatch, *, alone: bool) -> None:
        if not microbatch.last:
            return
        self._check_order()
        self._place = microbatch.place
        self._unused = set()
        self._used_anywhere = None
        # If the loss uses several models, the order of their hooks could differ between ranks.
        self._late = None if alone else []
        self._reducer.begin_backward()

    def _check_order(self) -> None:
        """Raise a `ModelError` if the memory order of a parameter has changed since DDP made its buckets.

        The order is that of the parameter's strides.
        """
        now = [p.stride() for p in self.parameters]
        if now == self._strides:
            return
        for place, parameter in enumerate(self.parameters):
            if not same_layout(form(parameter), self._forms[place]):
                names = {id(p): name for name, p in self.module.named_parameters()}
                raise ModelError(
                    f"{names[id(parameter)]} of {type(self.module).__name__} was given a different order "
                    f"in memory after run.model: strides {now[place]}; expected {self._strides[place]}",
                    hint="model.to(memory_format=…) before run.model(model)",
                )
        self._strides = now

    def _sum_gradients(self, microbatch: Microbatch) -> None:
        if not microbatch.last:
            self.accumulation.push(take_gradients(self.parameters))
            return
        self._reducer.end_backward()
        if not self._is_static:
            self._complete_buckets()
        late = self._late or []
        sums = [self._sum(one.parameters, one.gradients, last=one.last) for one in late]
        for one, total in zip(late, sums, strict=True):
            parts = self._parts_of(one.parameters).of(total.wait())
            for parameter, part in zip(one.parameters, parts, strict=True):
                assert parameter.grad is not None, "DDP has put the bucket there"
                parameter.grad.copy_(as_typed(part, parameter))
        self.accumulation.take()  # the hook has used them, bucket by bucket
        if self._unused and self._used_anywhere is not None:
            used = self._used_anywhere.tolist()
            for place in self._unused:
                if not used[place]:
                    self.parameters[place].grad = None  # as on a single rank
        self._reducer.rebuild_buckets()

    def _complete_buckets(self) -> None:
        """Set zero gradients for parameters that the loss did not use, to complete DDP's buckets.

        With `find_unused_parameters=False` a `ModelError` is raised instead.
        """
        self._unused = {i for i, p in enumerate(self.parameters) if p.grad is None}
        if not self._unused:
            return
        if not self._finds_unused:
            raise ModelError(
                f"{len(self._unused)} parameters of {type(self.module).__name__} were not used in "
                "the loss, with find_unused_parameters=False",
                hint="leave find_unused_parameters out: then they are found",
            )
        rest = [self.parameters[place] for place in sorted(self._unused)]
        torch.autograd.backward(rest, [missing_like(p) for p in rest])

    def _reduce(self, bucket: dist.GradBucket) -> Sum:
        """DDP's communication hook: return a future of the bucket's sum over all ranks.

        If the loss uses several models, store the bucket, to sum it after the backward pass.
        """
        parameters, buffer, last = bucket.parameters(), bucket.buffer(), bucket.is_last()
        if self._late is None:
            return self._sum(parameters, buffer, last=last)
        self._late.append(_DeferredBucket(parameters, buffer.clone(), last))
        return done(buffer)

    def _sum(self, parameters: list[torch.Tensor], gradients: torch.Tensor, *, last: bool) -> Sum:
        """Begin to sum the `gradients` of one bucket over all ranks; return a future of the total.

        `parameters`: those of the bucket. With the `last` bucket, `_notes` further elements are sent, which
        describe the batch for the other ranks.
        """
        size = gradients.numel()
        if self._stateful is not None:
            self._stateful.announce(parameters)
        slots = self._exchange.slots(gradients, self._notes if last else 0)
        if last:
            self._write_notes([slot[size:] for slot in slots])
        self._fill([slot[:size] for slot in slots], parameters, gradients)
        with self._exchanging:
            total = self._exchange.start(slots, last=last, place=self._place)
            if not last:
                return total
            whole = total.wait()
        self._read_notes(whole[size:])
        return done(whole[:size])

    @property
    def _notes(self) -> int:
        """Number of elements sent after the last bucket of gradients.

        The elements are the batch's number, to compare it between ranks, and for each parameter whether
        the loss used it.
        """
        return self._place_bytes + (len(self.parameters) if self._finds_unused else 0)

    def _write_notes(self, tails: list[torch.Tensor]) -> None:
        for tail in tails[1:]:
            tail.zero_()
        tails[0].fill_(1)
        size = self._place_bytes
        if size:
            step = torch.tensor(list(self._place.to_bytes(size, "big")), dtype=tails[0].dtype)
            tails[0][:size].copy_(step, non_blocking=True)
        nodes = self.accumulation.nodes
        for place in self._unused if self._finds_unused else ():
            if all(node[place] is None for node in nodes):
                tails[0][size + place] = 0

    def _read_notes(self, tail: torch.Tensor) -> None:
        size = self._place_bytes
        self._used_anywhere = tail[size:] if self._finds_unused else None
        if not size or accelerator.holds(tail) or tail.dtype not in (torch.float32, torch.float64):
            return  # reading would wait for the device, or sums of bytes would be rounded
        expected = [byte * self._size for byte in self._place.to_bytes(size, "big")]
        if tail[:size].tolist() != expected:
            raise MismatchError(
                f"ranks compute gradients of {type(self.module).__name__} for different batches",
                hint="a loader was made, iterated over or left on some ranks only, or a `continue` skipped "
                "a microbatch, which run.backward(loss, weight=0) leaves out; all ranks must do the same",
            )

    def _fill(
        self, slots: list[torch.Tensor], parameters: list[torch.Tensor], buffer: torch.Tensor
    ) -> None:
        """Write this rank's partial sums of a bucket's gradients to `slots`, one flat tensor each.

        Each sum is over neighbouring replicas. `parameters`: those of the bucket. `buffer`: the flat
        gradients of this rank's last replica, which no partial sum contains yet.
        """
        nodes = self.accumulation.nodes
        kept = len(nodes) - self.accumulation.pending_merges
        places = [self._places[id(p)] for p in parameters] if nodes else []
        parts = self._parts_of(parameters if nodes else [])
        for slot, node in zip(slots, nodes[:kept], strict=False):
            write(slot, [node[place] for place in places], parts)
        for node in reversed(nodes[kept:]):
            flat = torch.empty_like(buffer)
            write(flat, [node[place] for place in places], parts)
            buffer.add_(flat)
        if slots[kept].data_ptr() != buffer.data_ptr():
            slots[kept].copy_(buffer)

    def _parts_of(self, parameters: list[torch.Tensor]) -> FlatLayout:
        """Return the positions and shapes of `parameters` in the flat tensor of their bucket."""
        places = tuple([self._places[id(p)] for p in parameters])
        if places not in self._parts:
            self._parts[places] = FlatLayout(self._forms[place] for place in places)
        return self._parts[places]

    def extras(self) -> dict[str, Any]:
        """Return state of the model that `state_dict`s lack, such as PowerSGD's number of steps.

        The result is saved in checkpoints.
        """
        exchange, extras = self._stateful, super().extras()
        return extras if exchange is None else {**extras, exchange.name: exchange.state()}

    def load_extras(self, extras: Mapping[str, Any]) -> None:
        """Restore state from `extras`, a result of `extras()` that a checkpoint contains."""
        super().load_extras(extras)
        # A run may be resumed with another exchange.
        exchange = self._stateful
        if exchange is not None and exchange.name in extras:
            exchange.load(extras[exchange.name])

    def ends(self) -> dict[str, int]:
        """Return `{"sent": N}`, N being the bytes of gradients that this rank sent; `{}` if not counted."""
        return {} if self._exchange.sent is None else {"sent": self._exchange.sent}

    def close(self) -> None:
        """Release the shared memory and connections by which gradients are summed."""
        self._exchange.close()


def wrap(module: nn.Module, context: ModelContext, settings: dict[str, Any]) -> ReplicatedModel:
    """Return `module` as a `ReplicatedModel`, whose gradients the run's exchange sums over ranks.

    `settings`: the keywords given to `run.model`.
    """
    parameters = [p for p in module.parameters() if p.requires_grad]
    exchange = context.make_exchange(parameters, str(context.number), settings)
    return ReplicatedModel(module, context, exchange, settings)
