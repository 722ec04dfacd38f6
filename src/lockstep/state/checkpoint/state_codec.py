"""Encode a nested state as JSON text and a flat mapping of tensors, and decode it, without pickle.

A `state_dict()` consists of containers, numbers, text and tensors. Other values are refused, so that
nothing has to be unpickled when the state is read.
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
from torch import nn

from lockstep.errors import CheckpointError
from lockstep.state.checkpoint.parts import is_dtensor

#: Types of values that JSON lacks: the name in the JSON, and the function that encodes a value.
_LEAVES: dict[type, tuple[str, Callable[[Any], Any]]] = {
    bytes: ("bytes", lambda value: base64.b64encode(value).decode()),
    complex: ("complex", lambda value: [value.real, value.imag]),
    torch.dtype: ("dtype", lambda value: str(value).removeprefix("torch.")),
    torch.device: ("device", str),
}
#: Types of containers that JSON lacks, and their names in the JSON.
_LISTS: dict[type, str] = {tuple: "tuple", deque: "deque", torch.Size: "size"}
_SETS: dict[type, str] = {set: "set", frozenset: "frozenset"}
_MAPPINGS: dict[type, str] = {
    dict: "dict",
    OrderedDict: "ordered",
    Counter: "counter",
    defaultdict: "dict",
}
#: Allowed factories of a `defaultdict`. Any other factory is code, which a state must not contain.
_FACTORIES: dict[str, Callable[[], Any] | None] = {
    "None": None,
    **{
        kind.__name__: kind
        for kind in (bool, int, float, complex, str, bytes, list, *_LISTS, *_SETS, *_MAPPINGS)
    },
}
_MAKERS: dict[str, Callable[[Any], Any]] = {
    **{name: kind for kind, name in (_LISTS | _SETS).items()},
    "bounded": lambda parts: deque(parts[1], maxlen=parts[0]),
    "dict": dict,
    "ordered": OrderedDict,
    "module": lambda parts: _with_metadata(*parts),
    "counter": lambda pairs: Counter(dict(pairs)),
    "default": lambda parts: defaultdict(_FACTORIES[parts[0]], parts[1]),
    "bytes": base64.b64decode,
    "complex": lambda parts: complex(*parts),
    "number": lambda parts: np.frombuffer(base64.b64decode(parts[1]), np.dtype(parts[0]))[0],
    "scalar": lambda parts: np.dtype(parts[0]).type(parts[1]),  # in checkpoints of version 0.1
    "dtype": lambda name: getattr(torch, name),
    "device": torch.device,
}
#: Bits of the largest integer that is encoded: Python converts at most 4300 digits to text.
_BITS = 14_000


def flatten(state: Mapping[str, Any]) -> tuple[str, dict[str, torch.Tensor]]:
    """Return `state` as JSON text, and its tensors by name; the tensors share memory with those in `state`.

    Raises:
        CheckpointError: if `state` contains a value that is neither container, number, text nor tensor.
    """
    tensors: dict[str, torch.Tensor] = {}
    tree = {name: encode(value, name, tensors) for name, value in state.items()}
    return json.dumps(tree), tensors


def rebuild(text: str, tensor: Callable[[str], Any]) -> dict[str, Any]:
    """Return the state in `text`, a result of `flatten`; `tensor` is a function from name to tensor."""
    return {name: decode(value, tensor) for name, value in json.loads(text).items()}


def encode(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Return `value` as JSON, and add its tensors to `tensors`, under names that begin with `path`.

    Raises:
        CheckpointError: for a value that is neither container, number, text nor tensor.
    """
    return _Encoder(tensors).encode(value, path)


