"""Strategy `ddp`: DistributedDataParallel as reducer, with an exchange as communication hook.

The script calls its own module: of DDP only the buckets and the hooks into autograd are used.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from lockstep.engine.data.microbatch import Microbatch
from lockstep.engine.exchange.base import Exchange, Remembering, Sum, done
from lockstep.engine.exchange.choose import POWERSGD_KEYWORDS, make
from lockstep.engine.exchange.flat import Parts, as_typed, form, lies_alike
from lockstep.engine.strategies.checks import INEXACT, shares_buffers, spans_devices
from lockstep.engine.strategies.gradient_accumulation import nothing_like, take_gradients, write
from lockstep.engine.strategies.model_context import ModelContext
from lockstep.engine.strategies.passes import watch_forward
from lockstep.engine.strategies.single import SingleModel
from lockstep.engine.strategies.wrapped_model import WrappedModel
from lockstep.errors import MismatchError, ModelError
from lockstep.registry import EXCHANGES, resolve
from lockstep.world import accelerator

#: Bytes of a place, one element each: sums of bytes are exact in fp32 for 65,793 ranks.
_PLACE_BYTES = 8


@dataclass(frozen=True, slots=True)
class _Late:
    """A bucket that is summed after the backward pass."""

    parameters: list[torch.Tensor]
    gradients: torch.Tensor
    last: bool

    def finish(self, total: Sum, parts: Parts) -> None:
        """Give the parameters their part of the sum."""
        for parameter, part in zip(self.parameters, parts.of(total.wait()), strict=True):
            assert parameter.grad is not None, "DDP has put the bucket there"
            parameter.grad.copy_(as_typed(part, parameter))


class ReplicatedModel(WrappedModel):
    """A model that every rank holds a copy of, each for its block of replicas.

    Args:
        module: the user's model, already on its device.
        context: where it lives.
        exchange: sums the gradients.
        settings: keyword arguments of `run.model`.
    """

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
        self._remembering = exchange if isinstance(exchange, Remembering) else None
        self._exchanging = context.exchanging
        self._places = {id(p): place for place, p in enumerate(self.parameters)}
        # As DDP sees them when it makes its buckets.
        self._forms = [form(p) for p in self.parameters]
        self._strides = [p.stride() for p in self.parameters]
        self._parts: dict[tuple[int, ...], Parts] = {}  # by the places of a bucket's parameters
        # DDP must synchronise the first backward pass that it sees of a static graph; where ranks
        # host several replicas it would be the last of several. The setting changes no bits.
        several = context.replicas > self._size
        self._is_static = bool(settings.get("static_graph")) and not several
        self._finds_unused = not self._is_static and settings.get("find_unused_parameters", True)
        self._unused: set[int] = set()
        self._place = 0
        compares = EXCHANGES.find(context.exchange).compares_batches
        self._place_bytes = 0 if compares else _PLACE_BYTES
        self._late: list[_Late] | None = None
        self._used_anywhere: torch.Tensor | None = None
        # Unused parameters are found here: DDP would spend an all-reduce of its own on them.
        ours = {
            "process_group": context.group,
            "static_graph": self._is_static,
            "find_unused_parameters": False,
            **_own_buffers(),
        }
        of_exchanges = {*POWERSGD_KEYWORDS, *INEXACT}  # and whose buffers there are
        theirs = {name: v for name, v in settings.items() if name not in of_exchanges}
        if accelerator.holds(context.device) and not spans_devices(module):
            theirs = {"device_ids": [context.device.index], **theirs}
        self._ddp = DistributedDataParallel(module, **(theirs | ours))
        self._is_first_static = self._is_static
        self._forward = ExitStack()
        if _is_compiled(module):
            watch_forward(module, self._enter_ddp, self._forward.close, always=True)
        # A lambda, because DDP compares annotations, which are strings in this module.
        self._ddp.register_comm_hook(None, lambda _state, bucket: self._reduce(bucket))

    def _enter_ddp(self) -> None:
        """Let torch.compile see DDP around the module: it cuts its graphs at the buckets then."""
        self._forward.enter_context(self._ddp._inside_ddp_forward())

    def _before_backward(self, microbatch: Microbatch, *, alone: bool) -> None:
        if not microbatch.last:
            return
        self._check_order()
        self._place = microbatch.place
        self._unused = set()  # of this batch nothing is known yet
        self._used_anywhere = None
        # Hooks of several models would wait for other ranks in an order that depends on the data.
        self._late = None if alone else []
        # DDP's own forward pass would do this, and then take the next backward pass for the one to
        # synchronise, also where none belongs to that forward pass (a generator whose output is detached).
        self._ddp.reducer.prepare_for_backward([])

    def _check_order(self) -> None:
        """Refuse parameters that were turned in memory: DDP goes by the strides that it has seen first."""
        now = [p.stride() for p in self.parameters]
        if now == self._strides:
            return
        for place, parameter in enumerate(self.parameters):
            if not lies_alike(form(parameter), self._forms[place]):
                names = {id(p): name for name, p in self.module.named_parameters()}
                raise ModelError(
                    f"{names[id(parameter)]} of {type(self.module).__name__} was given another order in "
                    f"memory after run.model: strides {now[place]}; expected {self._strides[place]}",
                    hint="model.to(memory_format=…) before run.model(model)",
                )
        self._strides = now  # so that the next step need not look as closely

    def _meet(self, microbatch: Microbatch) -> None:
        if not microbatch.last:
            self.accumulation.push(take_gradients(self.parameters))
            return
        if self._is_first_static:
            self._is_first_static = False
            _Callback.run(self._ddp.reducer._delay_all_reduce)  # type: ignore[attr-defined]
        elif not self._is_static:
            self._reach_the_rest()
        late = self._late or []
        sums = [self._sum(one.parameters, one.gradients, last=one.last) for one in late]
        for one, total in zip(late, sums, strict=True):
            one.finish(total, self._parts_of(one.parameters))
        self.accumulation.take()  # the hook has used them, bucket by bucket
        self._drop_unused()
        # After its first backward pass DDP lets ranks agree on buckets. By itself it does so in the next
        # forward pass, where the watchdog does not look.
        self._ddp.reducer._rebuild_buckets()

    def _reach_the_rest(self) -> None:
        """Give DDP the gradients that it still waits for: of parameters that the loss did not use."""
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
        torch.autograd.backward(rest, [nothing_like(p) for p in rest])

    def _drop_unused(self) -> None:
        """Leave parameters that no replica has used without a gradient, as a single rank does."""
        if not self._unused or self._used_anywhere is None:
            return
        used = self._used_anywhere.tolist()
        for place in self._unused:
            if not used[place]:
                self.parameters[place].grad = None

    def _reduce(self, bucket: dist.GradBucket) -> Sum:
        """The communication hook: start to sum a bucket, or keep it for later."""
        parameters, buffer, last = bucket.parameters(), bucket.buffer(), bucket.is_last()
        if self._late is None:
            return self._sum(parameters, buffer, last=last)
        self._late.append(_Late(parameters, buffer.clone(), last))
        return done(buffer)

    def _sum(self, parameters: list[torch.Tensor], gradients: torch.Tensor, *, last: bool) -> Sum:
        """Start to sum the flat gradients of `parameters`; behind the last ones go notes for all."""
        size = gradients.numel()
        if self._remembering is not None:
            self._remembering.announce(parameters)
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
        """Number of elements behind the last bucket: used parameters, and the step of each rank."""
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
        """Write this rank's tree nodes: those collected before, and the one that is complete now."""
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

    def _parts_of(self, parameters: list[torch.Tensor]) -> Parts:
        """Return where the gradients of a bucket lie in it."""
        places = tuple([self._places[id(p)] for p in parameters])
        if places not in self._parts:
            self._parts[places] = Parts(self._forms[place] for place in places)
        return self._parts[places]

    def extras(self) -> dict[str, Any]:
        """Return what the exchange remembers from step to step, where it does."""
        exchange, extras = self._remembering, super().extras()
        return extras if exchange is None else {**extras, exchange.name: exchange.state()}

    def load_extras(self, extras: Mapping[str, Any]) -> None:
        """Take what `extras` returned."""
        super().load_extras(extras)
        # A run may continue with another exchange than it began with.
        exchange = self._remembering
        if exchange is not None and exchange.name in extras:
            exchange.load(extras[exchange.name])

    def ends(self) -> dict[str, int]:
        """Return bytes that this rank has given to others, where the exchange knows."""
        return {} if self._exchange.sent is None else {"sent": self._exchange.sent}

    def close(self) -> None:
        """Close the exchange."""
        self._exchange.close()


