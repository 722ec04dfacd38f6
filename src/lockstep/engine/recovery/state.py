"""`State`: models, optimizers, schedulers and objects given to `run.register`, to save and restore."""

from __future__ import annotations

import copy
import functools
import gc
import resource
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils import prune
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils._pytree import tree_leaves

from lockstep.engine.recovery import branch_settings
from lockstep.engine.strategies import optimizer_state
from lockstep.engine.strategies.dtensor import bytes_here
from lockstep.engine.strategies.wrapped_model import WrappedModel
from lockstep.engine.training.loss_scale import Scaler
from lockstep.errors import CheckpointError, ModelError
from lockstep.state.checkpoint import state_codec
from lockstep.world import accelerator

#: Key in the saved state of those results of metrics that are tensors.
ANSWERS = "answers"

#: Keys of the saved state whose tensors may be sharded over ranks, besides `optimizers`.
_OF_MODELS = ("models", "gradients")
#: Maximal size, in bytes, of a registered object's state that is copied when an epoch begins: counters and
#: best values are smaller, averages of weights are larger.
_SMALL = 1 << 16
#: For each parameter group of an optimizer: the number of the model and the name of each parameter.
_Names = list[list[tuple[int, str]]]


class State:
    """All that a run saves: its models, optimizers, schedulers and objects of `run.register`.

    The objects are in the order in which the script made them.
    """

    def __init__(self) -> None:
        self.scaler: Scaler | None = None
        self.models: list[WrappedModel] = []
        self.optimizers: list[Optimizer] = []
        self.schedulers: list[Any] = []
        self.registered: dict[str, Any] = {}
        self._before: dict[str, Any] = {}  # of small registered objects, when the epoch began
        self._groups: list[list[list[int]]] = []  # of each optimizer, when it was added
        self.initial: list[branch_settings.Settings] = []  # of each optimizer, when it was added

    def epoch_begins(self) -> None:
        """Copy the state of each registered object, unless it is larger than 64 KiB.

        A resumed run that repeats the epoch begins with these states.
        """
        self._before = {}
        for name, value in self.registered.items():
            state = value.state_dict()
            text, tensors = state_codec.flatten({"state": state})
            if len(text) + sum(tensor.nbytes for tensor in tensors.values()) <= _SMALL:
                self._before[name] = copy.deepcopy(state)

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Add an optimizer that was passed through `run.optimizer`."""
        self.optimizers.append(optimizer)
        self._groups.append(_ids(optimizer))
        self.initial.append(branch_settings.settings_of(optimizer))

    def parts(self) -> dict[str, Mapping[str, Any]]:
        """Return the state of each model and of each object of `run.register`, by a name for messages.

        All ranks call this method together, since they gather tensors that are sharded over ranks.
        """
        for model in self.models:
            model.check_gathering()
        named = {
            "parameters"
            if len(self.models) == 1
            else f"parameters of model {number}": model.state()
            for number, model in enumerate(self.models)
        }
        return named | {f"state of {name}": v.state_dict() for name, v in self.registered.items()}

    def capture(self) -> dict[str, Any]:
        """Return the complete state as nested dictionaries; tensors are not copied, and may be sharded."""
        return {
            "models": _numbered([model.state() for model in self.models]),
            "buffers": _numbered([model.unsaved_buffers() for model in self.models]),
            "gradients": _numbered([model.gradients() for model in self.models]),
            "modes": _numbered([_modes(model) for model in self.models]),
            "extras": _numbered([model.extras() for model in self.models]),
            "optimizers": _numbered([self._optimizer_state(own) for own in self.optimizers]),
            "optimizer_extras": self._extras(),
            # Names of parameters, only of optimizers whose groups the script has changed.
            "groups": {
                str(number): _names_of(optimizer, self.models)
                for number, optimizer in enumerate(self.optimizers)
                if _ids(optimizer) != self._groups[number]
            },
            "schedulers": _numbered([own.state_dict() for own in self.schedulers]),
            "registered": {name: own.state_dict() for name, own in self.registered.items()},
            "before": self._before,
            "scaler": {} if self.scaler is None else self.scaler.state_dict(),
        }

    def load(self, state: Mapping[str, Any], *, whole: bool) -> None:
        """Load a state that `capture` returned into the models, optimizers and other objects of the run.

        Args:
            state: the saved state. Tensors that are not in `needed_whole` may be `StoredTensor` objects,
                which read parts from disk or memory. The loaded objects may keep the tensors.
            whole: whether the script must have made all saved objects; if not, as before a replay, missing
                ones are left out, registered objects get their state of the epoch's beginning, and pruned
                models and optimizers with changed groups wait for the next call.

        Raises:
            CheckpointError: if the script lacks a saved object, or an object does not take its saved state.
        """
        models: dict[str, Callable[[Any], object]] = {}
        for number, model in enumerate(self.models):
            masks = _masks(model.module, state["models"].get(str(number), {}))
            if whole:
                for name, mask in masks.items():
                    part, _, own = name.rpartition(".")
                    module = model.module.get_submodule(part)
                    prune.custom_from_mask(module, own, mask)  # type: ignore[no-untyped-call]
            if whole or not masks:  # the script may still prune the model before the saved position
                models[str(number)] = model.load
        _load("model", models, state["models"], whole=whole)
        for number, model in enumerate(self.models):
            _fill(model, state["buffers"].get(str(number)), state["gradients"].get(str(number)))
            if whole and str(number) in state["modes"]:
                modules = model.module.modules()
                for module, mode in zip(modules, state["modes"][str(number)], strict=False):
                    module.training = mode == "1"
        extras = _numbered([model.load_extras for model in self.models])
        _load("strategy of model", extras, state.get("extras", {}), whole=False)
        self._load_optimizers(state, whole=whole)
        schedulers = _numbered([own.load_state_dict for own in self.schedulers])
        _load("scheduler", schedulers, state["schedulers"], whole=whole)
        registered = {name: own.load_state_dict for name, own in self.registered.items()}
        saved, before = state["registered"], state["before"]
        # Replay begins with the states from the beginning of the epoch, `before`.
        _load("registered object", registered, saved if whole else {**saved, **before}, whole=whole)
        self._before = copy.deepcopy(before)
        if self.scaler is not None and state.get("scaler"):
            self.scaler.load_state_dict(state["scaler"])

    def _load_optimizers(self, state: Mapping[str, Any], *, whole: bool) -> None:
        groups = state.get("groups", {})
        optimizers = {
            str(number): functools.partial(self._load_optimizer, own, groups.get(str(number)))
            for number, own in enumerate(self.optimizers)
            # The script may still add or remove a group before the saved position.
            if whole or len(groups.get(str(number), own.param_groups)) == len(own.param_groups)
        }
        _load("optimizer", optimizers, state["optimizers"], whole=whole)
        extras = {
            str(number): functools.partial(optimizer_state.load_extras, own)
            for number, own in enumerate(self.optimizers)
            if str(number) in optimizers
        }
        _load("attributes of optimizer", extras, state.get("optimizer_extras", {}), whole=False)
        for optimizer in self.optimizers:
            # torch's schedulers warn about an optimizer without steps; this one stepped before the restart.
            optimizer._opt_called = True  # type: ignore[attr-defined]

    def _load_optimizer(self, optimizer: Optimizer, groups: _Names | None, state: Any) -> None:
        """Load a saved `state` into an optimizer.

        `groups`: for each saved parameter group, the model number and name of each parameter; `None` if the
        script had not changed the groups.
        """
        if groups is not None:
            pairs = zip(optimizer.param_groups, _names_of(optimizer, self.models), strict=True)
            optimizer.param_groups[:] = [group for group, own in pairs if own in groups]
            parameters = [dict(model.module.named_parameters()) for model in self.models]
            for names in groups[len(optimizer.param_groups) :]:
                own = [parameters[number][name] for number, name in names]
                optimizer.add_param_group({"params": own})
        holder = self._holder(optimizer)
        take = optimizer_state.load if holder is None else holder.load_optimizer
        take(optimizer, state)

    def register(self, name: str, value: Any) -> None:
        """Add an object of `run.register`; raise `ModelError` if it cannot be saved or `name` is taken."""
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(value, method, None)):
                raise ModelError(
                    f"{name} is a {type(value).__name__} without {method}(); "
                    "expected an object that can save and load its state"
                )
        if name in self.registered:
            raise ModelError(f"{name} is registered already; expected another name")
        check_savable(name, value.state_dict())
        self.registered[name] = value

    @property
    def is_split(self) -> bool:
        """Whether a model is sharded or spread over ranks, so that no rank has the whole state."""
        return any(model.is_split for model in self.models)

    @property
    def is_gathered(self) -> bool:
        """Whether `capture` is a collective call: ranks gather tensors of which each has only a part."""
        return any(model.is_split and not model.is_cut for model in self.models)

    def needed_whole(self, names: Iterable[str]) -> set[str]:
        """Return those of the saved tensors `names` that this rank must read completely.

        Left out are tensors of sharded models, of which a rank reads only its shards, and tensors of models
        that the script has not made yet.
        """
        holders = [self._holder(optimizer) for optimizer in self.optimizers]
        models = [str(n) for n, model in enumerate(self.models) if not model.is_cut]
        whole = [f"{kind}.{n}." for n in models for kind in _OF_MODELS]
        whole += [f"optimizers.{n}." for n, m in enumerate(holders) if m is None or not m.is_cut]
        cut = tuple(f"{kind}." for kind in (*_OF_MODELS, "optimizers"))
        return {n for n in names if n.startswith(tuple(whole)) or not n.startswith(cut)}

    def _holder(self, optimizer: Optimizer) -> WrappedModel | None:
        """Return the model of `optimizer`'s parameters if the model is split over ranks, else `None`."""
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        split = [model for model in self.models if model.is_split]
        return next((m for m in split if own & {id(p) for p in m.parameters}), None)

    def _optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        holder = self._holder(optimizer)
        return optimizer.state_dict() if holder is None else holder.optimizer_state(optimizer)

    def _extras(self) -> dict[str, Any]:
        """Return the attributes that an optimizer's `state_dict` leaves out, by the optimizer's number.

        Optimizers of models that are split over ranks are not included.
        """
        known = {id(own) for own in self.optimizers}
        return {
            str(number): extras
            for number, own in enumerate(self.optimizers)
            if self._holder(own) is None and (extras := optimizer_state.capture_extras(own, known))
        }

    def forgotten_attributes(self) -> str | None:
        """Return one line with an optimizer's class and its attributes that are not saved.

        Such attributes exist only for models that are split over ranks. The first optimizer that has some
        counts. Return `None` if there is none.
        """
        for optimizer in self.optimizers:
            if self._holder(optimizer) is not None:
                extras = optimizer_state.capture_extras(optimizer).values()
                names = ", ".join(name for own in extras for name in own)
                if names:
                    return f"{type(optimizer).__name__}: {names}"
        return None

    def forgotten_scheduler(self) -> str | None:
        """Return the class of an optimizer whose scheduler was not given to `run.scheduler`, or `None`."""
        known = {id(getattr(scheduler, "optimizer", None)) for scheduler in self.schedulers}
        for optimizer in self.optimizers:
            # torch.optim.lr_scheduler sets this attribute on the optimizer whose steps it counts. A
            # ReduceLROnPlateau counts none: it is found by its reference to the optimizer.
            if id(optimizer) not in known and (
                getattr(optimizer.step, "_wrapped_by_lr_sched", False) or _has_plateau(optimizer)
            ):
                return type(optimizer).__name__
        return None