class _Encoder:
    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def encode(self, value: Any, path: str) -> Any:
        kind = type(value)
        if isinstance(value, torch.Tensor):
            return self._encode_tensor(value, path)
        if kind in _MAPPINGS:
            return self._encode_mapping(value, path)
        if kind is list or kind in _LISTS:
            items = [self.encode(item, f"{path}.{i}") for i, item in enumerate(value)]
            if kind is deque and value.maxlen is not None:
                return {"bounded": [value.maxlen, items]}
            return items if kind is list else {_LISTS[kind]: items}
        if kind in _SETS:
            return {_SETS[kind]: [self.encode(item, path) for item in sorted(value, key=repr)]}
        return self._encode_leaf(value, path)

    def _encode_tensor(self, value: torch.Tensor, path: str) -> Any:
        if value.layout is not torch.strided or value.is_quantized or value.is_nested:
            kind = "nested" if value.is_nested else "sparse or quantized"
            raise CheckpointError(
                f"the state {path} is a {kind} tensor; expected a dense one",
                hint="keep it as dense tensors: its indices and its values",
            )
        options: dict[str, Any] = {}
        if value.requires_grad:
            options["requires_grad"] = True
        if type(value) is nn.Parameter:
            options["parameter"] = True
        kept = value.detach()
        if not is_dtensor(value) and not value.is_contiguous():
            # Sums over a tensor follow the order of its elements in memory. Gaps of a view are not kept.
            options["stride"] = torch.empty_like(kept, device="meta").stride()
        name = self._keep(kept, path)
        return {"tensor": [name, options] if options else name}

    def _encode_mapping(self, value: Mapping[Any, Any], path: str) -> Any:
        pairs = [
            [self.encode(key, path), self.encode(item, f"{path}.{key}")]
            for key, item in value.items()
        ]
        encoded = {_MAPPINGS[type(value)]: pairs}
        if isinstance(value, defaultdict):
            factory = value.default_factory
            name = getattr(factory, "__name__", str(factory))
            if name not in _FACTORIES or _FACTORIES[name] is not factory:
                raise _refused(path, f"a defaultdict that makes values by {name}")
            return {"default": [name, encoded]}
        if hasattr(value, "_metadata"):  # the versions of a module's parts
            return {"module": [encoded, self.encode(value._metadata, path)]}
        return encoded

    def _encode_leaf(self, value: Any, path: str) -> Any:
        kind = type(value)
        if kind is int and value.bit_length() > _BITS:
            raise _refused(path, f"an int of {value.bit_length()} bits")
        if value is None or kind in (bool, int, float, str):
            return value
        if kind is np.ndarray and value.dtype.kind in "biufc":
            name, array = ("fortran", value.T) if value.flags.fnc else ("array", value)
            # A dtype that torch lacks raises here, and is refused below.
            with contextlib.suppress(TypeError, ValueError):
                return {name: self._keep(torch.from_numpy(np.asarray(array, order="C")), path)}
        if isinstance(value, np.number | np.bool_ | np.datetime64) and value.dtype.char not in "gG":
            return {"number": [value.dtype.str, base64.b64encode(value.tobytes()).decode()]}
        if kind in _LEAVES:
            name, encode = _LEAVES[kind]
            return {name: encode(value)}
        raise _refused(path, f"a {kind.__name__}")

    def _keep(self, tensor: torch.Tensor, path: str) -> str:
        name, number = path, 1
        while name in self._tensors:  # keys may have dots in them, too
            number += 1
            name = f"{path}#{number}"
        self._tensors[name] = tensor
        return name


def _refused(path: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"the state {path} is {what}; expected tensors, numbers, text, None, or containers of them",
        hint="let its state_dict() return what those say, and load_state_dict() make it again",
    )


def decode(value: Any, tensor: Callable[[str], Any]) -> Any:
    """Return the object in `value`, a result of `encode`; `tensor` is a function from name to tensor."""
    if isinstance(value, list):
        return [decode(item, tensor) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor" and isinstance(content, str):
        return tensor(content)
    if kind == "tensor":
        return _with_options(tensor(content[0]), content[1])
    if kind in ("array", "fortran"):
        array = tensor(content).cpu().numpy().copy()
        return array.T if kind == "fortran" else array
    if isinstance(content, list):
        content = [decode(item, tensor) for item in content]
    if kind in _MAPPINGS.values():
        content = [(key, item) for key, item in content]
    return _MAKERS[kind](content)


def _with_options(tensor: Any, options: Mapping[str, Any]) -> Any:
    """Return `tensor` with the strides, `requires_grad` and `Parameter` class that `options` records."""
    if not isinstance(tensor, torch.Tensor):
        return tensor
    if "stride" in options:
        strided = torch.empty_strided(
            tensor.shape, options["stride"], dtype=tensor.dtype, device=tensor.device
        )
        tensor = strided.copy_(tensor)
    needs_grad = options.get("requires_grad", False)
    if "parameter" in options:
        return nn.Parameter(tensor, requires_grad=needs_grad)
    return tensor.requires_grad_(needs_grad)


def _with_metadata(
    state: OrderedDict[str, Any], metadata: OrderedDict[str, Any]
) -> OrderedDict[str, Any]:
    state._metadata = metadata  # type: ignore[attr-defined]
    return state
