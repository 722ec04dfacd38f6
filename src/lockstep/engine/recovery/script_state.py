"""`ScriptState`, which `run.state` returns: variables of a script that are saved with the run."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from lockstep.engine.recovery.state import check_savable
from lockstep.errors import UsageError, VariableError


class ScriptState:
    """Namespace that `run.state` returns; its attributes are variables that are saved with the run.

    Args:
        name: name of the namespace in error messages.
        values: first value of each variable: a number, text, `None`, tensor, array, or container of these.
        device: device of the variables' tensors after a resume.
    """

    __slots__ = ("__device", "__name", "__values")

    def __init__(self, name: str, values: Mapping[str, Any], device: torch.device) -> None:
        own = {"name": name, "device": device, "values": {}}
        for slot, value in own.items():
            object.__setattr__(self, f"_ScriptState__{slot}", value)
        if not values:
            raise UsageError(
                "run.state was given no variables; expected them by name, with their first values",
                hint="state = run.state(best=0.0)",
            )
        for variable, value in values.items():
            if hasattr(type(self), variable):
                raise UsageError(f"run.state was given {variable}, the name of a method of its own")
            self.__take(variable, value)

    def __take(self, variable: str, value: Any) -> None:
        check_savable(f"{self.__name}.{variable}", {"value": value})
        self.__values[variable] = value

    def __getattr__(self, variable: str) -> Any:
        if variable.startswith("_ScriptState__"):  # `copy` makes an object without attributes first
            raise AttributeError(variable)
        self.__check(variable)
        return self.__values[variable]

    def __setattr__(self, variable: str, value: Any) -> None:
        self.__check(variable)
        self.__take(variable, value)

    def __delattr__(self, variable: str) -> None:
        self.__check(variable)
        del self.__values[variable]

    def __dir__(self) -> Iterable[str]:
        return (*super().__dir__(), *self.__values)

    def __repr__(self) -> str:
        return f"{self.__name}({', '.join(f'{name}={value!r}' for name, value in self.__values.items())})"

    def __check(self, variable: str) -> None:
        if variable not in self.__values:
            raise VariableError(
                f"{self.__name} has no {variable}; it has {', '.join(self.__values)}",
                hint=f"state = run.state(…, {variable}=…) makes it",
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the values of the namespace's variables by their names."""
        return dict(self.__values)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the variables to their values in a saved `state`."""
        before = dict(self.__values)
        self.__values.clear()
        for variable, value in state.items():
            old = before.get(variable)
            if isinstance(old, defaultdict) and type(value) is dict:
                value = defaultdict(old.default_factory, value)  # noqa: PLW2901 - code is not saved
            self.__values[variable] = _on(self.__device, value)


def _on(device: torch.device, value: Any) -> Any:
    """Move the tensors of a saved value, in containers too, to `device`; return the value."""
    if device.type == "cpu":
        return value
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        for key, one in value.items():
            value[key] = _on(device, one)
        return value
    if isinstance(value, deque):
        return deque((_on(device, one) for one in value), value.maxlen)
    return type(value)(_on(device, one) for one in value) if type(value) in (list, tuple) else value
