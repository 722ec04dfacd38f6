"""What a traced forward pass has read of its modules besides their tensors: a trace keeps it as it was.

A number that `forward` reads, such as a temperature, becomes a constant of the trace, and an `if` on it is
decided once. So whatever was read is compared before each pass, and a change is an error.
"""

from __future__ import annotations

import functools
import logging
import random
import threading
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import fx, nn

from lockstep.errors import ModelError
from lockstep.strategies.stage import READS_HINT

#: Attributes that are torch's own, of any module.
_TORCHS = frozenset(dir(nn.Module)) | vars(nn.Module()).keys()
_ABSENT = "nothing"
_DEPTH = 3  # containers in containers that are looked into
_LENGTH = 256  # entries of a container that are looked at one by one
_PLAIN_LENGTH = 4096  # entries that are looked at if all are plain: 2 ms for floats
_PLAIN = (int, float, complex, str, bytes, type(None), np.generic, torch.dtype, torch.device)
_SHOWN = 60  # characters of a value in a message
#: Classes whose objects are no settings: another one is another value, and it does not change.
_WHOLE = (
    nn.Module,
    fx.Proxy,
    type,
    FunctionType,
    BuiltinFunctionType,
    MethodType,
    ModuleType,
    logging.Logger,
)


class Reads:
    """Attributes that a forward pass has read, and what they were when it first did.

    Args:
        module: the model.
    """

    def __init__(self, module: nn.Module) -> None:
        self._model = type(module).__name__
        self._names = {id(part): name for name, part in module.named_modules()}
        self._seen: dict[tuple[int, str], tuple[nn.Module, str, Any]] = {}
        self._shapes: dict[tuple[int, str], tuple[nn.Module, Any]] = {}
        self._cached: set[tuple[int, str]] = set()

    def note(self, part: nn.Module, name: str) -> None:
        """An attribute of a module is about to be read."""
        if name in _TORCHS or name.startswith("__") or (id(part), name) in self._seen:
            return
        if any(name in own for own in (part._parameters, part._buffers, part._modules)):
            return  # the graph has them as they are
        value = _look(part, name)
        if name in vars(part) or not hasattr(type(value), "__get__"):
            self._seen[id(part), name] = part, _shown(value), _frozen(value)

    def note_shape(self, part: nn.Module, name: str) -> None:
        """The shape of a buffer, which the graph has otherwise, is read."""
        self._shapes.setdefault((id(part), name), (part, _shape(part, name)))

    def note_cached(self, part: nn.Module, name: str) -> None:
        """A `cached_property` that was not there has been computed, for the rest of the pass."""
        self._cached.add((id(part), name))
        self.note(part, name)

    def forget_cached(self) -> None:
        """Leave out what the trace has computed for itself: what that has read is compared."""
        for key in self._cached:
            self._seen.pop(key, None)
        self._cached.clear()

    def add(self, other: Reads) -> None:
        """Take what another trace of the model has read."""
        self._seen = {**other._seen, **self._seen}
        self._shapes = {**other._shapes, **self._shapes}

    def forget(self, part: nn.Module, names: Collection[str]) -> None:
        """Leave out attributes that the trace itself has made, and has asked for before that."""
        for name in names:
            self._seen.pop((id(part), name), None)

    def changed(self) -> Iterator[tuple[str, str, str]]:
        """Yield each attribute that has another value now: its name, that value, and the one before."""
        for (_, name), (part, shown, frozen) in self._seen.items():
            value = _look(part, name)
            if _frozen(value) != frozen:
                yield self._called(part, name), _shown(value), shown
        for (_, name), (part, before) in self._shapes.items():
            if (now := _shape(part, name)) != before:
                yield f"the shape of {self._called(part, name)}", str(now), str(before)

    def _called(self, part: nn.Module, name: str) -> str:
        whole = ".".join(filter(None, (self._names.get(id(part), ""), name)))
        kind = type(part).__name__
        return f"{whole} of {kind}" if "." in whole else f"{kind}.{name}"

    def check(self) -> None:
        """Refuse a pass for which `forward` would read something else.

        Raises:
            ModelError: naming module and attribute.
        """
        for name, now, before in self.changed():
            seen = f"{name} is {now}, and was {before}"
            if now == before:
                seen = f"{name}, {now}, is not what it was"
            raise ModelError(
                f"{seen} when {self._model} was cut into stages; expected what its forward reads to "
                "stay, as stages keep it",
                hint=READS_HINT,
            )


