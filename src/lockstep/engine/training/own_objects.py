"""Own objects of a run: models, optimizers, registered objects, and what they hold."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sized
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from lockstep.engine.recovery.script_state import ScriptState
from lockstep.engine.recovery.state import State
from lockstep.engine.training import variables
from lockstep.engine.training.observations import Place, Value
from lockstep.engine.training.variable_parts import attributes, is_of_script

#: Values of `run.state` that the script may have under names of its own.
_HELD = (list, dict, set, deque, torch.Tensor, np.ndarray)


class OwnObjects:
    """The objects of the run: what is its state, and what they hold besides that."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._counts: tuple[int, ...] = ()
        self._ids: frozenset[int] = frozenset()
        self._parts: list[tuple[str, Any]] = []
        self._initial: list[dict[str, Any]] = []  # plain attributes of modules when they were given

    def ids(self) -> frozenset[int]:
        """Return the ids of all objects that are state of the run."""
        state = self._state
        kinds: tuple[Sized, ...] = (
            state.models,
            state.optimizers,
            state.schedulers,
            state.registered,
        )
        counts = tuple(len(kind) for kind in kinds)
        if counts != self._counts:
            self._counts = counts
            modules = [(type(one.module).__name__, one.module) for one in state.models]
            modules += [pair for pair in state.registered.items() if isinstance(pair[1], nn.Module)]
            parts = [pair for name, one in modules for pair in one.named_modules(prefix=name)]
            own: list[Any] = [
                one for model in state.models for one in (model.wrapped, *model.parameters)
            ]
            own += [*state.optimizers, *state.schedulers, *state.registered.values()]
            own += [part for _, part in parts]
            own += [
                one for _, module in modules for one in (*module.parameters(), *module.buffers())
            ]
            self._ids = frozenset(map(id, own))
            objects = [
                pair for pair in state.registered.items() if not isinstance(pair[1], nn.Module)
            ]
            self._parts = [*parts, *(pair for pair in objects if is_of_script(type(pair[1])))]
            self._initial = [_plain(one) for _, one in self._parts]
        # Containers and tensors alone: Python has one object for all small numbers of a value.
        kept = (
            one.state_dict() for one in state.registered.values() if isinstance(one, ScriptState)
        )
        held = (one for values in kept for one in values.values() if isinstance(one, _HELD))
        return self._ids.union(map(id, held))

    def hooks(self) -> dict[str, Any]:
        """Return what optimizers call after their steps: its variables may be nowhere else."""
        return {
            f"hook {number} of {type(one).__name__}": hook
            for one in self._state.optimizers
            for number, hook in enumerate(one._optimizer_step_post_hooks.values())
        }

    def attributes(self, *, changed: bool) -> dict[Place, Value]:
        """Return attributes of the run's objects that their state leaves out.

        Args:
            changed: whether to leave out modules whose plain attributes are what they were at first.
        """
        found: dict[Place, Value] = {}
        for number, (name, one) in enumerate(self._parts):
            if changed and self._initial[number] == _plain(one):
                continue
            own = variables.of_object(name, one, self._ids)
            if own and (saved := _saved_of(one)) is not None:
                keys, texts = saved
                for place, value in own.items():
                    attribute = place.name.rpartition(".")[2]
                    if attribute.strip("_") not in keys and value.text not in texts:
                        found[place._replace(frame=-number - 1)] = replace(value, kind="attribute")
        return found


def _plain(value: Any) -> dict[str, Any]:
    return {name: one for name, one in attributes(value) if type(one) in (int, float, str)}


def _saved_of(one: Any) -> tuple[set[str], set[str]] | None:
    """Return the names and fingerprints of what an object saves; `None` where that is not known."""
    if isinstance(one, nn.Module):
        has_more = type(one).get_extra_state is not nn.Module.get_extra_state
        return None if has_more else (set(), set())
    try:
        leaves = list(_leaves("", one.state_dict()))
    except Exception:  # the script's own; where it matters, it is called again
        return None
    texts = {text for _, leaf in leaves if (text := variables.text_of(leaf)) is not None}
    return {name.strip("_") for name, _ in leaves}, texts


def _leaves(name: str, state: Any) -> Iterator[tuple[str, Any]]:
    yield name, state
    pairs: Iterable[tuple[Any, Any]] = ()
    if isinstance(state, dict):
        pairs = state.items()
    elif isinstance(state, list | tuple):
        pairs = ((name, one) for one in state)
    for key, one in pairs:
        yield from _leaves(str(key), one)
