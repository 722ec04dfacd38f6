"""The backward pass of one microbatch: its loss, weighted, through the models of the run."""

from __future__ import annotations

from typing import Any

import torch

from lockstep.data.microbatch import Microbatch
from lockstep.errors import ModelError, NonFiniteLossError
from lockstep.strategies.wrapped_model import WrappedModel
from lockstep.training.session import Session
from lockstep.training.weighting import Weighting

#: Weights that are kept as tensors: a run without weights of its own has a few.
_KEPT = 64


class Backward:
    """Runs backward passes.

    Args:
        session: the run's session.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._weights: dict[tuple[float, torch.dtype], torch.Tensor] = {}
        self._weighting = Weighting(session)

    def __call__(self, loss: torch.Tensor, weight: torch.Tensor | float | None = None) -> None:
        """Compute the gradients of `loss` and let them meet; see `Run.backward`."""
        session = self._session
        microbatch = session.loop.require_microbatch("run.backward")
        self._check(loss)
        if session.settings.stop_on_nan and not session.loop.is_on_the_way:
            self._check_finite(loss, microbatch)
        models = self._reached(loss)
        part = self._weighting.part(microbatch, models, loss, weight)
        for model in models:
            model.before_backward(microbatch, alone=len(models) == 1)
        session.before_backward(microbatch, loss, models)
        scaler = session.state.scaler
        if scaler is not None:
            scaler.before_backward(models)
            part *= scaler.scale
        loss.backward(gradient=self._weight(loss, part))  # type: ignore[no-untyped-call]
        for model in models:
            model.after_backward(microbatch)
        if weight is not None:
            self._weighting.finish(microbatch, models)
        if scaler is not None and microbatch.last:
            # Ranks that hold parts agree here, while they are still seen to wait.
            scaler.after_backward(models)
        session.loop.saw_loss(loss)
        session.after_backward()

    def _reached(self, loss: torch.Tensor) -> list[WrappedModel]:
        """Return the models that the loss depends on."""
        used = [model for model in self._session.models if model.used]
        if len(used) > 1:
            owners = {id(p): model for model in used for p in model.leaves}
            reached = _owners_behind(loss, owners, len(used))
            used = [model for model in used if id(model) in reached]
        if not used:
            raise ModelError(
                "the loss comes from no model of the run",
                hint="call what run.model(…) returned, inside the loop over the loader",
            )
        return used

    def _check(self, loss: torch.Tensor) -> None:
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

    def _check_finite(self, loss: torch.Tensor, microbatch: Microbatch) -> None:
        if torch.isfinite(loss).item():
            return
        raise NonFiniteLossError(
            f"the loss is {loss.item()} in epoch {microbatch.epoch}, batch {microbatch.step}, "
            f"replica {microbatch.replica}, step {self._session.loop.steps + 1}",
            hint="look at the samples and the learning rate; without --stop-on-nan the run goes on",
        )

    def _weight(self, loss: torch.Tensor, weight: float) -> torch.Tensor:
        """Return the weight as a tensor like `loss`: the gradient that backward starts from."""
        key = weight, loss.dtype
        if key not in self._weights:
            if len(self._weights) > _KEPT:  # weights of tokens are always others
                self._weights.clear()
            self._weights[key] = torch.full_like(loss.detach(), weight)
        return self._weights[key].reshape(loss.shape)


def _owners_behind(loss: torch.Tensor, owners: dict[int, WrappedModel], enough: int) -> set[int]:
    """Return the ids of the models whose parameters the graph of `loss` reaches."""
    found: set[int] = set()
    seen = set()
    pending: list[Any] = [loss.grad_fn]
    while pending and len(found) < enough:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        owner = owners.get(id(getattr(node, "variable", None)))
        if owner is not None:
            found.add(id(owner))
        pending += [parent for parent, _ in node.next_functions]
    return found
