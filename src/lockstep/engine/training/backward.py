"""`Backward`, behind `run.backward`: the backward pass of one microbatch, with the weight of its loss.

A loss may be a mean over tokens, say, instead of samples. The mean over a global batch is
`sum_r w_r * loss_r / sum_r w_r`, where replica `r` has `w_r` tokens. The sum of the weights is known only
when the last replica has been computed. So gradients of `w_r * loss_r` are summed over replicas first, and
the result is then divided by the sum of the weights.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from lockstep.engine.data.microbatch import Microbatch
from lockstep.engine.layout.classes import updates_in_servers
from lockstep.engine.layout.tree import total
from lockstep.engine.recovery.recomputed import RecomputedLosses
from lockstep.engine.recovery.state import State
from lockstep.engine.strategies.gradient_accumulation import missing_like
from lockstep.engine.strategies.wrapped_model import WrappedModel
from lockstep.engine.training.context import Context
from lockstep.engine.training.faults import Faults
from lockstep.engine.training.loop import Loop
from lockstep.engine.training.loss_scale import gradients_of
from lockstep.errors import (
    LockstepError,
    ModelError,
    NonFiniteLossError,
    RunError,
    StepError,
    UsageError,
)

#: Maximal number of weights that are cached as tensors; without `weight=` a run has a few different ones.
_CACHED = 64


class Backward:
    """Implementation of `run.backward`: runs the backward pass of the loss of one microbatch.

    Attributes:
        passes: number of backward passes so far.
        recomputed: compares losses with those of the same steps before a restart; the session sets it.
    """

    def __init__(self, context: Context, state: State, loop: Loop, faults: Faults | None) -> None:
        self._context, self._state, self._loop, self._faults = context, state, loop, faults
        self._weights: dict[tuple[float, torch.dtype, torch.Size], torch.Tensor] = {}
        self._weighting = Weighting(context)
        self.passes = 0
        self.recomputed: RecomputedLosses | None = None

    def __call__(self, loss: torch.Tensor, weight: torch.Tensor | float | None = None) -> None:
        """Compute the gradients of `loss` and sum them over the global batch; see `Run.backward`."""
        microbatch = self._loop.require_microbatch("run.backward")
        self._loop.first_error.check()
        try:
            self._run(microbatch, loss, weight)
        except LockstepError as error:
            self._loop.first_error.keep(error)
            raise

    def _run(
        self, microbatch: Microbatch, loss: torch.Tensor, weight: torch.Tensor | float | None
    ) -> None:
        loop, scaler = self._loop, self._state.scaler
        _check_loss(loss)
        checks = self._context.settings.stop_on_nan and (weight is None or weight)
        if checks and not (loop.is_replaying or torch.isfinite(loss).item()):
            raise NonFiniteLossError(
                f"the loss is {loss.item()} in epoch {microbatch.epoch}, batch {microbatch.step}, "
                f"replica {microbatch.replica}, step {loop.steps + 1}",
                hint="look at the samples and the learning rate; without --stop-on-nan the run continues",
            )
        models = self._reached(loss)
        part = self._weighting.part(microbatch, models, loss, weight)
        is_left_out = weight is not None and not part and not math.isfinite(loss.item())
        if is_left_out:
            _check_whole(microbatch, models, loss)
        for model in models:
            model.before_backward(microbatch, alone=len(models) == 1)
        self._begin(microbatch, loss, models)
        if scaler is not None:
            scaler.before_backward(models)
            part *= scaler.scale
        factor = None if is_left_out else part
        if (record := loop.record) is None:
            self._compute(loss, factor)
        else:
            with record.backward(loss, models):
                self._compute(loss, factor)
        for model in models:
            model.after_backward(microbatch)
        if weight is not None:
            self._weighting.finish(microbatch, models)
        if scaler is not None and microbatch.last:
            # Ranks with parts of a model all-reduce here, while the watchdog still observes the call.
            scaler.after_backward(models)
        loop.saw_loss(microbatch, loss)
        if self._context.watchdog is not None:
            self._context.watchdog.backward_ends()

    def _compute(self, loss: torch.Tensor, weight: float | None) -> None:
        """Compute the gradients of `weight * loss`; with `None` as weight, gradients of zero.

        `None` marks a microbatch that is left out, whose loss may be NaN.
        """
        if weight is None:  # 0 times NaN would be NaN
            leaves = list(_leaves_behind(loss))
            torch.autograd.backward(leaves, [missing_like(leaf) for leaf in leaves])
        else:
            loss.backward(gradient=self._weight(loss, weight))  # type: ignore[no-untyped-call]

    def _begin(
        self, microbatch: Microbatch, loss: torch.Tensor, models: Sequence[WrappedModel]
    ) -> None:
        """Count a backward pass that begins; report it to the watchdog, and record its `loss`.

        `models`: the models whose parameters the loss depends on. While a resumed run repeats the script,
        and in an audit's extra microbatch, the loss is not recorded.
        """
        if (watchdog := self._context.watchdog) is not None:
            numbers = [self._state.models.index(model) for model in models]
            watchdog.backward_begins(microbatch, numbers)
        self.passes += 1
        if self._loop.progress.is_replaying or microbatch.audit:
            return
        self._context.record.before_backward(microbatch, loss)
        if self.recomputed is not None:
            self.recomputed.saw(loss, self._loop.points, microbatch)
        if self._faults is not None:
            self._faults.before_backward()

    def _reached(self, loss: torch.Tensor) -> list[WrappedModel]:
        """Return the models whose parameters the loss depends on."""
        used = [model for model in self._state.models if model.used]
        if len(used) > 1:
            owners = {id(p): model for model in used for p in model.leaves}
            reached = _owners_behind(loss, owners, len(used))
            used = [model for model in used if id(model) in reached]
        if not used:
            raise self._unreached(loss)
        return used

    def _unreached(self, loss: torch.Tensor) -> RunError:
        """Return the error for a loss that depends on no forward pass in the current microbatch."""
        for model in self._state.models:
            if _owners_behind(loss, {id(p): model for p in model.leaves}, 1):
                return StepError(
                    f"the loss comes from a forward pass of {type(model.module).__name__} that had its "
                    "backward pass, or that came before this microbatch; expected one run.backward for "
                    "each forward pass, in its microbatch",
                    hint="add the losses of a forward pass: run.backward(loss_a + loss_b)",
                )
        return ModelError(
            "the loss comes from no model of the run",
            hint="call what run.model(…) returned, inside the loop over the loader",
        )

    def _weight(self, loss: torch.Tensor, weight: float) -> torch.Tensor:
        """Return a tensor filled with `weight`, with the dtype and shape of `loss`.

        The backward pass takes it as the gradient of the loss.
        """
        key = weight, loss.dtype, loss.shape
        if key not in self._weights:
            if len(self._weights) > _CACHED:  # numbers of tokens differ between batches
                self._weights.clear()
            self._weights[key] = torch.full_like(loss.detach(), weight)
        return self._weights[key]


class Weighting:
    """Computes factors of losses and gradients in a global batch from the `weight=` of `run.backward`."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._weights: dict[tuple[int, ...], dict[int, float]] = {}

    def part(
        self,
        microbatch: Microbatch,
        models: Sequence[WrappedModel],
        loss: torch.Tensor,
        weight: torch.Tensor | float | None,
    ) -> float:
        """Return the factor of a microbatch's gradients in the sum over its global batch.

        `models`: the models whose parameters `loss` depends on. `weight`: argument of `run.backward`.

        Raises:
            StepError: if the weight is invalid, only some microbatches of the batch have a weight,
                or the only replica has weight 0 and a loss that is not finite.
            UsageError: if the strategy updates parameters before all weights are known.
        """
        if weight is None:
            if self._weights:
                self._check_all(microbatch, models, 0)
            return microbatch.weight
        value = self._read(weight)
        if self._context.replicas == 1:
            if not value and not math.isfinite(loss.item()):
                raise _weightless()
            return 1.0
        weights = self._weights.setdefault(_key(models), {})
        if microbatch.first:
            weights.clear()
        weights[microbatch.replica] = value if microbatch.size else 0.0
        if microbatch.last:
            self._check_all(microbatch, models, len(self._context.dims.block))
        return weights[microbatch.replica] / _unit(microbatch)

    def _read(self, weight: torch.Tensor | float) -> float:
        settings = self._context.settings
        by_servers = updates_in_servers(settings.strategy, settings.staleness)
        if by_servers or self._context.strategy.averages:
            raise UsageError(
                f"run.backward(…, weight=…) with strategy={settings.strategy}, staleness="
                f"{settings.staleness}: parameters are updated before all weights are known",
                hint="leave out weight=, or take another strategy",
            )
        value = float(weight)
        if not math.isfinite(value) or value < 0:
            raise StepError(
                f"run.backward was given the weight {value}; expected a number of at least 0, such as the "
                "tokens that the loss is the mean of"
            )
        return value

    def _check_all(
        self, microbatch: Microbatch, models: Sequence[WrappedModel], expected: int
    ) -> None:
        """Raise `StepError` unless `expected` of this rank's microbatches had a `weight=`.

        `expected`: 0, or the number of the rank's microbatches in the global batch. `models`: the models
        whose parameters the losses depend on.
        """
        weights = self._weights.get(_key(models), {})
        if not expected and microbatch.first:
            weights.clear()
        if len(weights) != expected:
            raise StepError(
                f"run.backward was given weight= for {len(weights)} of this rank's microbatches of a "
                "batch; expected it for all microbatches, or for none"
            )

    def finish(self, microbatch: Microbatch, models: Sequence[WrappedModel]) -> None:
        """Divide the gradients of `models`, summed over all replicas, by the sum of the weights.

        It does nothing before this rank's last microbatch of the global batch, or with one replica.

        Raises:
            StepError: if the sum of the weights is zero.
        """
        if not microbatch.last or self._context.replicas == 1:
            return
        weights = torch.zeros(self._context.replicas, dtype=torch.float64)
        for replica, weight in self._weights.pop(_key(models)).items():
            weights[replica] = weight
        if self._context.groups.data is not None:
            # Every element is non-zero on at most one rank, so that the sum is exact.
            dist.all_reduce(weights, group=self._context.groups.data)
        numbers: list[float] = weights.tolist()
        summed = total(numbers, operator.add)
        if not summed:
            raise _weightless()
        for model in models:
            gradients = gradients_of(model)
            if gradients:
                torch._foreach_div_(gradients, summed / _unit(microbatch))


