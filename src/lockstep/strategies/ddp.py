"""DistributedDataParallel, with an exchange of ours as its communication hook."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.data.microbatch import Microbatch
from lockstep.errors import ExactnessError, ModelError
from lockstep.exchange.base import Exchange, Sum
from lockstep.strategies.contributions import NOTHING, Gradients, take_gradients
from lockstep.strategies.held import HeldModel, refuse_sparse

#: DDP settings under which its sums escape the exchange, and why.
INEXACT = {
    "broadcast_buffers": "each rank would keep running statistics of its own",
    "forward_sync_buffers": "each rank would keep running statistics of its own",
    "mixed_precision": "gradients would be summed in reduced precision",
    "delay_all_reduce_named_params": "these parameters bypass the exchange",
    "param_to_hook_all_reduce": "these parameters bypass the exchange",
}


class Replicated(DistributedDataParallel):
    """DistributedDataParallel that looks like the module it holds.

    Attributes, parameter names and `state_dict` are the module's own, so that a script reads the
    same on every layout and no checkpoint has keys that begin with `module.`.
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's own state."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load a state into the module."""
        return self.module.load_state_dict(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the module's parameters under the module's own names."""
        yield from self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the module's buffers under the module's own names."""
        yield from self.module.named_buffers(*args, **kwargs)


class ReplicatedModel(HeldModel):
    """A model that every rank holds a copy of, each for its block of replicas.

    Args:
        module: the user's model, already on its device.
        block: the replicas of this rank.
        replicas: number of replicas in all.
        group: the process group.
        exchange: how gradients meet.
        settings: keyword arguments for DistributedDataParallel.
    """

    def __init__(
        self,
        module: nn.Module,
        block: range,
        replicas: int,
        group: dist.ProcessGroup,
        exchange: Exchange,
        settings: dict[str, Any],
    ) -> None:
        super().__init__(module, block, replicas, group)
        self._exchange = exchange
        self._places = {id(p): place for place, p in enumerate(self.parameters)}
        if settings.get("static_graph") and replicas > dist.get_world_size(group):
            # DDP must synchronise the first backward pass it sees of a static graph; here it would
            # be the last of several. The setting saves time and changes no bits.
            settings = {**settings, "static_graph": False}
        # A model may use its parameters as it likes on one rank, so it may on several.
        defaults = {"find_unused_parameters": not settings.get("static_graph")}
        self._is_static = bool(settings.get("static_graph"))
        self._finds_unused = bool({**defaults, **settings}["find_unused_parameters"])
        self._hooked = False
        self._ddp = Replicated(
            module, **{"process_group": group, **defaults, **settings, **_own_buffers()}
        )
        self._ddp.require_backward_grad_sync = False
        self._ddp.find_unused_parameters = False  # the reducer still does; see _before_backward
        # A lambda, because DDP compares annotations, which are strings in this module.
        self._ddp.register_comm_hook(None, lambda _state, bucket: self._reduce(bucket))

    @property
    def wrapped(self) -> nn.Module:
        """The module inside DistributedDataParallel."""
        return self._ddp

    def _prepare(self, microbatch: Microbatch) -> None:
        if self._is_static:
            self._ddp.require_backward_grad_sync = microbatch.last

    def _before_backward(self, microbatch: Microbatch, loss: torch.Tensor) -> None:
        if not microbatch.last:
            return
        self._hooked = False
        self._give_sibling()
        if not self._is_static:
            # DDP would do this in the forward pass, guessing from its outputs what backward will
            # reach, and would then wait for a backward pass that may never come (a generator whose
            # output is detached). The loss is what tells.
            self._ddp.reducer.prepare_for_backward([loss] if self._finds_unused else [])

    def _give_sibling(self) -> None:
        """Let the last backward pass add to its sibling's gradients: the tree's own addition.

        Besides saving a pass over memory, this gives a gradient to each parameter that an earlier
        replica used, which DDP insists on.
        """
        nodes = self.contributions.nodes
        if not nodes:
            return
        sibling = self.contributions.pop_sibling() or [None] * len(self.parameters)
        for place, parameter in enumerate(self.parameters):
            parameter.grad = sibling[place]
            if parameter.grad is None and any(node[place] is not None for node in nodes):
                parameter.grad = torch.full_like(parameter, NOTHING)

    def _meet(self, microbatch: Microbatch) -> None:
        if microbatch.last:
            self.contributions.take()  # the hook has used them, bucket by bucket
            self._check_reached(reached=self._hooked)
            return
        gradients = take_gradients(self.parameters)
        self._check_reached(reached=any(gradient is not None for gradient in gradients))
        self.contributions.push(gradients)

    def _reduce(self, bucket: dist.GradBucket) -> Sum:
        self._hooked = True
        buffer = bucket.buffer()
        slots = self._exchange.slots(buffer)
        self._fill(slots, bucket, buffer)
        return self._exchange.start(slots, last=bucket.is_last())

    def _fill(
        self, slots: list[torch.Tensor], bucket: dist.GradBucket, buffer: torch.Tensor
    ) -> None:
        """Write this rank's nodes: those collected before, and the one that the last replica completes."""
        nodes = self.contributions.nodes
        merged = self.contributions.pending_merges
        kept = len(nodes) - merged
        parameters = bucket.parameters()
        places = [self._places[id(p)] for p in parameters] if nodes else []
        for parameter, view in zip(parameters, bucket.gradients(), strict=True):
            if parameter.grad is None:
                view.fill_(NOTHING)  # DDP has put zeros there
        for slot, node in zip(slots, nodes[:kept], strict=False):
            _flatten(node, places, bucket, slot)
        for node in reversed(nodes[kept:]):
            buffer.add_(_flatten(node, places, bucket, torch.empty_like(buffer)))
        if slots[kept].data_ptr() != buffer.data_ptr():
            slots[kept].copy_(buffer)

    def close(self) -> None:
        """Close the exchange."""
        self._exchange.close()


def hush_advice(group: dist.ProcessGroup) -> None:
    """Use up DDP's one warning against `find_unused_parameters`, which would go to every log.

    Looking for unused parameters is our choice, so the advice is not for the user; torch prints it
    from C++, once per process, past Python's warning filters. A collective call.
    """
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with Path(os.devnull).open("w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        tiny = DistributedDataParallel(
            nn.Linear(1, 1), process_group=group, find_unused_parameters=True
        )
        tiny(torch.zeros(1, 1))
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _own_buffers() -> dict[str, Any]:
    """Keep DDP from broadcasting buffers: they are the held model's affair (strategies/buffers.py)."""
    known = inspect.signature(DistributedDataParallel).parameters
    # The newer name; torch 2.13 warns about the older one, which torch 2.11 has alone.
    newer = "forward_sync_buffers"
    return {newer: False} if newer in known else {"broadcast_buffers": False}


def _flatten(
    node: Gradients, places: list[int], bucket: dist.GradBucket, out: torch.Tensor
) -> torch.Tensor:
    """Write a node's gradients of a bucket's parameters to `out`, `NOTHING` where there are none."""
    offset = 0
    for place, view in zip(places, bucket.gradients(), strict=True):
        part = out[offset : offset + view.numel()]
        gradient = node[place]
        if gradient is None:
            part.fill_(NOTHING)
        else:
            part.copy_(gradient.reshape(-1))
        offset += view.numel()
    return out


def check_settings(module: nn.Module, settings: dict[str, Any], *, exact: bool) -> None:
    """Refuse what DDP cannot do, and with `exact` what would break the promise.

    Raises:
        ExactnessError: for a setting under which sums escape the exchange.
        ModelError: for sparse gradients.
    """
    refuse_sparse(module)
    if not exact:
        return
    for name, reason in INEXACT.items():
        if name in settings and settings[name] not in (None, name.endswith("buffers")):
            raise ExactnessError(
                f"{name}={settings[name]!r} would break the promise: {reason}",
                hint=f"leave out {name}, or say exact=False to the run",
            )


def check_same_models(
    module: nn.Module, name: str, store: dist.Store, rank: int, size: int
) -> None:
    """Refuse ranks that build different models, before DDP would hang or fail on them.

    Raises:
        ModelError: naming the first parameter that differs from rank 0's.
    """
    own = [f"{key}: {tuple(p.shape)} {p.dtype}" for key, p in module.named_parameters()]
    key = f"model/{name}"
    if rank == 0:
        store.set(key, "\n".join(own))
    theirs = store.get(key).decode().split("\n")
    if own == theirs:
        return
    differing = next(
        ((a, b) for a, b in zip(own, theirs, strict=False) if a != b),
        (f"{len(own)} parameters", f"{len(theirs)} parameters"),
    )
    raise ModelError(
        f"rank {rank} of {size} built another {type(module).__name__} than rank 0: "
        f"{differing[0]}; rank 0 has {differing[1]}",
        hint="build the model from the same arguments on every rank, never from the rank",
    )
