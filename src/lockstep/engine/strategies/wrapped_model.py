"""`WrappedModel`: base class of models given to `run.model`, with one subclass per strategy (`ddp`, …)."""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lockstep.engine.data.microbatch import Microbatch
from lockstep.engine.strategies import optimizer_state
from lockstep.engine.strategies.buffers import Buffers
from lockstep.engine.strategies.dtensor import bytes_here, part_of
from lockstep.engine.strategies.gradient_accumulation import GradientAccumulation
from lockstep.engine.strategies.gradient_norm import each_norm, total_norm
from lockstep.engine.strategies.model_context import ModelContext
from lockstep.engine.strategies.passes import TrainableParameters, watch_forward
from lockstep.engine.strategies.staleness import Versions
from lockstep.errors import StepError

#: Hint for a script that calls `optimizer.step()` in some microbatches only.
ACCUMULATE = (
    "call optimizer.step() and optimizer.zero_grad() in every iteration: the run accumulates by itself; "
    "for more samples per update raise batch_size, and set replicas above the number of ranks"
)


class WrappedModel(abc.ABC):
    """A model given to `run.model`: checks the script's use of it, and sums its gradients over replicas.

    A replica is one of the data-parallel workers that a run computes, one or several on each rank.
    """

    exactness = "exact"
    #: Whether a rank holds only a part of the model.
    is_split = False
    #: Whether a rank holds a part of every tensor; then it saves its parts without communication.
    is_cut = False
    #: Whether one optimizer, or one gradient norm, may include parameters of several split models.
    mixes = False
    #: Whether each rank trains independently, with one optimizer for this model alone.
    steps_locally = False

    def __init__(
        self, module: nn.Module, context: ModelContext, *, shares_buffers: bool = True
    ) -> None:
        self.module = module
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        self.used = (
            False  # whether a forward pass with gradients has run since the last backward pass
        )
        self.optimized: set[int] = set()  # ids of the parameters that optimizers of the run update
        self.versions: Versions | None = None  # earlier values of the parameters (staleness)
        if context.staleness and self.parameters:
            self.versions = Versions(module, context.staleness)
        self.accumulation = GradientAccumulation(context.block, context.replicas)
        self.several_replicas = context.replicas > 1
        self._block = context.block
        group = context.group if shares_buffers else None
        self.buffers = Buffers(module, context.block, group, waiting=context.sharing)
        self._watched = TrainableParameters(module)
        self._is_summed = self._was_added_to = False
        self._interrupted = self._is_last = self._stepped = False
        self._behind = 0  # number of this rank's replicas after the current microbatch's replica
        self._mixed: set[int] = set()
        self._watching = False
        self.gradient_bytes = 0  # of this rank; 0 before the first step
        if self.several_replicas:
            for first in self.parameters[:1]:  # a hook of each would take longer than a small step
                first.register_post_accumulate_grad_hook(self._after_accumulation)  # type: ignore[no-untyped-call]
            watch_forward(module, self._before_forward, self._after_forward)
        else:
            watch_forward(module, self.before_forward)

    @property
    def leaves(self) -> Sequence[torch.Tensor]:
        """The leaf tensors for which autograd computes gradients."""
        return self.parameters

    @property
    def wrapped(self) -> nn.Module:
        """The module that `run.model` returns: the script's own module, or the strategy's wrapper of it."""
        return self.module

    def _prepare(self, microbatch: Microbatch) -> None:  # noqa: B027
        """Prepare the strategy for a microbatch, before its forward pass; the base class does nothing."""

    @abc.abstractmethod
    def _sum_gradients(self, microbatch: Microbatch) -> None:
        """Add the gradients of a backward pass to this rank's sums over its replicas.

        After the rank's last replica, set the gradients of the parameters to the sums over all ranks.
        """

    def before_forward(self) -> None:
        """Save buffers before a forward pass that may change them.

        With a staleness (gradients computed with older parameters), also set the parameters to the values
        for this forward pass. A `StepError` is raised if an optimizer has updated the model in the same
        microbatch.
        """
        if self.versions is not None:
            if self._watching and torch.is_grad_enabled():
                self.versions.show_oldest()
            elif not self.used:  # else a graph may still need the older version
                self.show_newest()
        if not self._watching:
            return
        self.buffers.before_forward()
        if torch.is_grad_enabled() and self.parameters:
            if self._stepped and self.several_replicas:
                raise StepError(
                    f"{type(self.module).__name__} was used after optimizer.step() within one "
                    "microbatch; with several replicas on a rank the step has not happened yet there, "
                    "so the result would depend on the layout",
                    hint="loop over `for batch in run.batches(loader):` and within it once "
                    "`for … in batch:` per update",
                )
            self.used = True

    def _before_forward(self) -> None:
        self.before_forward()
        # If torch compiles the hooks, tensors have the `_version` of the trace.
        if self._watching and not torch.compiler.is_compiling():
            self.buffers.before_evaluation()

    def _after_forward(self) -> None:
        if self._watching and not torch.compiler.is_compiling():
            self.buffers.after_evaluation()

    def microbatch_begins(self, microbatch: Microbatch) -> None:
        """Prepare gradients, buffers and checks for a microbatch (a replica's share of a batch).

        Called before the loop's body.
        """
        self._watching = True
        self.used = self._is_summed = self._was_added_to = False
        self._is_last = microbatch.last
        self._behind = self._block.stop - 1 - microbatch.replica
        if microbatch.first:
            self.buffers.finish()
            self.accumulation.take()
            if self.several_replicas:
                self._watched.check()
                self._mixed.clear()
                self.buffers.record_shapes()
                self.buffers.restores = microbatch.audit
                if self.buffers.are_trained:
                    self.buffers.batch_begins()
        if self.versions is not None and torch.is_grad_enabled():
            self.versions.show_oldest()
        self._prepare(microbatch)

    def microbatch_ends(self, microbatch: Microbatch, *, left: bool = False) -> None:
        """Reset buffers for the rank's next microbatch, or synchronize them after the last one of a batch.

        `left`: whether `break` or an exception has ended the loop's body. Then buffers are synchronized
        later, since other ranks may not take part in a broadcast now.

        Raises:
            StepError: if some replicas of this rank had a backward pass in the batch, and others had none.
        """
        self._watching = False
        self._stepped = False
        if microbatch.audit:
            self._discard_audit(left=left)
            return
        if self.several_replicas and not left:
            self.accumulation.check(self.module, len(self._block), self._behind)
        if not microbatch.last:
            self.buffers.next_replica()
        elif not left:
            self.buffers.finish()
        if self.several_replicas and (microbatch.last or left):
            self.buffers.end_batch()
        if left:
            self.check_between()

    def check_between(self) -> None:
        """Raise a `StepError` if the current batch has gradients of some of this rank's replicas only.

        Called when a loop is left early, or the run ends.
        """
        if 0 < self.accumulation.missing < len(self._block):
            raise StepError(
                f"a loop was left between the replicas of a batch, with gradients of "
                f"{type(self.module).__name__} for some replicas",
                hint="count steps with run.step, not microbatches; let an exception in a loop end the run",
            )

    def _discard_audit(self, *, left: bool) -> None:
        """Discard gradients and buffers of an audit: a microbatch computed once more, to compare bits.

        `left`: whether `break` or an exception has ended the loop's body. A `StepError` is raised if this
        happened after a forward or backward pass of the model.
        """
        done = "backward" if self._is_summed else "forward" if self.buffers.dirty else ""
        self.buffers.discard()
        self.accumulation.take()
        for parameter in self.parameters:
            parameter.grad = None
        if left and done:
            raise StepError(
                f"a loop was left in an extra pass of the audit, after a {done} pass of "
                f"{type(self.module).__name__}, which is thrown away; expected a loop that is left by "
                "run.step or run.batch_index, or before that pass",
                hint="count with run.step or run.batch_index; --audit off switches the audit off",
            )

    def before_backward(self, microbatch: Microbatch, *, alone: bool = True) -> None:
        """Prepare for a backward pass, and check that gradients will not depend on the number of ranks.

        A failed check raises a `StepError`. `alone`: whether the loss depends on no other model of the run.
        """
        name = type(self.module).__name__
        if self.several_replicas:
            if self._interrupted:
                raise StepError(
                    f"a backward pass of {name} was interrupted by an exception, and others may have "
                    "some of its gradients",
                    hint="let exceptions of run.backward end the run; it resumes from its newest state",
                )
            if self._is_summed:
                raise StepError(
                    f"run.backward was called twice for {name} in one microbatch; expected once, since "
                    "its gradients are summed already",
                    hint="add the losses: run.backward(loss_a + loss_b); wrap forwards that need no "
                    "gradients in torch.no_grad()",
                )
            if microbatch.first:
                self._drop_old_gradients()
            if not microbatch.audit:
                self.accumulation.check(self.module, 1 + self._behind)
        self._before_backward(microbatch, alone=alone)
        self._interrupted = True  # until gradients have been summed

    def _drop_old_gradients(self) -> None:
        """Set gradients that remain from an earlier batch to `None`.

        The parameters of nonzero ones are recorded, for an error in `check_gradients`.
        """
        old = [parameter for parameter in self.parameters if parameter.grad is not None]
        mixed = [p for p in old if id(p) in self.optimized]
        if mixed:  # zero_grad(set_to_none=False) leaves zeros
            found = self._are_nonzero([p.grad for p in mixed if p.grad is not None])
            self._mixed |= {id(p) for p, is_nonzero in zip(mixed, found, strict=True) if is_nonzero}
        for parameter in old:
            parameter.grad = None

    def _are_nonzero(self, gradients: Sequence[torch.Tensor]) -> list[bool]:
        return torch.stack([gradient.count_nonzero() for gradient in gradients]).bool().tolist()

    def _has_gradients(self, among: Collection[int]) -> bool:
        return any(p.grad is not None and id(p) in among for p in self.parameters)

    def _before_backward(self, microbatch: Microbatch, *, alone: bool) -> None:  # noqa: B027
        """Prepare the strategy for a backward pass; the base class does nothing.

        `alone`: whether the loss depends on no other model of the run.
        """

    def after_backward(self, microbatch: Microbatch) -> None:
        """Add the gradients of the backward pass that has just ended to the sum over replicas."""
        self.used = False
        self._is_summed = True
        # The loop's body may read gradients: those of an audit remain until the microbatch ends.
        if not microbatch.audit or self.is_split:
            self._sum_gradients(microbatch)
        self._interrupted = False

    def _after_accumulation(self, _parameter: torch.Tensor) -> None:
        """Record that a gradient was computed after `run.backward` had summed the gradients.

        A call of `loss.backward()` does this, for example. Autograd calls this hook after it has
        accumulated the gradient of the model's first parameter. `check_gradients` later raises an error.
        """
        self._was_added_to |= self._is_summed and not self._interrupted

    def check_gradients(self, among: Collection[int]) -> None:
        """Raise a `StepError` if gradients were not summed over replicas, or come from several batches.

        `among`: ids of the parameters that an optimizer is about to update.
        """
        if not self.several_replicas:
            return
        if self._was_added_to or (not self._is_summed and self._has_gradients(among)):
            raise StepError(
                f"{type(self.module).__name__} has gradients that were not summed with those of the other "
                "replicas",
                hint="call run.backward(loss) in the place of loss.backward(); a tensor of an earlier pass "
                "over the batch must be detached: compute it again where its gradients are needed",
            )
        if self._is_last:
            self.accumulation.check(self.module, len(self._block))
        if self._mixed and not self._mixed.isdisjoint(among):
            raise StepError(
                f"{type(self.module).__name__} had gradients of an earlier batch when its backward "
                "pass began",
                hint=ACCUMULATE,
            )

    def stepped(self, among: Collection[int]) -> None:
        """Check the gradients just before the step of an optimizer, and record the step.

        `among`: ids of the optimizer's parameters. Wrong gradients raise a `StepError`.
        """
        self.check_gradients(among)
        self._stepped = True
        if self._is_last and not self.gradient_bytes:
            self.gradient_bytes = bytes_here(p.grad for p in self.parameters if p.grad is not None)

    def synchronize(self) -> None:  # noqa: B027 - only local SGD has ranks with different parameters
        """Average parameters over ranks, if the strategy trains ranks independently; collective.

        The base class does nothing.
        """

    def show_newest(self) -> None:
        """Set parameters to their newest values, which contain all updates.

        It has an effect only if gradients are computed with older values (staleness).
        """
        if self.versions is not None:
            self.versions.show_newest()

    @property
    def is_synchronized(self) -> bool:
        """Whether ranks that hold the same part of the model now have equal parameters."""
        return True

    def check_gathering(self) -> None:  # noqa: B027 - only FSDP gathers
        """Raise an error unless all ranks are about to gather the tensors of the whole model; collective.

        The base class does nothing, since only the strategy `fsdp` gathers.
        """

    def state(self) -> dict[str, Any]:
        """Return the whole model's `state_dict`; tensors of which each rank holds a part are `DTensor`s."""
        newest = nullcontext() if self.versions is None else self.versions.with_newest()
        with newest:
            state: dict[str, Any] = self.module.state_dict()
        return state

    def load(self, state: Mapping[str, Any]) -> None:
        """Load a `state_dict` of the whole model; a rank that holds a part of the model loads that part."""
        self.module.load_state_dict(state)
        if self.versions is not None:
            self.versions.forget()

    def extras(self) -> dict[str, Any]:
        """Return state of the model that `state_dict`s lack, such as older versions of parameters.

        The result is saved in checkpoints.
        """
        return {} if self.versions is None else {"versions": self.versions.state()}

    def load_extras(self, extras: Mapping[str, Any]) -> None:
        """Restore state from `extras`, a result of `extras()`; called after `load`."""
        if self.versions is not None and "versions" in extras:
            self.versions.load(extras["versions"])

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return the gradients that no optimizer step has used yet, by parameter name, for a checkpoint.

        With several replicas the result is empty: all gradients are used before a checkpoint.
        """
        if self.several_replicas:
            return {}
        named = self.module.named_parameters()
        return {name: value.grad for name, value in named if value.grad is not None}

    def load_gradients(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Load gradients from a checkpoint; a rank that holds a part of the model loads that part.

        `gradients`: gradients of the whole model, by parameter name.
        """
        parameters = dict(self.module.named_parameters())
        for name, value in gradients.items():
            if name in parameters:
                own = parameters[name]
                own.grad = part_of(value, own).to(own.device)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's `state_dict` for the whole model, even if ranks hold parts of it."""
        return optimizer.state_dict()

    def load_optimizer(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Load an optimizer's state for this rank's part of the model.

        `state`: the optimizer's `state_dict` for the whole model.
        """
        optimizer_state.load(optimizer, state)

    def add_optimizer(self, optimizer: Optimizer) -> None:  # noqa: B027 - only some need it
        """Register an optimizer that updates parameters of this model; the base class does nothing."""

    def update(self, act: Callable[[], Any]) -> Any:
        """Call `act`, which steps an optimizer of this model alone, and return the result of `act`."""
        return act()

    def total_norm(self, parameters: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
        """Return the total norm of the gradients of `parameters`, with equal bits on every rank."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        return total_norm(each_norm(gradients, norm_type), norm_type)

    def clip(self, parameters: Sequence[torch.Tensor], max_norm: float, norm: torch.Tensor) -> None:
        """Scale the gradients of `parameters` so that their total norm is at most `max_norm`.

        `norm`: their total norm now.
        """
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)

    def clip_values(self, parameters: Sequence[torch.Tensor], value: float) -> None:
        """Clamp the gradients of `parameters` to the range from `-value` to `value`."""
        if there := [p for p in parameters if p.grad is not None]:  # torch fails for none
            nn.utils.clip_grad_value_(there, value)

    def unsaved_buffers(self) -> dict[str, torch.Tensor]:
        """Return the buffers with `persistent=False`, by name; `state_dict` leaves them out."""
        saved = self.module.state_dict(keep_vars=True)
        return {name: value for name, value in self.module.named_buffers() if name not in saved}

    def ends(self) -> dict[str, int]:
        """Return `{"sent": N, "received": M}`: bytes that this rank exchanged for the model.

        Missing keys are numbers that the strategy does not count.
        """
        return {}

    def close(self) -> None:  # noqa: B027 - only some have an exchange
        """Release memory and connections of the strategy's communication; the base class has none."""
