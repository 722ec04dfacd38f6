"""Optimizers and schedulers whose `step()` acts once per global batch, and clipping of gradients."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer, lr_scheduler
from torch.optim import optimizer as torch_optimizer

from lockstep.engine.data.microbatch import Microbatch
from lockstep.engine.data.randomness import set_key, undisturbed
from lockstep.engine.layout import keys
from lockstep.engine.recovery.state import check_savable
from lockstep.engine.strategies.gradient_norm import each_norm, total_norm
from lockstep.engine.strategies.wrapped_model import ACCUMULATE, WrappedModel
from lockstep.engine.training import parameter_groups
from lockstep.engine.training.loop import Loop
from lockstep.engine.training.loss_scale import Scaler
from lockstep.errors import LockstepError, ModelError, StepError

OptimizerT = TypeVar("OptimizerT", bound=Optimizer)
Scheduler = TypeVar("Scheduler")


class _StepRandomness:
    """Sets random generators equally on all ranks during `step()` of an optimizer or scheduler.

    Afterwards the generators are set back, so that the step does not change the random numbers that the
    code around it draws.
    """

    def __init__(self, loop: Loop, purpose: str, index: int) -> None:
        self._loop, self._purpose, self._index = loop, purpose, index
        self._step, self._calls = -1, 0

    def during(self, act: Callable[[], Any]) -> Any:
        """Return `act()`, called with random generators that are seeded equally on all ranks."""
        step = self._loop.updates
        self._calls = self._calls + 1 if self._step == step else 0
        self._step = step
        with undisturbed():
            key = self._loop.generators.derive(self._purpose, step, self._index, self._calls)
            set_key(key)
            return act()


class _Gate:
    """Replaces an optimizer's `step()`: checks each call, and updates parameters once per global batch.

    Attributes:
        own: the models that the optimizer's parameters belong to.
        ids: ids of the optimizer's parameters.
    """

    def __init__(
        self, optimizer: Optimizer, loop: Loop, models: Sequence[WrappedModel], index: int
    ) -> None:
        self._optimizer, self._loop, self._models, self._index = optimizer, loop, models, index
        self.own: list[WrappedModel] = []
        self.ids: frozenset[int] = frozenset()
        self._groups: list[dict[str, Any]] = []
        self._asked: Microbatch | None = None
        self._settings: list[Any] = []
        self._randomness = _StepRandomness(loop, keys.OPTIMIZER, index)
        # Whether the script has replaced the optimizer's `step`; torch's schedulers wrap it, too.
        own = "step" in vars(optimizer) and not hasattr(optimizer.step, "_wrapped_by_lr_sched")
        self._is_torchs = _is_torchs(optimizer) and not own
        self.update_groups()

    def update_groups(self) -> None:
        """Read the optimizer's parameter groups again if the script has added or removed groups."""
        groups = self._optimizer.param_groups
        if len(groups) == len(self._groups) and all(map(operator.is_, groups, self._groups)):
            return
        _check_removed(self._optimizer, self._index)
        own = _models_of(self._optimizer, self._models, self._index)
        _check_alone(self._optimizer, own, self._index)
        for model in own:
            if all(model is not known for known in self.own):
                model.add_optimizer(self._optimizer)
        self.own, self._groups = own, list(groups)
        self.ids = frozenset(id(p) for group in groups for p in group["params"])
        for model in own:
            model.optimized |= self.ids

    def check(self) -> None:
        """Raise `StepError` if the effect of this call of `step()` would depend on the number of ranks."""
        microbatch, asked = self._loop.microbatch, self._asked
        if (record := self._loop.record) is not None:
            record.step(self._index, self._optimizer.param_groups)
        if microbatch is not None and microbatch.audit:
            for model in self.own:
                model.stepped(self.ids)
            return
        self._asked = microbatch
        if microbatch is None:
            for model in self.own:
                model.check_gradients(self.ids)
            return
        has_others = not (microbatch.first and microbatch.last)  # several microbatches on this rank
        if has_others:
            self._check_every_microbatch(microbatch, asked)
        for model in self.own:
            model.stepped(self.ids)
        if has_others:
            self._check_settings(microbatch)

    def update(self, act: Callable[[], Any]) -> Any:
        """Update the parameters by calling `act`, the optimizer's original `step`."""
        if not self._is_torchs or _has_hooks(self._optimizer):
            act = functools.partial(self._randomness.during, act)
        update = functools.partial(self.own[0].update, act) if len(self.own) == 1 else act
        for model in self.own:
            if model.versions is not None:
                name = type(self._optimizer).__name__
                update = model.versions.updating(self.ids, name)(update)
        result = update()
        for model in self.own:
            if model.steps_locally:
                self._loop.stepped(model)
        return result

    def _check_every_microbatch(self, microbatch: Microbatch, asked: Microbatch | None) -> None:
        """Raise `StepError` if the script calls `step()` in only some microbatches of a batch.

        `microbatch`: microbatch of this call. `asked`: microbatch of the previous call.
        """
        if microbatch.first:
            is_missed, replica = asked is not None and not asked.last, -1
        else:
            replica = microbatch.replica - 1
            is_missed = asked is None or asked.place != microbatch.place or asked.replica < replica
        if is_missed:
            where = (
                f"replica {replica} of" if replica >= 0 else "the last replica of the batch before"
            )
            where += f" batch {microbatch.step}"
            raise StepError(
                f"{type(self._optimizer).__name__}.step was called in some microbatches only, and not in "
                f"that of {where}; expected a call in each",
                hint=ACCUMULATE,
            )

    def _check_settings(self, microbatch: Microbatch) -> None:
        """Raise an error if settings in parameter groups change between microbatches of a global batch."""
        groups = self._optimizer.param_groups
        if microbatch.first:
            self._settings = parameter_groups.settings_of(groups)
        elif changed := parameter_groups.changed(self._settings, groups):
            raise StepError(
                f"{changed[0]} of {type(self._optimizer).__name__} changed within one global batch, from "
                f"{changed[1]} to {changed[2]}; expected one value for all replicas",
                hint="pass the scheduler through run.scheduler(…), so that it acts once per batch; compute "
                "values from run.batch_index or run.step, which are the same for all replicas",
            )