@contextmanager
def reading(module: nn.Module) -> Iterator[Reads]:
    """Let the forward pass of `module` run, and yield what it has read.

    Attributes of modules are read by torch's class for all of them: fx looks at parameters this way, too.
    """
    reads, own, noting = Reads(module), threading.get_ident(), False

    def look(part: nn.Module, name: str) -> Any:
        nonlocal noting
        if threading.get_ident() != own or noting:
            return object.__getattribute__(part, name)
        note(reads.note, part, name)
        own_values = object.__getattribute__(part, "__dict__")
        computed = is_cached(type(part), name) and name not in own_values
        value = object.__getattribute__(part, name)
        if computed:
            note(reads.note_cached, part, name)
        return value

    def note(how: Callable[[nn.Module, str], None], part: nn.Module, name: str) -> None:
        nonlocal noting
        noting = True  # what a `__repr__` reads is nothing to the pass
        try:
            how(part, name)
        finally:
            noting = False

    setattr(nn.Module, "__getattribute__", look)  # noqa: B010 - it has none of its own
    try:
        yield reads
    finally:
        delattr(nn.Module, "__getattribute__")


def is_cached(kind: type, name: str) -> bool:
    """Return whether a class has a `functools.cached_property` of this name."""
    found = next((vars(k)[name] for k in kind.__mro__ if name in vars(k)), None)
    return isinstance(found, functools.cached_property)


def _shape(part: nn.Module, name: str) -> Any:
    buffer = part._buffers.get(name)
    return _ABSENT if buffer is None else tuple(buffer.shape)


def _look(part: nn.Module, name: str) -> Any:
    """Return an attribute without running code of the model's: what a property reads is seen itself."""
    for space in (vars(part), *map(vars, type(part).__mro__)):
        if name in space:
            return space[name]
    return _ABSENT


def _shown(value: Any) -> str:
    text = _ABSENT if value is _ABSENT else repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


class _Object:
    """One object, no matter what is in it.

    It is kept alive: another one could have its address later.
    """

    __slots__ = ("_object",)

    def __init__(self, value: Any) -> None:
        self._object = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Object) and self._object is other._object

    def __hash__(self) -> int:
        return id(self._object)


def _frozen(value: Any, depth: int = 0) -> Any:
    """Return what tells a value from another, and from itself after a change."""
    kind = type(value)
    if isinstance(value, float | complex | np.generic):
        # 0.0 and -0.0 compute other things, and nan is no other than itself.
        return kind, repr(value)
    if value is None or isinstance(value, int | str | bytes | torch.dtype | torch.device):
        return kind, value
    if isinstance(value, torch.Tensor):
        return _Object(value), 0 if value.is_inference() else value._version
    if isinstance(value, _WHOLE):
        return _Object(value)
    if isinstance(value, list | tuple | deque | set | frozenset | dict):
        return _frozen_items(value, depth)
    return _Object(value), _frozen_content(value, depth)


def _frozen_items(value: Collection[Any], depth: int) -> Any:
    if depth == _DEPTH or len(value) > _LENGTH:
        return _frozen_many(value)
    items = value.items() if isinstance(value, dict) else value
    found = [_frozen(item, depth + 1) for item in items]
    # A set has no order.
    return type(value), frozenset(found) if isinstance(value, set | frozenset) else tuple(found)


def _frozen_many(value: Collection[Any]) -> Any:
    """Return a checksum of plain entries; of others, or too many, only which container has how many."""
    whole = _Object(value), len(value)
    if len(value) > _PLAIN_LENGTH:
        return whole
    kinds = frozenset(map(type, [*value, *value.values()] if isinstance(value, dict) else value))
    if not all(issubclass(kind, _PLAIN) for kind in kinds):
        return whole
    text = repr(sorted(map(repr, value)) if isinstance(value, set | frozenset) else value)
    return type(value), kinds, zlib.crc32(text.encode(errors="backslashreplace"))


def _frozen_content(value: Any, depth: int) -> Any:
    """Return what an object of another class has: settings, such as a dataclass, or a generator."""
    if isinstance(value, np.ndarray):
        return zlib.crc32(value.tobytes())
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if depth == _DEPTH:
        return None
    slots = [name for k in type(value).__mro__ for name in getattr(k, "__slots__", ())]
    own = {name: getattr(value, name, None) for name in slots if not name.startswith("__")}
    kept = getattr(value, "__dict__", {})
    own |= {name: kept[name] for name in kept if not is_cached(type(value), name)}
    return _frozen_items(own, depth) if len(own) <= _LENGTH else len(own)
