"""Conversion of optimizers to JSON and back: class name, defaults, parameter groups, and state.

Tensors of the state are sent as bytes. A worker sends the description, and a server creates an equal
optimizer. Nothing is unpickled.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from lockstep.engine.parameter_server.rows import RowLayout
from lockstep.errors import ModelError


def describe(optimizer: Optimizer) -> dict[str, Any]:
    """Return the module, class name and defaults of an optimizer, as JSON values.

    Raises:
        ModelError: if a server cannot import the class, or JSON cannot represent a default.
    """
    kind = type(optimizer)
    if kind.__module__ == "__main__" or "<" in kind.__qualname__:
        raise ModelError(
            f"the optimizer's class {kind.__qualname__} is defined in the script; expected one in a "
            "module, which a server can import: it never runs the script",
            hint="move the class to a file beside the script, and import it from there",
        )
    defaults = {name: _plain(name, value) for name, value in optimizer.defaults.items()}
    return {"module": kind.__module__, "name": kind.__qualname__, "defaults": defaults}


def settings_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the settings of each parameter group, such as its learning rate, as JSON values.

    Raises:
        ModelError: if JSON cannot represent a setting.
    """
    return [
        {name: _plain(name, value) for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]


def _plain(name: str, value: Any) -> Any:
    """Return `value`, a setting or state value of an optimizer, as a JSON value.

    `name`: name of the value, for the error.

    Raises:
        ModelError: if JSON cannot represent the value.
    """
    if isinstance(value, list | tuple):
        return [_plain(name, item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ModelError(
        f"{name} of the optimizer is a {type(value).__name__}; expected a number, a word or a list of "
        "such, which go to servers in every step",
        hint=f"give {name} as a number",
    )


def build(words: Mapping[str, Any], groups: Sequence[Sequence[torch.nn.Parameter]]) -> Optimizer:
    """Create an optimizer from a description that `describe` made.

    Args:
        words: the description: module, class name and defaults.
        groups: the parameters of each parameter group.

    Raises:
        ModelError: if the class cannot be imported, or cannot be built from its defaults.
    """
    kind = _find(str(words["module"]), str(words["name"]))
    known = inspect.signature(kind).parameters
    takes_all = any(one.kind is one.VAR_KEYWORD for one in known.values())
    given = {
        name: _tuples(value)
        for name, value in words["defaults"].items()
        if takes_all or name in known
    }
    try:
        return kind([{"params": list(group)} for group in groups], **given)
    except (TypeError, ValueError) as error:
        raise ModelError(
            f"a server cannot make the optimizer {kind.__qualname__} from its defaults: {error}",
            hint="its constructor must take its defaults as keywords, as torch's optimizers do",
        ) from error


def _find(module: str, name: str) -> type[Optimizer]:
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ModelError(
            f"a server cannot import the optimizer {name} from {module}: {error}",
            hint="it must lie beside the script, or be installed, or PYTHONPATH must name its place",
        ) from error
    if not (isinstance(found, type) and issubclass(found, Optimizer)):
        raise ModelError(f"{module}.{name} is no torch.optim.Optimizer")
    return found


def set_settings(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    """Set the settings of each parameter group, such as its learning rate.

    `groups`: for each parameter group its settings, as returned by `settings_of`.
    """
    for group, words in zip(optimizer.param_groups, groups, strict=True):
        group.update({name: _tuples(value) for name, value in words.items()})


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def pack(
    optimizer: Optimizer, parameters: Sequence[torch.Tensor]
) -> tuple[dict[str, Any], torch.Tensor]:
    """Return an optimizer's state of `parameters` as a JSON object, and its tensors as a row of bytes.

    The object's `state` is a list of `[index of the parameter, name, kind, value]`. If the kind is
    `tensor`, the value is an index into `tensors`, the layout of the row; if it is `value`, the value
    itself.
    """
    entries: list[list[Any]] = []
    tensors: list[torch.Tensor] = []
    for place, parameter in enumerate(parameters):
        for name, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                entries.append([place, name, "tensor", len(tensors)])
                tensors.append(value)
            else:
                entries.append([place, name, "value", _plain(name, value)])
    rows = RowLayout.of(tensors)
    return {"state": entries, "tensors": rows.words()}, rows.row(tensors)


def unpack(words: Mapping[str, Any], row: torch.Tensor) -> dict[int, dict[str, Any]]:
    """Return the optimizer state that `pack` encoded, keyed by index of the parameter.

    `words` and `row` are the JSON object and the bytes that `pack` returned.
    """
    tensors = RowLayout.parse(words["tensors"]).views(row)
    state: dict[int, dict[str, Any]] = {}
    for place, name, kind, value in words["state"]:
        found = tensors[value].clone() if kind == "tensor" else _tuples(value)
        state.setdefault(int(place), {})[str(name)] = found
    return state