def _is_torchs(value: object) -> bool:
    """Whether an optimizer or scheduler is of a class of torch, whose `step()` draws no random numbers."""
    return type(value).__module__.startswith("torch.optim.")


def _has_hooks(optimizer: Optimizer) -> bool:
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or torch_optimizer._global_optimizer_pre_hooks
        or torch_optimizer._global_optimizer_post_hooks
    )


class _NoScaler:
    """Attribute of an optimizer that raises an error if `torch.amp.GradScaler` reads it."""

    def __bool__(self) -> bool:
        raise StepError(
            "torch.amp.GradScaler.step was called; expected optimizer.step(): the scale of a script would "
            "be applied to gradients of some replicas, and chosen by each rank for itself",
            hint='lockstep.Run(…, precision="fp16") scales losses by itself; leave GradScaler out, or '
            "make it with enabled=False",
        )


def gate_optimizer(
    optimizer: OptimizerT,
    loop: Loop,
    models: Sequence[WrappedModel],
    index: int,
    scaler: Scaler | None = None,
) -> OptimizerT:
    """Make `optimizer.step()` act once per global batch; return the optimizer.

    The step acts in the last microbatch. With a scaler, a step whose gradients are not finite is counted
    but changes no parameter. A step that a resumed run repeats, before its saved position, changes none
    either. `index`: number of the optimizer in the run.

    Raises:
        ModelError: if a parameter belongs to no model of the run, or the state cannot be saved.
    """
    _check_state(optimizer, index)
    gate = _Gate(optimizer, loop, models, index)

    def step(self: Optimizer, closure: Callable[[], float] | None = None) -> Any:
        if closure is not None:
            raise StepError(
                f"{type(self).__name__}.step was given a closure; expected none: it would compute "
                "gradients that no other replica takes part in",
                hint="use an optimizer that needs no closure",
            )
        loop.first_error.check()
        try:
            gate.update_groups()
            gate.check()
            if not loop.acts_now():
                return None
            loop.finish_buffers()  # also of averages, which a hook may update
            loop.updated()
            if loop.progress.is_replaying or (scaler is not None and scaler.skips(gate.own)):
                # torch's schedulers warn if the optimizer has not stepped before them.
                self._opt_called = True  # type: ignore[attr-defined]
                return None
            loop.update_begins(optimizer)
            return update() if loop.audit is None else loop.audit.step(update)
        except LockstepError as error:
            loop.first_error.keep(error)
            raise

    act = optimizer.step
    update = functools.partial(gate.update, act)
    optimizer.step = MethodType(functools.wraps(act)(step), optimizer)  # type: ignore[method-assign]
    if any(model.several_replicas for model in gate.own):
        optimizer._step_supports_amp_scaling = _NoScaler()  # type: ignore[attr-defined]
    return optimizer


def _check_state(optimizer: Optimizer, index: int) -> None:
    """Raise an error if the state of optimizer number `index` cannot be saved and loaded."""
    state, name = optimizer.state_dict(), type(optimizer).__name__
    missing = [key for key in ("state", "param_groups") if key not in state]
    if missing:
        raise ModelError(
            f"the state_dict of optimizer {index} ({name}) has no {' and no '.join(missing)}; expected "
            "those of torch.optim.Optimizer",
            hint="let its state_dict() return {**super().state_dict(), …}, and its load_state_dict() take "
            "that",
        )
    check_savable(name, state)


def _check_alone(optimizer: Optimizer, own: Sequence[WrappedModel], index: int) -> None:
    """Raise `ModelError` if an optimizer has several models and one needs its own optimizer.

    `own`: models that the optimizer's parameters belong to. `index`: number of the optimizer.
    """
    mixed = all(model.mixes for model in own)
    alone = [model for model in own if (model.is_split and not mixed) or model.steps_locally]
    if alone and len(own) > 1:
        what = "is split over ranks" if alone[0].is_split else "is trained by each rank by itself"
        raise ModelError(
            f"optimizer {index} ({type(optimizer).__name__}) holds parameters of {len(own)} models, and "
            f"{type(alone[0].module).__name__} {what}; expected an optimizer for each model",
        )


