"""State of a run: everything that snapshots and checkpoints save and restore."""

from __future__ import annotations

import copy
import functools
import resource
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils import prune
from torch.optim import Optimizer

from lockstep.engine.strategies import optimizer_extras, optimizer_state
from lockstep.engine.strategies.dtensor import bytes_here
from lockstep.engine.strategies.wrapped_model import WrappedModel
from lockstep.engine.training.loss_scale import Scaler
from lockstep.errors import CheckpointError, ModelError
from lockstep.state.checkpoint import state_codec
from lockstep.world import accelerator

#: Where in what is saved the values of metrics are that are tensors.
ANSWERS = "answers"

#: What is saved of tensors that may be cut over ranks, besides their optimizers'.
_OF_MODELS = ("models", "gradients")
#: Bytes up to which the state of a registered object is kept as it was when the epoch began: counters and
#: best values, not averages of weights.
_SMALL = 1 << 16
#: For each group its parameters: the number of the model, and the name there.
_Names = list[list[tuple[int, str]]]


class State:
    """Everything that a run has been told of.

    Attributes:
        models: the models that the run holds.
        optimizers: those passed through `run.optimizer`.
        schedulers: those passed through `run.scheduler`.
        registered: what `run.register` was given, by name.
        scaler: of the losses, in fp16.
    """

    def __init__(self) -> None:
        self.scaler: Scaler | None = None
        self.models: list[WrappedModel] = []
        self.optimizers: list[Optimizer] = []
        self.schedulers: list[Any] = []
        self.registered: dict[str, Any] = {}
        self._before: dict[str, Any] = {}  # of what is registered and small, when the epoch began
        self._groups: list[list[list[int]]] = []  # of each optimizer, when the run was given it

    def epoch_begins(self) -> None:
        """Remember the state of what is registered: during replay a script decides by it as it did."""
        states = {name: one.state_dict() for name, one in self.registered.items()}
        self._before = {name: copy.deepcopy(one) for name, one in states.items() if _is_small(one)}

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Take an optimizer that was passed through `run.optimizer`."""
        self.optimizers.append(optimizer)
        self._groups.append(_ids(optimizer))

    def parts(self) -> dict[str, Mapping[str, Any]]:
        """Return what the result of the run is made of, each part under a name for messages.

        Some tensors may be cut over ranks, which gather them together; all ranks call this.
        """
        for model in self.models:
            model.check_gathering()
        one = len(self.models) == 1
        named = {
            "parameters" if one else f"parameters of model {number}": model.state()
            for number, model in enumerate(self.models)
        }
        return named | {f"state of {name}": v.state_dict() for name, v in self.registered.items()}

    def capture(self) -> dict[str, Any]:
        """Return the state of all; tensors are the ones in use, and some may be cut over ranks."""
        return {
            "models": _numbered([model.state() for model in self.models]),
            "buffers": _numbered([model.unsaved_buffers() for model in self.models]),
            "gradients": _numbered([model.gradients() for model in self.models]),
            "modes": _numbered([_modes(model) for model in self.models]),
            "extras": _numbered([model.extras() for model in self.models]),
            "optimizers": _numbered([self._saved(one) for one in self.optimizers]),
            "optimizer_extras": self._extras(),
            "groups": self._changed_groups(),
            "schedulers": _numbered([one.state_dict() for one in self.schedulers]),
            "registered": {name: one.state_dict() for name, one in self.registered.items()},
            "before": self._before,
            "scaler": {} if self.scaler is None else self.scaler.state_dict(),
        }

    def load(self, state: Mapping[str, Any], *, whole: bool) -> None:
        """Give everything the state that `capture` has returned.

        Args:
            state: nothing else holds its tensors; but for those of `needed_whole` they may be `Stored`.
            whole: whether everything is expected to be there; before, a script may still make some.

        Raises:
            CheckpointError: if the script has made other things than the state has.
        """
        _load(
            "model", self._model_loaders(state["models"], whole=whole), state["models"], whole=whole
        )
        for number, model in enumerate(self.models):
            _fill(model, state["buffers"].get(str(number)), state["gradients"].get(str(number)))
            if whole and str(number) in state["modes"]:
                _set_modes(model, state["modes"][str(number)])
        extras = _numbered([model.load_extras for model in self.models])
        _load("strategy of model", extras, state.get("extras", {}), whole=False)
        groups = state.get("groups", {})
        optimizers = {
            str(number): self._loader(one, groups.get(str(number)))
            for number, one in enumerate(self.optimizers)
            # A script adds or removes a group on its way to where it was, or has passed over that there.
            if whole or len(groups.get(str(number), one.param_groups)) == len(one.param_groups)
        }
        _load("optimizer", optimizers, state["optimizers"], whole=whole)
        more = {
            str(number): functools.partial(optimizer_extras.load, one)
            for number, one in enumerate(self.optimizers)
            if str(number) in optimizers
        }
        _load("attributes of optimizer", more, state.get("optimizer_extras", {}), whole=False)
        for optimizer in self.optimizers:
            # It has stepped, in an earlier process; torch's schedulers warn where it has not.
            optimizer._opt_called = True  # type: ignore[attr-defined]
        schedulers = _numbered([one.load_state_dict for one in self.schedulers])
        _load("scheduler", schedulers, state["schedulers"], whole=whole)
        registered = {name: one.load_state_dict for name, one in self.registered.items()}
        saved, before = state["registered"], state["before"]
        # Until the position an epoch is gone through from its beginning.
        _load("registered object", registered, saved if whole else {**saved, **before}, whole=whole)
        self._before = copy.deepcopy(before)
        if self.scaler is not None and state.get("scaler"):
            self.scaler.load_state_dict(state["scaler"])

    def register(self, name: str, value: Any) -> None:
        """Count `value` as state of the run."""
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
        """Whether no rank has all of it."""
        return any(model.is_split for model in self.models)

    @property
    def is_gathered(self) -> bool:
        """Whether ranks capture it together, since some of them have nothing of a tensor."""
        return any(model.is_split and not model.is_cut for model in self.models)

    def needed_whole(self, names: Iterable[str]) -> set[str]:
        """Return those saved tensors, by their names in `capture`, of which this rank needs all.

        Of models that are cut over ranks it reads its part, of those that are still to come nothing.
        """
        holders = [self._holder(optimizer) for optimizer in self.optimizers]
        whole = tuple(
            [
                f"{kind}.{n}."
                for n, m in enumerate(self.models)
                for kind in _OF_MODELS
                if not m.is_cut
            ]
            + [f"optimizers.{n}." for n, m in enumerate(holders) if m is None or not m.is_cut]
        )
        apart = tuple(f"{kind}." for kind in (*_OF_MODELS, "optimizers"))
        return {name for name in names if name.startswith(whole) or not name.startswith(apart)}

    def _holder(self, optimizer: Optimizer) -> WrappedModel | None:
        """Return the split model that an optimizer belongs to, if there is one; it has no other."""
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        split = [model for model in self.models if model.is_split]
        return next((m for m in split if own & {id(p) for p in m.parameters}), None)

    def _saved(self, optimizer: Optimizer) -> dict[str, Any]:
        holder = self._holder(optimizer)
        return optimizer.state_dict() if holder is None else holder.optimizer_state(optimizer)

    def _extras(self) -> dict[str, Any]:
        """Return what optimizers hold beside their `state_dict`, of whole models."""
        known = {id(one) for one in self.optimizers}
        return {
            str(number): extras
            for number, one in enumerate(self.optimizers)
            if self._holder(one) is None and (extras := optimizer_extras.capture(one, known))
        }

    def forgotten_attributes(self) -> str | None:
        """Return the optimizer of a split model whose attributes are not saved, and their names."""
        for one in self.optimizers:
            extras = optimizer_extras.capture(one) if self._holder(one) is not None else {}
            names = ", ".join(name for own in extras.values() for name in own)
            if names:
                return f"{type(one).__name__}: {names}"
        return None

    def _model_loaders(
        self, saved: Mapping[str, Any], *, whole: bool
    ) -> dict[str, Callable[[Any], object]]:
        """Return what loads the models; a script prunes one on its way, or has passed over that there."""
        loaders: dict[str, Callable[[Any], object]] = {}
        for number, model in enumerate(self.models):
            own = saved.get(str(number), {})
            if whole:
                _prune_alike(model.module, own)
            if whole or not _unpruned(model.module, own):
                loaders[str(number)] = model.load
        return loaders

    def _changed_groups(self) -> dict[str, Any]:
        """Return what the groups hold of those optimizers whose groups the script has changed."""
        return {
            str(number): _names_of(optimizer, self.models)
            for number, optimizer in enumerate(self.optimizers)
            if _ids(optimizer) != self._groups[number]
        }

    def _loader(self, optimizer: Optimizer, groups: Any) -> Callable[[Any], object]:
        def load(state: Any) -> None:
            if groups is not None:
                _match_groups(optimizer, groups, self.models)
            holder = self._holder(optimizer)
            take = optimizer_state.load if holder is None else holder.load_optimizer
            take(optimizer, state)

        return load

    def forgotten_scheduler(self) -> str | None:
        """Return the optimizer that has a learning rate scheduler the run has not been told of."""
        known = {id(getattr(scheduler, "optimizer", None)) for scheduler in self.schedulers}
        for optimizer in self.optimizers:
            # Set by torch.optim.lr_scheduler on the optimizer that it counts the steps of.
            if (
                getattr(optimizer.step, "_wrapped_by_lr_sched", False)
                and id(optimizer) not in known
            ):
                return type(optimizer).__name__
        return None


def check_savable(name: str, state: Mapping[str, Any]) -> None:
    """Refuse a state that can be neither saved nor hashed, before anything is computed with it.

    Raises:
        ModelError: naming the value and its type.
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
        parameter.grad = None  # of a batch that was computed again
    own = dict(model.module.named_buffers())
    for name, value in (buffers or {}).items():
        if name in own:
            own[name].copy_(value)
    model.load_gradients(gradients or {})


