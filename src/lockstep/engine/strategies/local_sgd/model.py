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
from lockstep.engine.strategies.buffers import Buffers, broadcast, broadcast_model
from lockstep.engine.strategies.checks import named_buffers_of_own
from lockstep.engine.strategies.gradient_accumulation import GradientAccumulation, take_gradients
from lockstep.engine.strategies.local_sgd.averaging import (
    Averaging,
    average_state,
    describe_state,
    shares_of,
)
from lockstep.engine.strategies.local_sgd.outer import Mean, Nesterov, Outer
from lockstep.engine.strategies.model_context import ModelContext
from lockstep.engine.strategies.wrapped_model import WrappedModel
from lockstep.errors import MismatchError, ModelError
from lockstep.registry import EXCHANGES


class LocalModel(WrappedModel):
    """A model that each rank trains independently between averages.

    Args:
        every: steps between two averages.
    """

    exactness = "approximate"
    steps_locally = True

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

    # --- local steps -------------------------------------------------------------------------------

    def before_forward(self) -> None:
        """The model is about to be called."""
        super().before_forward()
        self._has_own_buffers |= self._buffers.dirty

    def _prepare(self, microbatch: Microbatch) -> None:
        if microbatch.first:
            self._weight, self._batch = 0.0, 0

    def _sum_gradients(self, microbatch: Microbatch) -> None:
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

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Register the optimizer, whose state is averaged, too.

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
            self.synchronize()
        return result

    # --- averages --------------------------------------------------------------------------------

    @property
    def is_synchronized(self) -> bool:
        """Whether all ranks have the same parameters: just after an average."""
        return not self._steps and not self._has_own_buffers

    def synchronize(self) -> None:
        """Average the models of all ranks, where they have stepped since the last average; collective.

        Raises:
            MismatchError: if they have done different numbers of steps.
            ModelError: if the state of an optimizer has no mean.
        """
        if self.is_synchronized:
            return
        with torch.no_grad(), self._sharing():
            if self._steps:
                self._average()
            buffers = [buffer.detach() for buffer in self.module.buffers()]
            if buffers:
                self._buffers.finish()
                broadcast(buffers, self._group)
        self._steps, self._samples, self._has_own_buffers = 0, 0, False

    def _average(self) -> None:
        optimizer, parameters = self._optimizer, self.parameters
        own = None if optimizer is None else describe_state(optimizer, parameters)
        gathered = self._averaging.gather([self._steps, self._samples], own)
        steps = [theirs for (theirs, _), _ in gathered]
        weights = [samples for (_, samples), _ in gathered]
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
            states = [state for _, state in gathered]
            average_state(optimizer, parameters, states, weights, self._averaging)

    # --- state -----------------------------------------------------------------------------------

    def extras(self) -> dict[str, Any]:
        """Return the state of the outer optimizer.

        Its anchors are not saved: states are taken just after an average, when they are the parameters.
        """
        return {"outer": self._outer.state()}

    def load_extras(self, extras: Mapping[str, Any]) -> None:
        """Load what `extras` returned."""
        # A run may continue with another exchange than it began with.
        if extras.get("outer"):
            self._outer.load(extras["outer"])

    def close(self) -> None:
        """Close the exchange."""
        self._averaging.close()


def wrap_local_sgd(
    module: nn.Module, context: ModelContext, settings: Mapping[str, Any]
) -> LocalModel:
    """Wrap a model for local SGD, which averages parameters.

    The default of 16 steps between averages is the most that Lin et al. use, "Don't Use Large Mini-Batches,
    Use Local SGD" (ICLR 2020, arXiv:1808.07217).

    Raises:
        ModelError: for a keyword that asks for another result.
    """
    return _wrap("local-sgd", module, context, settings, context.sync_every or 16, Mean)


def wrap_diloco(
    module: nn.Module, context: ModelContext, settings: Mapping[str, Any]
) -> LocalModel:
    """Wrap a model for DiLoCo, whose outer optimizer takes the averaged change for a gradient.

    The default is the smallest number of steps that Douillard et al. compare: 50 to 2000, in runs of a
    hundred thousand steps.

    Raises:
        ModelError: for a keyword that asks for another result.
    """
    return _wrap("diloco", module, context, settings, context.sync_every or 50, Nesterov)


def _wrap(
    name: str,
    module: nn.Module,
    context: ModelContext,
    settings: Mapping[str, Any],
    every: int,
    outer: Callable[[list[nn.Parameter]], Outer],
) -> LocalModel:
    assert context.group is not None
    own_buffers = named_buffers_of_own(settings)
    if own_buffers is not None:
        raise ModelError(
            f"{own_buffers}=False with strategy={name}, whose ranks take rank 0's buffers at each average",
            hint=f"leave {own_buffers} out: between two averages each rank has buffers of its own",
        )
    idle = sorted(settings.keys() - EXCHANGES.keywords())
    if idle:
        context.warn(
            f"lockstep: strategy {name}: no effect of {', '.join(idle)}: no gradients are summed"
        )
    broadcast_model(module, context.group)
    context.say(f"lockstep: strategy {name}: parameters are averaged every {every} steps")
    parameters = [p for p in module.parameters() if p.requires_grad]
    return LocalModel(module, context, every, outer(parameters))