def _has_plateau(optimizer: Optimizer) -> bool:
    """Whether there is a ReduceLROnPlateau whose optimizer is `optimizer`."""
    found = (one for one in gc.get_objects() if issubclass(type(one), ReduceLROnPlateau))
    return any(one.optimizer is optimizer for one in found)


def check_savable(name: str, state: Mapping[str, Any]) -> None:
    """Raise `ModelError` if `state`, a `state_dict`, has a value that cannot be saved and hashed.

    The error names the value and its type. `name`: name of the object whose state it is.
    """
    try:
        state_codec.flatten({name: state})
    except CheckpointError as error:
        raise ModelError(error.message, hint=error.hint) from None
    except RecursionError:
        raise ModelError(
            f"the state {name} has a container that holds itself; expected one of finite depth",
            hint="let its state_dict() return values only",
        ) from None


def _fill(
    model: WrappedModel,
    buffers: Mapping[str, torch.Tensor] | None,
    gradients: Mapping[str, torch.Tensor] | None,
) -> None:
    for parameter in model.parameters:
        parameter.grad = None  # the gradient of a replayed batch
    own = dict(model.module.named_buffers())
    for name, value in (buffers or {}).items():
        if name in own:
            own[name].copy_(value)
    model.load_gradients(gradients or {})


