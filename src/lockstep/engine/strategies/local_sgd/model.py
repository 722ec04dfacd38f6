"""`LocalModel`: independent steps on each rank, then one average of the parameters.

For links so slow that gradients cannot cross them in every step. What a rank does by itself is a step on
its own share of the global batch; the more ranks, the more of them there are: the result depends on the
layout, and no tree helps. It is deterministic still: the same layout gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lockstep.engine.data.microbatch import Microbatch
from lockstep.engine.exchange.choose import POWERSGD_KEYWORDS
from lockstep.engine.strategies.buffers import Buffers, broadcast, start_alike
from lockstep.engine.strategies.checks import shares_buffers
from lockstep.engine.strategies.gradient_accumulation import GradientAccumulation, take_gradients
from lockstep.engine.strategies.local_sgd.averaging import (
    Averaging,
    average_memory,
    describe_memory,
    shares_of,
)
from lockstep.engine.strategies.local_sgd.outer import Mean, Nesterov, Outer
from lockstep.engine.strategies.model_context import ModelContext
from lockstep.engine.strategies.wrapped_model import WrappedModel
from lockstep.errors import MismatchError, ModelError

#: Default steps between two averages. Local SGD: Lin et al., "Don't Use Large
#: Mini-Batches, Use Local SGD" (ICLR 2020, arXiv:1808.07217), use up to 16. DiLoCo: the smallest number
#: of those that Douillard et al. compare (50 to 2000; their runs have a hundred thousand steps).
EVERY = {"local-sgd": 16, "diloco": 50}


class LocalModel(WrappedModel):
    """A model that each rank trains independently between averages.

    Args:
        module: the user's model, already on its device.
        context: where it is to live.
        every: steps between two averages.
        outer: makes one model of several.
    """

    exactness = "approximate"
    acts_alone = True

    def __init__(self, module: nn.Module, context: ModelContext, every: int, outer: Outer) -> None:
        super().__init__(module, context, shares_buffers=False)
        assert context.group is not None
        # The tree, and the buffers, of this rank's replicas alone.
        own = range(len(context.block))
        self.accumulation = GradientAccumulation(own, len(own))
        self._buffers = Buffers(module, own, None)
        self._group = context.group
        self._averaging = Averaging(context.group, context.device)
        self._every, self._outer = every, outer
        self._optimizer: Optimizer | None = None
        self._sharing = context.sharing
        self._weight = 0.0
        self._steps = 0
        # Samples of a batch whose step has not happened yet; and those of the steps since the last average.
        self._batch = self._samples = 0
        self._has_own_buffers = False

    # --- by itself -------------------------------------------------------------------------------

    def before_forward(self) -> None:
        """The model is about to be called."""
        super().before_forward()
        self._has_own_buffers |= self._buffers.dirty

    def _prepare(self, microbatch: Microbatch) -> None:
        if microbatch.first:
            self._weight, self._batch = 0.0, 0

    def _meet(self, microbatch: Microbatch) -> None:
        self._weight += microbatch.weight
        self._batch += microbatch.size
        self.accumulation.push(take_gradients(self.parameters))
        if not microbatch.last:
            return
        (total,) = self.accumulation.take()
        for parameter, gradient in zip(self.parameters, total, strict=True):
            parameter.grad = gradient
        # The mean over this rank's samples; where it has none, zeros, so that all ranks step alike.
        there = [gradient for gradient in total if gradient is not None]
        if there and self._weight:
            torch._foreach_div_(there, self._weight)

    def optimized_by(self, optimizer: Optimizer) -> None:
        """Take note of the optimizer, whose memory is averaged, too.

        Raises:
            ModelError: for a second one: it would step after the average.
        """
        if self._optimizer is not None:
            raise ModelError(
                f"{type(self.module).__name__} has two optimizers; expected one, whose steps are counted "
                "until ranks synchronize",
                hint="one optimizer may have several parameter groups",
            )
        self._optimizer = optimizer

    def update(self, act: Callable[[], Any]) -> Any:
        """Let the optimizer act; every `sync_every` steps, average."""
        if not self._steps:
            self._outer.begin()
        result = act()
        self._steps += 1
        self._samples, self._batch = self._samples + self._batch, 0
        if self._steps == self._every:
            self.come_together()
        return result

    # --- together --------------------------------------------------------------------------------

    @property
    def is_whole(self) -> bool:
        """Whether all ranks have the same parameters: just after an average."""
        return not self._steps and not self._has_own_buffers

    def come_together(self) -> None:
        """Become one model again, where ranks have gone ways of their own; all of them call this.

        Raises:
            MismatchError: if they have not gone as many steps.
            ModelError: if what an optimizer remembers has no mean.
        """
        if self.is_whole:
            return
        with torch.no_grad(), self._sharing():
            if self._steps:
                self._become_one()
            buffers = [buffer.detach() for buffer in self.module.buffers()]
            if buffers:
                self._buffers.finish()
                broadcast(buffers, self._group)
        self._steps, self._samples, self._has_own_buffers = 0, 0, False

    def _become_one(self) -> None:
        optimizer, parameters = self._optimizer, self.parameters
        own = None if optimizer is None else describe_memory(optimizer, parameters)
        told = self._averaging.all_of([self._steps, self._samples], own)
        steps = [theirs for (theirs, _), _ in told]
        weights = [samples for (_, samples), _ in told]
        if len(set(steps)) > 1:
            raise MismatchError(
                f"since the last average, ranks have done {steps} steps of "
                f"{type(self.module).__name__}; expected as many on each",
                hint="a `break` or `continue` must not depend on the rank or on one rank's values; "
                "reduce them first, for instance with run.mean",
            )
        share = shares_of(weights)[self._averaging.rank]
        self._outer.finish(self._averaging.of(self._outer.outgoing(), [share] * len(parameters)))
        if optimizer is not None:
            memories = [memory for _, memory in told]
            average_memory(optimizer, parameters, memories, weights, self._averaging)

    # --- state -----------------------------------------------------------------------------------

    def extras(self) -> dict[str, Any]:
        """Return what the outer optimizer remembers.

        Where the ranks were one the last time needs not be saved: a state is taken only when they are one
        again, and then it is where the parameters are.
        """
        return {"outer": self._outer.state()}

    def load_extras(self, extras: Mapping[str, Any]) -> None:
        """Take what `extras` returned."""
        # A run may continue with another exchange than it began with.
        if extras.get("outer"):
            self._outer.load(extras["outer"])

    def close(self) -> None:
        """Close the exchange."""
        self._averaging.close()


def hold_local(module: nn.Module, context: ModelContext, settings: Mapping[str, Any]) -> LocalModel:
    """Let each rank train `module` by itself for some steps at a time.

    Args:
        module: the user's model, already on its device.
        context: where it is to live.
        settings: keyword arguments for DistributedDataParallel, which nothing here needs.

    Raises:
        ModelError: for one that asks for other results.
    """
    assert context.group is not None
    _check_settings(settings, context)
    parameters = [p for p in module.parameters() if p.requires_grad]
    start_alike(module, context.group)
    outer: Outer = Mean(parameters) if context.exchange == "local-sgd" else Nesterov(parameters)
    return LocalModel(module, context, context.sync_every or EVERY[context.exchange], outer)


def _check_settings(settings: Mapping[str, Any], context: ModelContext) -> None:
    """Refuse what would change the result in DistributedDataParallel; of the rest, say that it is idle."""
    if not shares_buffers(settings):
        name = next(
            name for name in settings if name.endswith("_buffers") and settings[name] is False
        )
        raise ModelError(
            f"{name}=False with exchange={context.exchange}, whose ranks take rank 0's buffers "
            "at each average",
            hint=f"leave {name} out: between two averages each rank has buffers of its own",
        )
    idle = sorted(name for name in settings if name not in POWERSGD_KEYWORDS)
    if idle:
        context.warn(
            f"lockstep: exchange {context.exchange}: no effect of {', '.join(idle)}: "
            "no gradients meet"
        )
