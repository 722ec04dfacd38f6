"""Losses that are means over something else than samples, such as tokens.

The mean over a global batch is `sum_r w_r * loss_r / sum_r w_r`, where replica `r` has `w_r` tokens. What
all of them have is known only when the last replica has been computed. So gradients of `w_r * loss_r` meet,
in tree order as all others, and are divided by the sum of the weights then.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from lockstep.data.microbatch import Microbatch
from lockstep.errors import StepError, UsageError
from lockstep.layout.tree import total
from lockstep.registry import EXCHANGES
from lockstep.strategies.wrapped_model import WrappedModel
from lockstep.training.scaling import gradients_of
from lockstep.training.session import Session


class Weighting:
    """Weights the losses of a run.

    Args:
        session: the run's session.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._weights: dict[tuple[int, ...], dict[int, float]] = {}

    def part(
        self,
        microbatch: Microbatch,
        models: Sequence[WrappedModel],
        loss: torch.Tensor,
        weight: torch.Tensor | float | None,
    ) -> float:
        """Return what the gradients of a microbatch's loss are multiplied with before they meet.

        Raises:
            StepError: for a weight that is none, or for some microbatches of a batch only; for a loss that
                is not finite, with the weight 0.
            UsageError: where ranks update by themselves before all weights are known.
        """
        if weight is None:
            self._check_all(microbatch, models, 0)
            return microbatch.weight
        value = self._read(weight)
        if not value and not math.isfinite(loss.item()):
            raise StepError(
                f"the loss of replica {microbatch.replica} is {loss.item()} with the weight 0: a mean over "
                "nothing; expected a finite one, since 0 times it is no number either",
                hint="divide a sum by tokens.clamp(min=1)",
            )
        if self._session.replicas == 1:
            return 1.0
        weights = self._weights.setdefault(_key(models), {})
        if microbatch.first:
            weights.clear()
        weights[microbatch.replica] = value if microbatch.size else 0.0
        if microbatch.last:
            self._check_all(microbatch, models, len(self._session.formation.block))
        return weights[microbatch.replica] / _unit(microbatch)

    def _read(self, weight: torch.Tensor | float) -> float:
        settings, exchange = self._session.settings, self._session.exchange
        by_itself = exchange != "none" and EXCHANGES.find(exchange).hold
        by_servers = settings.strategy == "ps" and settings.staleness is not None
        if by_servers or by_itself:
            raise UsageError(
                f"run.backward(…, weight=…) with exchange={exchange}, staleness="
                f"{settings.staleness}: parameters are updated before all weights are known",
                hint="leave out weight=, or take another exchange",
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
        """Refuse a batch whose replicas are weighted in two ways."""
        weights = self._weights.get(_key(models), {})
        if not expected and microbatch.first:
            weights.clear()
        if len(weights) != expected:
            raise StepError(
                f"run.backward was given weight= for {len(weights)} of this rank's microbatches of a "
                "batch; expected it for all of them, or for none"
            )

    def finish(self, microbatch: Microbatch, models: Sequence[WrappedModel]) -> None:
        """Divide gradients that have met by the weight of the global batch.

        Raises:
            StepError: if that is zero.
        """
        if not microbatch.last or self._session.replicas == 1:
            return
        everything = self._total(self._weights.pop(_key(models)))
        if not everything:
            raise StepError(
                "the weights of a global batch are all 0; expected one that is not",
                hint="leave such a batch out before it gets to the loader",
            )
        for model in models:
            gradients = gradients_of(model)
            if gradients:
                torch._foreach_div_(gradients, everything / _unit(microbatch))

    def _total(self, weights: dict[int, float]) -> float:
        """Return the sum over all replicas in tree order; all ranks call this together."""
        shared = torch.zeros(self._session.replicas, dtype=torch.float64)
        for replica, weight in weights.items():
            shared[replica] = weight
        if self._session.groups.data is not None:
            # Every element is non-zero on one rank at most, so that this adds nothing but zeros.
            dist.all_reduce(shared, group=self._session.groups.data)
        numbers: list[float] = shared.tolist()
        return total(numbers, lambda a, b: a + b)


def _key(models: Sequence[WrappedModel]) -> tuple[int, ...]:
    return tuple(id(model) for model in models)


def _unit(microbatch: Microbatch) -> float:
    """Return the power of two next to the batch's size: gradients stay as large as those of a mean."""
    return float(1 << (microbatch.total.bit_length() - 1))
