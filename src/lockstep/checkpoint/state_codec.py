"""Encode nested state as JSON text and a flat mapping of tensors, and decode it.

What `state_dict()` returns is made of containers, numbers and tensors. Nothing else is taken, so that
nothing has to be unpickled when it is read back.
"""

from __future__ import annotations

import base64
import contextlib
import json
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from lockstep.errors import CheckpointError

#: Values that JSON has no word for: type, name, and how they are written.
_LEAVES: tuple[tuple[type, str, Callable[[Any], Any]], ...] = (
    (np.number, "scalar", lambda value: [value.dtype.str, value.item()]),
    (np.bool_, "scalar", lambda value: [value.dtype.str, value.item()]),
    (bytes, "bytes", lambda value: base64.b64encode(value).decode()),
    (complex, "complex", lambda value: [value.real, value.imag]),
    (torch.dtype, "dtype", lambda value: str(value).removeprefix("torch.")),
    (torch.device, "device", str),
)
#: Containers that JSON has no word for: type, name, and how its elements are listed.
_LISTS: dict[type, str] = {
    tuple: "tuple",
    deque: "deque",
    torch.Size: "size",
    frozenset: "frozenset",
}
_SETS: dict[type, str] = {set: "set", frozenset: "frozenset"}
_MAPPINGS: dict[type, str] = {
    dict: "dict",
    OrderedDict: "ordered",
    Counter: "counter",
    defaultdict: "dict",  # its factory is code, which state must not bring along
}
_MAKERS: dict[str, Callable[[Any], Any]] = {
    "tuple": tuple,
    "deque": deque,
    "bounded": lambda parts: deque(parts[1], parts[0]),
    "size": torch.Size,
    "set": set,
    "frozenset": frozenset,
    "dict": dict,
    "ordered": OrderedDict,
    "counter": lambda pairs: Counter(dict(pairs)),
    "bytes": base64.b64decode,
    "complex": lambda parts: complex(*parts),
    "dtype": lambda name: getattr(torch, name),
    "device": torch.device,
}


def flatten(state: Mapping[str, Any]) -> tuple[str, dict[str, torch.Tensor]]:
    """Return `state` as JSON text, and its tensors by name; they share memory with those in `state`.

    Raises:
        CheckpointError: if it holds something that is neither container, number, text nor tensor.
    """
    tensors: dict[str, torch.Tensor] = {}
    tree = {name: encode(value, name, tensors) for name, value in state.items()}
    return json.dumps(tree), tensors


def rebuild(text: str, tensor: Callable[[str], Any]) -> dict[str, Any]:
    """Return the state that `flatten` has taken apart, with what `tensor` returns for each name."""
    return {name: decode(value, tensor) for name, value in json.loads(text).items()}


def encode(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Return `value` as JSON has it, and add the tensors in it to `tensors`, under names made of `path`.

    Raises:
        CheckpointError: as `flatten`.
    """
    return _Flattener(tensors).encode(value, path)


class _Flattener:
    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def encode(self, value: Any, path: str) -> Any:
        if isinstance(value, torch.Tensor):
            if value.layout is not torch.strided or value.is_quantized:
                raise CheckpointError(
                    f"the state {path} is a sparse or quantized tensor; expected a dense one",
                    hint="keep it as dense tensors: its indices and its values",
                )
            return {"tensor": self._keep(value.detach(), path)}
        kind = type(value)
        if kind in _MAPPINGS:
            return self._encode_mapping(value, path, _MAPPINGS[kind])
        if kind is list:
            return [self.encode(item, f"{path}.{i}") for i, item in enumerate(value)]
        if kind in _SETS:
            value = sorted(value, key=repr)
            return {_SETS[kind]: [self.encode(item, path) for item in value]}
        if kind in _LISTS:
            items = [self.encode(item, f"{path}.{i}") for i, item in enumerate(value)]
            bound = value.maxlen if kind is deque else None
            return {_LISTS[kind]: items} if bound is None else {"bounded": [bound, items]}
        return self._encode_leaf(value, path)

    def _encode_mapping(self, value: Mapping[Any, Any], path: str, kind: str) -> Any:
        pairs = [
            [self.encode(key, path), self.encode(item, f"{path}.{key}")]
            for key, item in value.items()
        ]
        return {kind: pairs}

    def _encode_leaf(self, value: Any, path: str) -> Any:
        if value is None or type(value) in (bool, int, float, str):
            return value
        if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
            with contextlib.suppress(
                TypeError, ValueError
            ):  # a type that torch has not: refused below
                tensor = torch.from_numpy(np.asarray(value, order="C"))
                return {"array": self._keep(tensor, path)}
        for kind, name, encode in _LEAVES:
            if isinstance(value, kind):
                return {name: encode(value)}
        raise CheckpointError(
            f"the state {path} is a {type(value).__name__}; expected tensors, numbers, text, None, or "
            "containers of them",
            hint="let its state_dict() return what those say, and load_state_dict() make it again",
        )

    def _keep(self, tensor: torch.Tensor, path: str) -> str:
        name, number = path, 1
        while name in self._tensors:  # keys may have dots in them, too
            number += 1
            name = f"{path}#{number}"
        self._tensors[name] = tensor
        return name


def decode(value: Any, tensor: Callable[[str], Any]) -> Any:
    """Return the value that `encode` has made JSON of, with what `tensor` returns for each name."""
    if isinstance(value, list):
        return [decode(item, tensor) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensor(content)
    if kind == "array":
        return tensor(content).cpu().numpy().copy()
    if kind == "scalar":
        return np.dtype(content[0]).type(content[1])
    if isinstance(content, list):
        content = [decode(item, tensor) for item in content]
    if kind in _MAPPINGS.values():
        content = [(key, item) for key, item in content]
    return _MAKERS[kind](content)