class _Callback(torch.autograd.Function):
    """Runs a function as a callback at the end of a backward pass, where DDP's reducer must be called."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, act: Callable[[], None]) -> torch.Tensor:
        ctx.act = act
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        Variable._execution_engine.queue_callback(ctx.act)
        return gradient, None

    @classmethod
    def run(cls, act: Callable[[], None]) -> None:
        """Make a backward pass of its own, and call `act` at its end."""
        cls.apply(torch.zeros((), requires_grad=True), act).backward()  # type: ignore[no-untyped-call]


def _is_compiled(module: nn.Module) -> bool:
    parts = list(module.modules())
    return any(hasattr(p, "_orig_mod") or p._compiled_call_impl is not None for p in parts)


def _own_buffers() -> dict[str, Any]:
    """Keep DDP from broadcasting buffers: they are the held model's affair (strategies/buffers.py)."""
    known = inspect.signature(DistributedDataParallel).parameters
    # The newer name; torch 2.13 warns about the older one, which torch 2.11 has alone.
    newer = "forward_sync_buffers"
    return {newer: False} if newer in known else {"broadcast_buffers": False}


def hold(module: nn.Module, context: ModelContext, settings: dict[str, Any]) -> WrappedModel:
    """Hold a copy of `module` on every rank, or on the only one, as the exchange asks for."""
    if context.group is None:
        return SingleModel(module, context)
    by_itself = EXCHANGES.find(context.exchange).hold
    held: WrappedModel = resolve(by_itself or replicate)(module, context, settings)
    return held


def replicate(
    module: nn.Module, context: ModelContext, settings: dict[str, Any]
) -> ReplicatedModel:
    """Hold a copy of `module` on every rank."""
    assert context.group is not None
    exchange = make(
        context.exchange,
        context.forest,
        [p for p in module.parameters() if p.requires_grad],
        group=context.group,
        store=context.store,
        key=str(context.number),
        settings=settings,
    )
    return ReplicatedModel(module, context, exchange, settings)
