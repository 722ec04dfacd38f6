"""`WrappedModel`: the base class of models under every strategy."""

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
from lockstep.engine.strategies.dtensor import bytes_here
from lockstep.engine.strategies.gradient_accumulation import GradientAccumulation
from lockstep.engine.strategies.gradient_norm import each_norm, total_norm
from lockstep.engine.strategies.model_context import ModelContext
from lockstep.engine.strategies.passes import TrainableParameters, watch_forward
from lockstep.engine.strategies.staleness import Versions
from lockstep.errors import StepError

#: What to do in the place of stepping in some microbatches only.
ACCUMULATE = (
    "call optimizer.step() and optimizer.zero_grad() in every iteration: the run accumulates by itself; "
    "for more samples per update raise batch_size, and set replicas above the number of ranks"
)


class WrappedModel(abc.ABC):
    """A model over the replicas of a rank.

    Args:
        shares_buffers: whether all ranks that hold the same part of it take replica 0's buffers.

    Attributes:
        parameters: those that take part in training.
        used: whether a forward pass with gradients has run since the last backward pass.
        optimized: the ids of parameters that optimizers of the run have.
        gradient_bytes: bytes of this rank's gradients; 0 before the first step.
        is_split: whether this rank holds a part of it only.
        is_cut: whether that is a part of every tensor, so that its state is captured by each rank alone;
            otherwise all ranks capture the state of a split model together.
        mixes: whether an optimizer, or a norm, may include other such models, though it is split.
        steps_locally: whether each rank updates its own parameters: its optimizer has no other model's.
        versions: of its parameters, where gradients are late; `None` where passes see all updates.
    """

    exactness = "exact"
    is_split = False
    is_cut = False
    mixes = False
    steps_locally = False

    def __init__(
        self, module: nn.Module, context: ModelContext, *, shares_buffers: bool = True
    ) -> None:
        self.module = module
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        self.used = False
        self.optimized: set[int] = set()
        self.versions: Versions | None = None
        if context.staleness and self.parameters:
            self.versions = Versions(module, context.staleness)
        self.accumulation = GradientAccumulation(context.block, context.replicas)
        self.several_replicas = context.replicas > 1
        self._block = context.block
        group = context.group if shares_buffers else None
        self._buffers = Buffers(module, context.block, group, waiting=context.sharing)
        self._watched = TrainableParameters(module)
        self._is_summed = self._was_added_to = False
        self._interrupted = self._is_last = self._stepped = False
        self._behind = 0  # replicas of this rank that come after that of the microbatch
        self._mixed: set[int] = set()
        self._watching = False
        self.gradient_bytes = 0
        if self.several_replicas:
            for first in self.parameters[:1]:  # a hook of each would take longer than a small step
                first.register_post_accumulate_grad_hook(self._after_accumulation)  # type: ignore[no-untyped-call]
            watch_forward(module, self._before_forward, self._after_forward)
        else:
            watch_forward(module, self.before_forward)

    @property
    def leaves(self) -> Sequence[torch.Tensor]:
        """The tensors that autograd computes gradients of."""
        return self.parameters

    @property
    def trains_buffers(self) -> bool:
        """Whether forward passes may change buffers, or need all ranks: such a part is in training mode."""
        return self._buffers.are_trained

    @property
    def wrapped(self) -> nn.Module:
        """The module that the script calls: its own, unless a strategy needs another."""
        return self.module

    def _prepare(self, microbatch: Microbatch) -> None:  # noqa: B027
        """Prepare for the forward and backward pass of a microbatch."""

    @abc.abstractmethod
    def _sum_gradients(self, microbatch: Microbatch) -> None:
        """Accumulate the gradients of a backward pass; after the last replica's, complete the sum."""

    def before_forward(self) -> None:
        """Prepare buffers and versions of parameters for a forward pass."""
        if self.versions is not None:
            if self._watching and torch.is_grad_enabled():
                self.show_oldest()
            elif not self.used:  # no graph needs the older ones
                self.show_newest()
        if not self._watching:
            return
        self._buffers.before_forward()
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
        if self._checks_passes:
            self._buffers.before_evaluation()

    @property
    def _checks_passes(self) -> bool:
        # Where torch compiles the hooks, too, versions of tensors are those of the trace.
        return self._watching and not torch.compiler.is_compiling()

    def _after_forward(self) -> None:
        if self._checks_passes:
            self._buffers.after_evaluation()

    def microbatch_begins(self, microbatch: Microbatch) -> None:
        """Begin a microbatch, before the loop's body."""
        self._watching = True
        self.used = self._is_summed = self._was_added_to = False
        self._is_last = microbatch.last
        self._behind = self._block.stop - 1 - microbatch.replica
        if microbatch.first:
            self._buffers.finish()
            self.accumulation.take()
            if self.several_replicas:
                self._watched.check()
                self._mixed.clear()
                self._buffers.record_shapes()
                self._buffers.restores = microbatch.audit
                if self.trains_buffers:
                    self._buffers.batch_begins()
        if self.versions is not None and torch.is_grad_enabled():
            self.versions.show_oldest()
        self._prepare(microbatch)

    def microbatch_ends(self, microbatch: Microbatch, *, left: bool = False) -> None:
        """End a microbatch, after the loop's body.

        Where the body was left by `break` or by an exception (which cannot be told apart here), buffers
        wait for the next call that needs them: after an exception the other ranks would not answer.

        Raises:
            StepError: if replicas of this rank before had a backward pass, and this one had none; if a loop
                was left between them, where a rank that hosts a single replica would have finished.
        """
        self._watching = False
        self._stepped = False
        if microbatch.audit:
            self._discard_audit(left=left)
            return
        if self.several_replicas and not left:
            self._check_complete(len(self._block), self._behind)
        if not microbatch.last:
            self._buffers.next_replica()
        elif not left:
            self._buffers.finish()
        if self.several_replicas and (microbatch.last or left):
            self._buffers.end_batch()
        if left:
            self.check_between()

    def check_between(self) -> None:
        """Refuse that a loop, or the run, is left between the replicas of a batch."""
        if 0 < self.accumulation.missing < len(self._block):
            raise StepError(
                f"a loop was left between the replicas of a batch, with gradients of "
                f"{type(self.module).__name__} for some replicas",
                hint="count steps with run.step, not microbatches; let an exception in a loop end the run",
            )

    def _discard_audit(self, *, left: bool) -> None:
        """End an extra pass of the audit: buffers and gradients are as they were before."""
        done = "backward" if self._is_summed else "forward" if self._buffers.dirty else ""
        self._buffers.discard()
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

    def _check_complete(self, *expected: int) -> None:
        """Refuse a batch of which some replicas had a backward pass and others had not.

        On as many ranks as replicas the others would wait for the missing one for ever.

        Args:
            expected: how many replicas of this rank may be missing now.
        """
        if self.accumulation.missing not in expected:
            raise StepError(
                f"{type(self.module).__name__} had no backward pass for a replica of this batch, "
                "but had one for others",
                hint="call run.backward for every microbatch; in place of `continue`, or of catching an "
                "exception, to leave out a bad one: "
                "run.backward(loss, weight=len(x) if torch.isfinite(loss) else 0)",
            )

    def before_backward(self, microbatch: Microbatch, *, alone: bool = True) -> None:
        """Check that a backward pass would mean the same on every layout.

        `alone`: whether the loss depends on no other model of the run.

        Raises:
            StepError: if the model's gradients were summed already in this pass, or an earlier backward
                pass was interrupted by an exception.
        """
        if self.several_replicas:
            self._check_replica(microbatch)
        self._before_backward(microbatch, alone=alone)
        self._interrupted = True  # until gradients have been summed

    def _check_replica(self, microbatch: Microbatch) -> None:
        """Check that no gradients are there that another replica would not have, or has had already."""
        if self._interrupted:
            raise StepError(
                f"a backward pass of {type(self.module).__name__} was interrupted by an exception, and "
                "others may have some of its gradients",
                hint="let exceptions of run.backward end the run; it resumes from its newest state",
            )
        if self._is_summed:
            raise StepError(
                f"run.backward was called twice for {type(self.module).__name__} in one "
                "microbatch; expected once, since its gradients are summed already",
                hint="add the losses: run.backward(loss_a + loss_b); wrap forwards that need no "
                "gradients in torch.no_grad()",
            )
        if microbatch.first:
            self._drop_old_gradients()
        if not microbatch.audit:
            self._check_complete(1 + self._behind)

    def _drop_old_gradients(self) -> None:
        """Drop gradients from before this pass, which belong to no replica.

        Nonzero gradients of parameters that an optimizer has are refused at its step.
        """
        old = [parameter for parameter in self.parameters if parameter.grad is not None]
        mixed = [p for p in old if id(p) in self.optimized]
        if mixed:  # zeros were cleared in place
            found = self._are_nonzero([p.grad for p in mixed if p.grad is not None])
            self._mixed |= {id(p) for p, is_nonzero in zip(mixed, found, strict=True) if is_nonzero}
        for parameter in old:
            parameter.grad = None

    def _are_nonzero(self, gradients: Sequence[torch.Tensor]) -> list[bool]:
        return torch.stack([gradient.count_nonzero() for gradient in gradients]).bool().tolist()

    def _has_gradients(self, among: Collection[int]) -> bool:
        return any(p.grad is not None and id(p) in among for p in self.parameters)

    def _before_backward(self, microbatch: Microbatch, *, alone: bool) -> None:  # noqa: B027
        """Prepare for the backward pass of a microbatch."""

    def after_backward(self, microbatch: Microbatch) -> None:
        """Sum the gradients of a backward pass over the replicas."""
        self.used = False
        self._is_summed = True
        # A body may read gradients: an audit's stay where they are until its pass is over.
        if not microbatch.audit or self.is_split:
            self._sum_gradients(microbatch)
        self._interrupted = False

    def _after_accumulation(self, _parameter: torch.Tensor) -> None:
        """Detect a plain backward pass after run.backward, by the first parameter's gradient."""
        self._was_added_to |= self._is_summed and not self._interrupted

    def check_gradients(self, among: Collection[int]) -> None:
        """Check the gradients that an optimizer is about to use.

        Args:
            among: the ids of its parameters.

        Raises:
            StepError: if plain PyTorch would have added gradients of an earlier batch, or if there
                are gradients that have not been summed over the replicas.
        """
        if not self.several_replicas:
            return
        if self._was_added_to or (not self._is_summed and self._has_gradients(among)):
            raise StepError(
                f"{type(self.module).__name__} has gradients that were not summed with those of the other "
                "replicas",
                hint="call run.backward(loss) in the place of loss.backward()",
            )
        if self._is_last:
            self._check_complete(len(self._block))
        if self._mixed and not self._mixed.isdisjoint(among):
            raise StepError(
                f"{type(self.module).__name__} had gradients of an earlier batch when its backward "
                "pass began",
                hint=ACCUMULATE,
            )

    def stepped(self, among: Collection[int]) -> None:
        """Check gradients for a step of an optimizer with parameters `among`, inside a microbatch."""
        self.check_gradients(among)
        self._stepped = True
        if self._is_last and not self.gradient_bytes:
            self.gradient_bytes = bytes_here(p.grad for p in self.parameters if p.grad is not None)

    def finish_buffers(self) -> None:
        """Let all ranks take replica 0's buffers now."""
        self._buffers.finish()

    def synchronize(self) -> None:  # noqa: B027 - most are one model all the time
        """Average models that ranks have trained independently; collective."""

    def show_oldest(self) -> None:
        """Set parameters to the version for passes with gradients."""
        if self.versions is not None:
            self.versions.show_oldest()

    def show_newest(self) -> None:
        """Set parameters to the version with all updates."""
        if self.versions is not None:
            self.versions.show_newest()

    @property
    def is_synchronized(self) -> bool:
        """Whether all ranks that hold the same part of the model hold the same bits now."""
        return True

    def check_gathering(self) -> None:  # noqa: B027 - most have nothing to gather
        """Check that all ranks are about to gather the tensors of `state` that are cut over them."""

    def state(self) -> dict[str, Any]:
        """Return the whole model's `state_dict`; where it is cut its tensors are `DTensor`s."""
        newest = nullcontext() if self.versions is None else self.versions.with_newest()
        with newest:
            state: dict[str, Any] = self.module.state_dict()
        return state

    def load(self, state: Mapping[str, Any]) -> None:
        """Load a whole model's `state_dict`, or this rank's part of it; where it is cut, of `Stored`s."""
        self.module.load_state_dict(state)
        if self.versions is not None:
            self.versions.forget()

    def extras(self) -> dict[str, Any]:
        """Return the state of the strategy besides model and optimizer."""
        return {} if self.versions is None else {"versions": self.versions.state()}

    def load_extras(self, extras: Mapping[str, Any]) -> None:
        """Load what `extras` returned, after `load`."""
        if self.versions is not None and "versions" in extras:
            self.versions.load(extras["versions"])

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return gradients that wait for a step, as they may where there is one replica."""
        if self.several_replicas:
            return {}  # others refuse them
        named = self.module.named_parameters()
        return {name: value.grad for name, value in named if value.grad is not None}

    def load_gradients(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Load what `gradients` returned."""
        parameters = dict(self.module.named_parameters())
        for name, value in gradients.items():
            if name in parameters:
                parameters[name].grad = value.to(parameters[name].device)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the `state_dict` that an optimizer of the whole model would have, on every rank."""
        return optimizer.state_dict()

    def load_optimizer(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Give an optimizer its part of what `optimizer_state` returned."""
        optimizer_state.load(optimizer, state)

    def add_optimizer(self, optimizer: Optimizer) -> None:  # noqa: B027 - most do nothing
        """Register an optimizer of the run that has parameters of this model."""

    def update(self, act: Callable[[], Any]) -> Any:
        """Run the step `act` of an optimizer that has this model's parameters alone."""
        return act()

    def total_norm(self, parameters: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
        """Return the norm of all gradients of `parameters`, the same on every rank."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        return total_norm(each_norm(gradients, norm_type), norm_type)

    def clip(self, parameters: Sequence[torch.Tensor], max_norm: float, norm: torch.Tensor) -> None:
        """Scale gradients of `parameters`, whose norm is `norm`, to at most `max_norm`."""
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)

    def clip_values(self, parameters: Sequence[torch.Tensor], value: float) -> None:
        """Clamp gradients of `parameters` to `-value` to `value`."""
        if there := [p for p in parameters if p.grad is not None]:  # torch fails for none
            nn.utils.clip_grad_value_(there, value)

    def unsaved_buffers(self) -> dict[str, torch.Tensor]:
        """Return the buffers that `state_dict` leaves out, which the run saves, too."""
        saved = self.module.state_dict(keep_vars=True)
        return {name: value for name, value in self.module.named_buffers() if name not in saved}

    def ends(self) -> dict[str, int]:
        """Return bytes that this rank has sent and received, at the end of the script."""
        return {}

    def close(self) -> None:  # noqa: B027 - most have nothing to close
        """Close what the strategy has opened."""