def _is_small(state: Any) -> bool:
    text, tensors = state_codec.flatten({"state": state})
    return len(text) + sum(tensor.nbytes for tensor in tensors.values()) <= _SMALL


def _modes(model: WrappedModel) -> str:
    """Return which parts of a model are in training mode: a script may have said so long before."""
    return "".join("1" if part.training else "0" for part in model.module.modules())


def _set_modes(model: WrappedModel, modes: str) -> None:
    for part, mode in zip(model.module.modules(), modes, strict=False):
        part.training = mode == "1"


def _numbered(values: Sequence[Any]) -> dict[str, Any]:
    return {str(number): value for number, value in enumerate(values)}


def _load(
    what: str,
    there: Mapping[str, Callable[[Any], object]],
    saved: Mapping[str, Any],
    *,
    whole: bool,
) -> None:
    # The script may make more after the point than there was before.
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
    """Return in bytes what this rank has held of the run's models and optimizers, and its peaks of memory.

    Args:
        state: what the run has been told of.
        device: what this rank computes on.

    Returns:
        `parameters`, `buffers`, `gradients` (as they were when an optimizer first stepped) and `optimizer`:
        this rank's own part of each; `peak_host`: the largest resident size of the process so far, all of
        torch in it; `peak_device`: the most that torch has taken of a GPU.
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
            for value in _tensors(own)
        ),
        # Linux counts in units of 1024 bytes.
        "peak_host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    if (peak := accelerator.peak_memory(device)) is not None:
        used["peak_device"] = peak
    return used


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


# --- what a script changes while it trains: added groups, pruned parameters ------------------------


def _ids(optimizer: Optimizer) -> list[list[int]]:
    return [[id(p) for p in group["params"]] for group in optimizer.param_groups]


def _names_of(optimizer: Optimizer, models: Sequence[WrappedModel]) -> _Names:
    """Return what the groups of `optimizer` hold."""
    named = {
        id(p): (number, name)
        for number, model in enumerate(models)
        for name, p in model.module.named_parameters()
    }
    return [[named[id(p)] for p in group["params"]] for group in optimizer.param_groups]


def _match_groups(optimizer: Optimizer, names: _Names, models: Sequence[WrappedModel]) -> None:
    """Give `optimizer` the groups that it had when its state was saved; new ones with the usual settings.

    Raises:
        KeyError: if a model has no such parameter.
    """
    pairs = zip(optimizer.param_groups, _names_of(optimizer, models), strict=True)
    optimizer.param_groups[:] = [group for group, own in pairs if own in names]
    parameters = [dict(model.module.named_parameters()) for model in models]
    for group in names[len(optimizer.param_groups) :]:
        own = [parameters[number][name] for number, name in group]
        optimizer.add_param_group({"params": own})


def _unpruned(module: nn.Module, state: Mapping[str, Any]) -> list[str]:
    """Return the parameters of `module` that are pruned in `state`, a `state_dict`, and not yet here."""
    masked = [name.removesuffix("_mask") for name in state if name.endswith("_mask")]
    own = dict(module.named_parameters()) if masked else {}
    return [name for name in masked if name in own and f"{name}_orig" in state]


def _prune_alike(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Prune what is pruned in `state`."""
    for name in _unpruned(module, state):
        part, _, own = name.rpartition(".")
        prune.custom_from_mask(module.get_submodule(part), own, state[f"{name}_mask"])  # type: ignore[no-untyped-call]