def _check_loss(loss: torch.Tensor) -> None:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        what = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise ModelError(
            f"the loss is {what}; expected a scalar, the mean over the microbatch's samples",
            hint="take .mean() of it",
        )
    if not loss.requires_grad:
        raise ModelError(
            "the loss needs no gradient; expected one that a model computed",
            hint="don't detach it, and don't compute it under torch.no_grad()",
        )


def _check_whole(
    microbatch: Microbatch, models: Sequence[WrappedModel], loss: torch.Tensor
) -> None:
    """Raise `StepError` if one of `models`, from which the loss comes, is split over ranks.

    This is called for a loss of weight 0 that is not finite, whose backward pass is to be left out. That is
    impossible for a split model, since all ranks with parts of it run the backward pass together.
    """
    for model in models:
        if model.is_split:
            raise StepError(
                f"the loss of replica {microbatch.replica} is {loss.item()} with the weight 0, and "
                f"{type(model.module).__name__} is split over ranks, which go through its backward pass "
                "together; expected a finite loss",
                hint="divide a sum by tokens.clamp(min=1); with strategy='ddp' the microbatch is left out",
            )


def _weightless() -> StepError:
    return StepError(
        "the weights of a global batch are all 0; expected one that is not",
        hint="leave such a batch out before it gets to the loader",
    )


def _key(models: Sequence[WrappedModel]) -> tuple[int, ...]:
    return tuple(id(model) for model in models)


def _unit(microbatch: Microbatch) -> float:
    """Return the largest power of two that is at most the number of samples in the global batch.

    Weights are divided by this number, which changes no bits of their mantissas.
    """
    return float(1 << (microbatch.total.bit_length() - 1))


def _owners_behind(loss: torch.Tensor, owners: dict[int, WrappedModel], enough: int) -> set[int]:
    """Return the `id`s of models that `loss` depends on; stop when `enough` models are found.

    `owners`: by the `id` of a parameter, the model that it belongs to.
    """
    found: set[int] = set()
    for leaf in _leaves_behind(loss):
        if (owner := owners.get(id(leaf))) is not None:
            found.add(id(owner))
        if len(found) == enough:
            break
    return found


def _leaves_behind(loss: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the leaf tensors, such as parameters, in the autograd graph of `loss`."""
    seen = set()
    pending: list[Any] = [loss.grad_fn]
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            yield leaf
        pending += [parent for parent, _ in node.next_functions]
