"""`LocalModel`: each rank steps independently; after some steps the ranks average their parameters.

Meant for connections that are too slow to sum gradients in every step. Each rank steps on its own share of
the global batch, so the result depends on the number of ranks. Runs with equally many ranks have equal
bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
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
from lockstep.engine.strategies.local_sgd.outer import OuterOptimizer
from lockstep.engine.strategies.model_context import ModelContext
from lockstep.engine.strategies.wrapped_model import WrappedModel
from lockstep.errors import MismatchError, ModelError
from lockstep.registry import EXCHANGES


class LocalModel(WrappedModel):
    """A model that each rank trains by itself; now and then the ranks average their parameters.

    `every`: number of steps between two averages. `outer`: updates the parameters at an average, from their
    mean change over all ranks.
    """

    exactness = "approximate"
    steps_locally = True

    def __init__(
        self, module: nn.Module, context: ModelContext, every: int, outer: OuterOptimizer
    ) -> None:
        super().__init__(module, context, shares_buffers=False)
        assert context.group is not None
        # Gradients and buffers are synchronized over this rank's replicas only.
        own = range(len(context.block))
        self.accumulation = GradientAccumulation(own, len(own))
        self.buffers = Buffers(module, own, None)
        self._group = context.group
        self._averaging = Averaging(context.group, context.device)
        self._every, self._outer = every, outer
        self._optimizer: Optimizer | None = None
        self._sharing = context.sharing
        self._weight = 0.0
        self._steps = 0
        # Samples of the current batch before its step, and samples of all steps since the last average.
        self._batch = self._samples = 0
        self._has_own_buffers = False

    # --- local steps -------------------------------------------------------------------------------

    def before_forward(self) -> None:
        """Save the buffers before a forward pass that may change them.

        After such a pass, and until the next average, this rank's buffers count as different from other
        ranks'.
        """
        super().before_forward()
        self._has_own_buffers |= self.buffers.dirty

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
        # The mean over this rank's samples; without samples gradients are zeros, and the rank steps, too.
        there = [gradient for gradient in total if gradient is not None]
        if there and self._weight:
            torch._foreach_div_(there, self._weight)

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Register the model's optimizer, to average its state; a second one raises a `ModelError`."""
        if self._optimizer is not None:
            raise ModelError(
                f"{type(self.module).__name__} has two optimizers; expected one, whose steps are counted "
                "until ranks synchronize",
                hint="one optimizer may have several parameter groups",
            )
        self._optimizer = optimizer

    def update(self, act: Callable[[], Any]) -> Any:
        """Call `act`, which steps the optimizer, and return its result.

        After every `sync_every` such calls, average parameters and optimizer state over ranks.
        """
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
        """Whether all ranks have equal parameters and buffers, as just after an average over ranks."""
        return not self._steps and not self._has_own_buffers

    def synchronize(self) -> None:
        """Average changed parameters and optimizer state over ranks, and broadcast buffers; collective.

        Raises:
            MismatchError: if ranks have done different numbers of steps since the last average.
            ModelError: if the optimizer's state has a value without a mean.
        """
        if self.is_synchronized:
            return
        with torch.no_grad(), self._sharing():
            if self._steps:
                self._average()
            buffers = [buffer.detach() for buffer in self.module.buffers()]
            if buffers:
                self.buffers.finish()
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
        """Return `{"outer": …}` with the state of DiLoCo's outer optimizer, for a checkpoint.

        Called just after ranks have averaged parameters.
        """
        return {"outer": self._outer.state()}

    def load_extras(self, extras: Mapping[str, Any]) -> None:
        """Load the state of DiLoCo's outer optimizer from `extras`, a result of `extras()`."""
        # Without it, the run began with another strategy.
        if extras.get("outer"):
            self._outer.load(extras["outer"])


def _wrap(
    module: nn.Module,
    context: ModelContext,
    settings: Mapping[str, Any],
    *,
    name: str,
    every: int,
    lr: float,
    momentum: float,
) -> LocalModel:
    """Return `module` as a `LocalModel` for the strategy `name`.

    `settings`: the keywords given to `run.model`; `broadcast_buffers=False` raises a `ModelError`. `every`:
    default number of steps between averages. `lr`, `momentum`: of the optimizer that updates parameters at
    an average.
    """
    assert context.group is not None
    every = context.sync_every or every
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
    return LocalModel(module, context, every, OuterOptimizer(parameters, lr=lr, momentum=momentum))


#: Local SGD: parameters become their mean over ranks (Stich, ICLR 2019, arXiv:1805.09767). 16 steps are the
#: most that Lin et al. try, "Don't Use Large Mini-Batches, Use Local SGD" (ICLR 2020, arXiv:1808.07217).
wrap_local_sgd = partial(_wrap, name="local-sgd", every=16, lr=1.0, momentum=0.0)
#: DiLoCo: learning rate and momentum are those of Douillard et al. 2023 (arXiv:2311.08105), 50 steps the
#: smallest number that they compare (50 to 2000).
wrap_diloco = partial(_wrap, name="diloco", every=50, lr=0.7, momentum=0.9)