def _modes(model: WrappedModel) -> str:
    """Return a text with one character per module of `model`: `1` in training mode, else `0`."""
    return "".join("1" if part.training else "0" for part in model.module.modules())


def _numbered(values: Sequence[Any]) -> dict[str, Any]:
    return {str(number): value for number, value in enumerate(values)}


def _load(
    what: str,
    there: Mapping[str, Callable[[Any], object]],
    saved: Mapping[str, Any],
    *,
    whole: bool,
) -> None:
    # The script may make more objects after the saved position.
    if whole and not saved.keys() <= there.keys():
        raise CheckpointError(
            f"the state has {len(saved)} {what}(s) ({', '.join(saved) or 'none'}), the script has made "
            f"{len(there)} ({', '.join(there) or 'none'})",
            hint="a run continues with the script that it began with, and passes over epochs that are done"
            f": make each {what} before run.epochs; --fresh begins anew",
        )
    for name, load in there.items():
        if name not in saved:
            continue
        try:
            load(saved[name])
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{what} {name} does not take its saved state: {error}",
                hint="a run continues with the script that it began with; --fresh begins anew",
            ) from error


def footprint(state: State, device: torch.device) -> dict[str, int]:
    """Return this rank's memory for models and optimizers and its peak memory, in bytes.

    Returns:
        `parameters`, `buffers`, `gradients` (at the first step of an optimizer) and `optimizer`: bytes of
        this rank's part of these tensors; `peak_host`: largest resident size of the process so far, with
        torch's libraries; `peak_device`: largest memory that torch allocated on the GPU.
    """
    modules = [model.module for model in state.models]
    used = {
        "parameters": bytes_here(p for module in modules for p in module.parameters()),
        "buffers": bytes_here(b for module in modules for b in module.buffers()),
        "gradients": sum(model.gradient_bytes for model in state.models),
        "optimizer": bytes_here(
            value
            for optimizer in state.optimizers
            for own in optimizer.state.values()
            for value in tree_leaves(own)
            if isinstance(value, torch.Tensor)
        ),
        # Linux reports it in units of 1024 bytes.
        "peak_host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    if (peak := accelerator.peak_memory(device)) is not None:
        used["peak_device"] = peak
    return used


# --- what a script changes while it trains: added groups, pruned parameters ------------------------


def _ids(optimizer: Optimizer) -> list[list[int]]:
    return [[id(p) for p in group["params"]] for group in optimizer.param_groups]


def _names_of(optimizer: Optimizer, models: Sequence[WrappedModel]) -> _Names:
    """Return, for each parameter group of `optimizer`, the model number and name of each parameter."""
    named = {
        id(p): (number, name)
        for number, model in enumerate(models)
        for name, p in model.module.named_parameters()
    }
    return [[named[id(p)] for p in group["params"]] for group in optimizer.param_groups]


def _masks(module: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the pruning masks in a saved `state` whose parameters `module` has not pruned yet.

    The keys are names of parameters; the masks are those of `torch.nn.utils.prune`.
    """
    names = [name.removesuffix("_mask") for name in state if name.endswith("_mask")]
    own = dict(module.named_parameters()) if names else {}
    return {n: state[f"{n}_mask"] for n in names if n in own and f"{n}_orig" in state}
