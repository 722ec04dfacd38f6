"""Optimizers and schedulers that act once per global batch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer

from lockstep.errors import ModelError, StepError
from lockstep.strategies.held import HeldModel
from lockstep.strategies.norms import each_norm, total_norm
from lockstep.training.loop import Loop
from lockstep.training.scaling import Scaler

OptimizerT = TypeVar("OptimizerT", bound=Optimizer)
Scheduler = TypeVar("Scheduler")


def gate_optimizer(
    optimizer: OptimizerT,
    loop: Loop,
    models: Sequence[HeldModel],
    index: int,
    scaler: Scaler | None = None,
) -> OptimizerT:
    """Let `optimizer.step()` act once per global batch: on its last microbatch.

    With a scaler, a step whose gradients are not finite counts as one, and changes nothing.

    The optimizer stays the object it is, so that schedulers and scripts find what they expect.

    Raises:
        ModelError: if it holds a parameter of no model that the run holds.
    """
    own = _models_of(optimizer, models, index)
    mixed = all(model.mixes for model in own)
    alone = [model for model in own if (model.is_split and not mixed) or model.acts_alone]
    if alone and len(own) > 1:
        what = "is split over ranks" if alone[0].is_split else "is trained by each rank by itself"
        raise ModelError(
            f"optimizer {index} ({type(optimizer).__name__}) holds parameters of {len(own)} models, and "
            f"{type(alone[0].module).__name__} {what}; expected an optimizer for each model",
        )
    for model in own:
        model.optimized_by(optimizer)
    rates: list[Any] = []

    def step(self: Optimizer, closure: Callable[[], float] | None = None) -> Any:
        if closure is not None:
            raise StepError(
                f"{type(self).__name__}.step was given a closure; expected none: it would compute "
                "gradients that no other replica takes part in",
                hint="use an optimizer that needs no closure",
            )
        for model in own:
            if loop.microbatch is not None:
                model.stepped()
            else:
                model.check_gradients()
        _check_rates(self, loop, rates)
        if not loop.acts_now():
            return None
        for model in models:
            model.finish_buffers()
        loop.updated()
        if loop.is_on_the_way or (scaler is not None and scaler.skips(own)):
            # torch's schedulers warn where they find that no step came before theirs.
            self._opt_called = True  # type: ignore[attr-defined]
            return None
        result = own[0].update(act) if len(own) == 1 else act()
        loop.stepped(own)
        return result

    act = optimizer.step
    optimizer.step = MethodType(functools.wraps(act)(step), optimizer)  # type: ignore[method-assign]
    return optimizer


def _check_rates(optimizer: Optimizer, loop: Loop, rates: list[Any]) -> None:
    """Refuse learning rates that change between the replicas of one batch.

    Args:
        optimizer: what is asked to step.
        loop: where the run stands.
        rates: those of the batch's first replica; kept here from call to call.
    """
    microbatch = loop.microbatch
    now = [group.get("lr") for group in optimizer.param_groups]
    if microbatch is None or microbatch.first:
        rates[:] = now
    elif now != rates:
        raise StepError(
            f"the learning rates of {type(optimizer).__name__} changed within one global batch",
            hint="pass the scheduler through run.scheduler(…), so that it acts once per batch",
        )


def _models_of(optimizer: Optimizer, models: Sequence[HeldModel], index: int) -> list[HeldModel]:
    owner = {id(p): model for model in models for p in model.module.parameters()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    strangers = sum(id(p) not in owner for p in parameters)
    if strangers:
        raise ModelError(
            f"optimizer {index} ({type(optimizer).__name__}) holds {strangers} of {len(parameters)} "
            "parameters that belong to no model of the run",
            hint="pass the model through run.model(…) first, and its parameters() to the optimizer",
        )
    return list({id(owner[id(p)]): owner[id(p)] for p in parameters}.values())


def gate_scheduler(scheduler: Scheduler, loop: Loop) -> Scheduler:
    """Let `scheduler.step()` act once per global batch inside a loop, and always outside.

    The object gets a class of its own, below the one it had: an attribute would be part of what its
    `state_dict()` returns.

    Raises:
        StepError: if it has no `step`, or cannot save and load its state.
    """
    own = type(scheduler)
    for method in ("step", "state_dict", "load_state_dict"):
        if not callable(getattr(own, method, None)):
            raise StepError(f"{own.__name__} has no {method}(); expected a scheduler")
    act = own.step  # type: ignore[attr-defined]

    @functools.wraps(act)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        # On the way back it has been done: what it led to is loaded.
        acts = loop.acts_now() and not loop.is_on_the_way
        return act(self, *args, **kwargs) if acts else None

    named = {"step": step, "__module__": own.__module__, "__qualname__": own.__qualname__}
    named["__slots__"] = ()  # as large as its class, or Python would not let it change
    scheduler.__class__ = type(own.__name__, (own,), named)
    return scheduler


def clip(
    parameters: torch.Tensor | Sequence[torch.Tensor],
    max_norm: float,
    norm_type: float,
    models: Sequence[HeldModel],
) -> torch.Tensor:
    """Scale gradients so that their total norm is at most `max_norm`, and return the norm before.

    Raises:
        ModelError: if they belong to several models of which one is split over ranks.
    """
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    if not any(model.is_split for model in models):
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = total_norm(each_norm(gradients, norm_type), norm_type)
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return norm
    own = {id(p) for p in parameters}
    owners = [model for model in models if own & {id(p) for p in model.parameters}]
    if not owners or (len(owners) > 1 and not all(model.mixes for model in owners)):
        raise ModelError(
            f"run.clip was given parameters of {len(owners)} models; expected those of one, since a "
            "model is split over ranks"
        )
    norm = owners[0].total_norm(parameters, norm_type)
    owners[0].clip(parameters, max_norm, norm)
    return norm
