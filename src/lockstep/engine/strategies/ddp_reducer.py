"""Use of DistributedDataParallel's buckets and autograd hooks without its forward pass.

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
    """Calls `hook` with each bucket of gradients of a backward pass, as DistributedDataParallel would.

    `hook`: a communication hook of DDP. `settings`: keywords of DDP.
    """

    def __init__(
        self,
        module: nn.Module,
        hook: Callable[[dist.GradBucket], Sum],
        settings: Mapping[str, Any],
    ) -> None:
        # `Buffers` broadcasts buffers, not DDP. torch 2.13 warns about the older name of this keyword;
        # torch 2.11 does not have the newer one.
        known = inspect.signature(DistributedDataParallel).parameters
        newer, older = "forward_sync_buffers", "broadcast_buffers"
        own = {**settings, newer if newer in known else older: False}
        self._ddp = DistributedDataParallel(module, **own)
        self._is_first_static = bool(settings["static_graph"])
        self._forward = ExitStack()
        parts = list(module.modules())
        if any(hasattr(p, "_orig_mod") or p._compiled_call_impl is not None for p in parts):
            # torch.compile splits its graphs at the buckets of DDP inside of this context.
            inside = self._ddp._inside_ddp_forward
            enter = self._forward.enter_context
            watch_forward(module, lambda: enter(inside()), self._forward.close, always=True)
        # A lambda, because DDP compares annotations, which are strings in this module.
        self._ddp.register_comm_hook(None, lambda _state, bucket: hook(bucket))

    def begin_backward(self) -> None:
        """Prepare DDP's reducer for the next backward pass, whose gradients are to be summed over ranks.

        DDP itself prepares its reducer in each forward pass, even if the output is detached, as a
        generator's output in a GAN is. It would then sum the gradients of a different backward pass.
        """
        self._ddp.reducer.prepare_for_backward([])

    def end_backward(self) -> None:
        """With `static_graph`, call the communication hooks that DDP delays in the first backward pass."""
        if self._is_first_static:
            self._is_first_static = False
            _Callback.run(self._ddp.reducer._delay_all_reduce)  # type: ignore[attr-defined]

    def rebuild_buckets(self) -> None:
        """Rebuild DDP's buckets, after the first backward pass, in the order of its gradients; collective.

        DDP would rebuild them in the next forward pass, where the watchdog would not report a missing rank.
        """
        self._ddp.reducer._rebuild_buckets()


class _Callback(torch.autograd.Function):
    """Autograd function that calls a function at the end of its backward pass.

    DDP's reducer can be called from such callbacks only.
    """

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
        """Run a backward pass of a single number, and call `act` at its end.

        This puts `act` where DDP's reducer accepts calls.
        """
        cls.apply(torch.zeros((), requires_grad=True), act).backward()  # type: ignore[no-untyped-call]