def _check_removed(optimizer: Optimizer, index: int) -> None:
    """Raise `ModelError` if an optimizer has state of parameters that are in none of its groups.

    `index`: number of the optimizer, for the message.
    """
    own = {p for group in optimizer.param_groups for p in group["params"]}
    removed = sum(isinstance(p, torch.Tensor) and p not in own for p in optimizer.state)
    if removed:
        raise ModelError(
            f"optimizer {index} ({type(optimizer).__name__}) has state of {removed} parameters that are in "
            "none of its groups; expected none, since it could not be saved",
            hint="remove their state, too: optimizer.state.pop(parameter, None) for those of the group; or "
            "keep the group, with a learning rate of 0",
        )


def _models_of(
    optimizer: Optimizer, models: Sequence[WrappedModel], index: int
) -> list[WrappedModel]:
    # The module of a sharded model may have whole parameters, gathered for a forward pass.
    owner = {
        id(p): model for model in models for p in (*model.module.parameters(), *model.parameters)
    }
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    strangers = sum(id(p) not in owner for p in parameters)
    if strangers:
        raise ModelError(
            f"optimizer {index} ({type(optimizer).__name__}) holds {strangers} of {len(parameters)} "
            "parameters that belong to no model of the run",
            hint="pass the model through run.model(…) first, and its parameters() to the optimizer",
        )
    return list({id(owner[id(p)]): owner[id(p)] for p in parameters}.values())


def gate_scheduler(scheduler: Scheduler, loop: Loop, index: int) -> Scheduler:
    """Make `step()` of the run's scheduler number `index` act once per global batch in a loop.

    Outside of loops every call acts. The object's class is replaced by a subclass, since a new attribute
    would become part of its `state_dict()`.

    Raises:
        StepError: if the scheduler has no `step`, or cannot save and load its state.
        ModelError: if the state has values that cannot be saved.
    """
    own = type(scheduler)
    for method in ("step", "state_dict", "load_state_dict"):
        if not callable(getattr(own, method, None)):
            raise StepError(f"{own.__name__} has no {method}(); expected a scheduler")
    check_savable(own.__name__, scheduler.state_dict())  # type: ignore[attr-defined]
    act = own.step  # type: ignore[attr-defined]
    randomness = _StepRandomness(loop, keys.SCHEDULER, index)
    calls_script = isinstance(scheduler, lr_scheduler.LambdaLR | lr_scheduler.MultiplicativeLR)
    may_draw = calls_script or not _is_torchs(scheduler)

    @functools.wraps(act)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        # During replay the loaded state already contains the effect of the step.
        if not loop.acts_now() or loop.is_replaying:
            return None
        own_step = functools.partial(act, self, *args, **kwargs)
        return randomness.during(own_step) if may_draw else own_step()

    named = {"step": step, "__module__": own.__module__, "__qualname__": own.__qualname__}
    named["__slots__"] = ()  # Python changes an object's class only to one of the same size
    scheduler.__class__ = type(own.__name__, (own,), named)
    return scheduler


# --- clipping ---------------------------------------------------------------------------------------


def listed(parameters: Any) -> list[torch.Tensor]:
    """Return `parameters`, a model, a tensor or an iterable of tensors, as a list of tensors."""
    if isinstance(parameters, torch.Tensor):
        return [parameters]
    return list(parameters.parameters() if isinstance(parameters, nn.Module) else parameters)


def clip(
    parameters: Sequence[torch.Tensor],
    max_norm: float,
    norm_type: float,
    models: Sequence[WrappedModel],
) -> torch.Tensor:
    """Scale gradients to a total norm of at most `max_norm`; return the norm before scaling.

    `norm_type`: order p of the norm. `models`: the models of the run.

    Raises:
        ModelError: if the parameters belong to several models, one of which is distributed over
            ranks.
    """
    if not any(model.is_split for model in models):
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = total_norm(each_norm(gradients, norm_type), norm_type)
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return norm
    own = {id(p) for p in parameters}
    owners = [model for model in models if own & {id(p) for p in model.parameters}]
    if not owners or (len(owners) > 1 and not all(model.mixes for model in owners)):
        raise ModelError(
            f"run.clip_grad_norm_ was given parameters of {len(owners)} models; expected those of one, "
            "since a model is split over ranks"
        )
    norm = owners[0].total_norm(parameters, norm_type)
    owners[0].clip(parameters, max_norm, norm)
    return norm


def clip_values(
    parameters: Sequence[torch.Tensor], value: float, models: Sequence[WrappedModel]
) -> None:
    """Clamp each element of the gradients of `parameters` to between `-value` and `value`.

    `models`: the models of the run, one of which each parameter belongs to.
    """
    for model in models:
        own = {id(p) for p in model.parameters}
        model.clip_values([p for p in parameters if id(p) in own], value)
