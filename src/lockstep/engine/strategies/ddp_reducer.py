"""DistributedDataParallel as a reducer: its buckets and its hooks into autograd, without its forward pass.

Only this module calls DDP's private functions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from lockstep.engine.exchange.base import Sum
from lockstep.engine.strategies.passes import watch_forward


class DDPReducer:
    """Calls a communication hook with each bucket of gradients, during `run.backward`."""

    def __init__(
        self,
        module: nn.Module,
        hook: Callable[[dist.GradBucket], Sum],
        settings: Mapping[str, Any],
    ) -> None:
        self._ddp = DistributedDataParallel(module, **_own_buffers(), **settings)
        self._is_first_static = bool(settings["static_graph"])
        self._forward = ExitStack()
        parts = list(module.modules())
        if any(hasattr(p, "_orig_mod") or p._compiled_call_impl is not None for p in parts):
            watch_forward(module, self._enter_ddp, self._forward.close, always=True)
        # A lambda, because DDP compares annotations, which are strings in this module.
        self._ddp.register_comm_hook(None, lambda _state, bucket: hook(bucket))

    def _enter_ddp(self) -> None:
        """Let torch.compile see DDP around the module: it cuts its graphs at the buckets then."""
        self._forward.enter_context(self._ddp._inside_ddp_forward())

    def begin_backward(self) -> None:
        """Prepare for the backward pass whose gradients are summed.

        DDP's own forward pass would do this, and then take the next backward pass for the one to
        synchronise, also where none belongs to that forward pass (a generator whose output is detached).
        """
        self._ddp.reducer.prepare_for_backward([])

    def end_backward(self) -> None:
        """Call the hooks of a static graph's first backward pass, which DDP delays to its end."""
        if self._is_first_static:
            self._is_first_static = False
            _Callback.run(self._ddp.reducer._delay_all_reduce)  # type: ignore[attr-defined]

    def rebuild_buckets(self) -> None:
        """Let ranks agree on buckets after their first backward pass.

        By itself DDP does so in the next forward pass, where the watchdog does not look.
        """
        self._ddp.reducer._rebuild_buckets()


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


def _own_buffers() -> dict[str, Any]:
    """Keep DDP from broadcasting buffers: `WrappedModel` does (strategies/buffers.py)."""
    known = inspect.signature(DistributedDataParallel).parameters
    # The newer name; torch 2.13 warns about the older one, which torch 2.11 has alone.
    newer = "forward_sync_buffers"
    return {newer: False} if newer in known else {"broadcast_buffers": False}
