"""Fingerprints of what a script's variables hold: short texts of the values that its loop carries.

From the variables of its frames one walk goes on to what these hold, nearest first: attributes of objects,
variables of closures, globals that functions read, modules of the user's. No code of the script runs for
it: values are told apart by their types, and containers are read by the methods of Python's own. What is
not known counts by its class alone. The cost is bounded: long containers and large tensors count by some of
their elements, and all of an observation shares one budget.
"""

from __future__ import annotations

import contextlib
import enum
import inspect
import itertools
import random
import sys
import time
import types
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import nn

from lockstep.engine.training import liveness
from lockstep.engine.training.observations import Observation, Place, Value
from lockstep.engine.training.variable_parts import (
    attributes,
    functions,
    is_data,
    is_of_script,
    name_of,
    parts,
)
from lockstep.state.record import stacks

#: Length of a fingerprint; of longer ones the end is a checksum.
_LENGTH = 60
#: Bytes up to which a tensor or an array counts with all of them; of larger ones so many elements do.
_WHOLE, _SAMPLED = 1 << 16, 512
#: Characters of a text that count, and elements of a container, at either end of it.
_TEXT_ENDS, _ENDS = 2048, 32
#: How deep attributes of objects are looked into, and containers in containers.
_ATTRIBUTES, _DEPTH = 4, 4
#: Values that one observation looks at; so many bytes of a tensor count as one.
BUDGET, _BYTES = 2000, 2048

_NUMBERS = (int, float, complex)
_PLAIN, _MISSING = (*_NUMBERS, np.generic), object()
#: Containers, and how their elements are had from either end without code of the script.
_CONTAINERS: tuple[
    tuple[Any, str, Callable[[Any], Iterator[Any]], Callable[[Any], Iterator[Any]]], ...
] = (
    (list, "[]", list.__iter__, list.__reversed__),
    (tuple, "()", tuple.__iter__, lambda own: reversed(tuple.__getitem__(own, slice(None)))),
    (deque, "[]", deque.__iter__, deque.__reversed__),
    (dict, "{}", lambda own: iter(dict.items(own)), lambda own: reversed(dict.items(own))),
)
#: Generators of random numbers, and the state of each.
_RANDOM: dict[type, Callable[[Any], Any]] = {
    torch.Generator: lambda own: own.get_state().numpy().tobytes(),
    np.random.Generator: lambda own: own.bit_generator.state,
    np.random.RandomState: lambda own: own.get_state(legacy=False),
    random.Random: random.Random.getstate,
}
#: Numbers the looks at iterators.
_looks = itertools.count(1)
#: When this module was loaded, and how many seconds before a script may have begun.
_LOADED, _BEFORE = time.monotonic(), 30.0


def observe(
    frame: FrameType | None,
    skip: Collection[int] = frozenset(),
    *,
    number: Callable[[FrameType], int] = id,
    look: Callable[..., liveness.Uses] = liveness.carried,
    innermost: bool = False,
    budget: int = BUDGET,
    others: Mapping[str, Any] | None = None,
) -> Observation:
    """Return what the script's variables hold that its loop carries, from `frame` outwards.

    Args:
        frame: the innermost; those of Lockstep and of libraries are passed over.
        skip: ids of objects that have no fingerprint: those of the run, which are its state.
        number: tells frames of one function from each other.
        look: returns which variables of a frame count, if they matter.
        innermost: whether the innermost frame of the script is the only one.
        budget: how many values are looked at.
        others: further objects that are looked at, by name.
    """
    walk = _Walk(skip, budget)
    for own, returns in _with_returns(frame, innermost=innermost):
        uses = {one: use for one, use in look(own, returns=returns).items() if use.matters}
        local = _locals(own, [one.name for one in uses if not one.is_global])
        file, function = own.f_code.co_filename, own.f_code.co_name
        for one, use in sorted(uses.items()):
            is_module = one.is_global or liveness.is_module(own)
            source = own.f_globals if is_module else local
            value = source.get(one.name, _MISSING)
            if value is _MISSING or (use.is_item and not issubclass(type(value), _PLAIN)):
                continue
            where = (0, file, "<module>") if is_module else (number(own), file, function)
            # What is counted beside the batches may be the same in the next ones.
            walk.add(Place(*where, one.name), value, use.line, goes_on=use.is_item)
    for name, value in sorted((others or {}).items()):
        walk.add(Place(0, "", "", name), value, 0)
    walk.goes_on()
    return Observation(walk.values)


def _with_returns(frame: FrameType | None, *, innermost: bool) -> Iterator[tuple[FrameType, bool]]:
    """Return the script's frames from `frame` outwards, each with whether it matters what it returns."""
    frames: list[FrameType] = []
    for one in itertools.islice(script_frames(frame), 1 if innermost else None):
        frames.append(one)
        if liveness.is_module(one):
            break
    found, returns, outer = [], True, None
    for one in reversed(frames):
        is_called = outer is not None and one.f_back is outer
        returns = not is_called or outer is None or liveness.result_matters(outer, returns=returns)
        found.append((one, returns))
        outer = one
    return reversed(found)


def of_object(name: str, value: Any, skip: Collection[int], line: int = 0) -> dict[Place, Value]:
    """Return what the attributes of an object hold, under `name`."""
    walk = _Walk(skip, BUDGET)
    walk.looks_into(Place(0, "", "", name), value, line, 1)
    walk.goes_on()
    return walk.values


def text_of(value: Any) -> str | None:
    """Return the fingerprint of a value; `None` where it has none."""
    return _Walk((), BUDGET).text_of(value)


def script_frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Return the frames of the script's own code from `frame` outwards."""
    while frame is not None:
        if stacks.is_users(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def _locals(frame: FrameType, names: list[str]) -> dict[str, Any]:
    """Return local variables of a frame, and leave nothing behind that keeps their values alive."""
    if not names:
        return {}
    own = frame.f_locals
    found = {name: own[name] for name in names if name in own}
    is_copy = sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED
    # The frame keeps this dictionary, and large tensors in it, until it ends; the script may have it, too.
    if is_copy and sys.getrefcount(own) <= 3:
        own.clear()
    return found


class _Walk:
    """Goes from variables to what they hold, nearest first, and takes fingerprints.

    Args:
        skip: ids of objects that have none.
        budget: how many values it looks at.

    Attributes:
        values: what it has seen.
    """

    def __init__(self, skip: Collection[int], budget: int) -> None:
        self._skip, self._left = skip, budget
        self._inside: set[int] = set()  # containers that are being looked at
        self._seen: set[int] = set()
        self._open: deque[tuple[Place, Any, int, int]] = deque()
        self._version = 0
        self._readers: tuple[tuple[Any, Callable[[Any], str | None]], ...] = (
            (torch.Tensor, self._tensor),
            (np.ndarray | np.generic, self._array),
            (nn.Module, self._module),
            (enum.Enum, lambda value: f"{type(value).__name__}.{value._name_}"),
            (itertools.count, repr),
        )
        self.values: dict[Place, Value] = {}

    def add(
        self,
        place: Place,
        value: Any,
        line: int,
        depth: int = _ATTRIBUTES,
        kind: str = "",
        *,
        goes_on: bool = False,
    ) -> None:
        """Take the fingerprint of a variable, or look at its parts later."""
        if (
            place in self.values
            or id(value) in self._skip
            or self._left < 0
            or "cache" in place.name
        ):
            return
        self._version = next(_looks) if goes_on else 0
        text = self.text_of(value)
        if text is None and self._left >= 0:
            self.values[place] = Value(_cut(name_of(value)), line, self._position(value), "object")
            if depth and id(value) not in self._seen:
                self._seen.add(id(value))
                self._open.append((place, value, line, depth))
        elif self._left >= 0:
            self.values[place] = Value(text or "", line, self._version, kind or _kind(value))

    @staticmethod
    def _position(value: Any) -> int:
        """Return another number each time for an iterator, which goes on when it is read."""
        is_iterator = hasattr(type(value), "__next__") and type(value) is not types.GeneratorType
        return next(_looks) if is_iterator else 0

    def goes_on(self) -> None:
        """Look at the parts of what has been added."""
        while self._open and self._left >= 0:
            self.looks_into(*self._open.popleft())

    def looks_into(self, place: Place, value: Any, line: int, depth: int) -> None:
        """Add the parts of a value."""
        for function in functions(value):
            code = function.__code__
            where = place._replace(file=code.co_filename, function=code.co_name)
            cells = zip(code.co_freevars, function.__closure__ or (), strict=False)
            for name, cell in cells if function is value else ():
                with contextlib.suppress(ValueError):  # not assigned yet
                    self.add(
                        where._replace(name=name),
                        cell.cell_contents,
                        code.co_firstlineno,
                        depth - 1,
                    )
            where = Place(0, code.co_filename, "<module>", "")
            for name in sorted(liveness.globals_of(code) & function.__globals__.keys()):
                one = function.__globals__[name]
                self.add(where._replace(name=name), one, code.co_firstlineno, depth - 1)
        for name, one in parts(value):
            kind = "data" if is_data(type(value)) and type(one) in _NUMBERS else ""
            self.add(place._replace(name=f"{place.name}.{name}"), one, line, depth - 1, kind)

    def text_of(self, value: Any) -> str | None:
        """Return the fingerprint of a value, as it is kept."""
        text = self._safe_text(value)
        return None if text is None else _cut(text)

    def _safe_text(self, value: Any, depth: int = _DEPTH) -> str | None:
        with contextlib.suppress(Exception):  # of a class that is not what it is taken for
            return self.text(value, depth)
        return None

    def text(self, value: Any, depth: int = _DEPTH) -> str | None:
        """Return the fingerprint of a value; `None` where it has none."""
        self._left -= 1
        if self._left < 0 or depth < 0 or id(value) in self._skip:
            return None
        if value is None or issubclass(type(value), (*_NUMBERS, str, bytes)):
            return None if type(value) is float and _is_time(value) else _plain(value)
        for kind, read in self._readers:
            if issubclass(type(value), kind):
                return read(value)
        if state := _RANDOM.get(type(value)):
            return f"{type(value).__name__} {zlib.crc32(repr(state(value)).encode()):08x}"
        return self._container(value, depth - 1)

    def _tensor(self, value: torch.Tensor) -> str | None:
        if type(value) not in (torch.Tensor, nn.Parameter) or value.layout is not torch.strided:
            return None
        plain = value.detach()
        if plain.numel() == 1:
            return f"tensor({plain.item()!r})"
        shape, size = f"tensor{tuple(plain.shape)}", plain.nbytes
        if size > _WHOLE:
            with contextlib.suppress(RuntimeError):  # inference tensors have none
                self._version += value._version
            if not plain.is_contiguous():
                return f"{shape} {plain.dtype}"
            plain = plain.view(-1)[:: plain.numel() // _SAMPLED]
        self._left -= min(size, _WHOLE) // _BYTES
        flat = plain.cpu().contiguous().view(-1).view(torch.uint8)
        return f"{shape} {zlib.crc32(flat.numpy().data):08x}"

    def _array(self, value: np.ndarray[Any, Any] | np.generic) -> str | None:
        if issubclass(type(value), np.generic):
            return _plain(value.item())
        if type(value) is not np.ndarray or value.dtype.hasobject:
            return None
        told, some = f"array{value.shape}", value
        if value.nbytes > _WHOLE:
            if not value.flags.c_contiguous:
                return f"{told} {value.dtype}"
            some = value.reshape(-1)[:: value.size // _SAMPLED]
        self._left -= some.nbytes // _BYTES
        return f"{told} {zlib.crc32(some.tobytes()):08x}"

    def _module(self, value: nn.Module) -> str | None:
        """Return the fingerprint of the parameters and buffers of a module that the run does not hold."""
        tensors = [one for one in _tensors_of(value) if id(one) not in self._skip]
        texts = [str(self.text(one)) for one in tensors]
        checksum = zlib.crc32(" ".join(texts).encode())
        return f"{type(value).__name__} {checksum:08x}" if texts else None

    def _container(self, value: Any, depth: int) -> str | None:
        if id(value) in self._inside:
            return "…"
        self._inside.add(id(value))
        try:
            return self._elements(value, depth)
        finally:
            self._inside.discard(id(value))

    def _elements(self, value: Any, depth: int) -> str | None:
        if issubclass(type(value), set | frozenset):
            kind: Any = set if issubclass(type(value), set) else frozenset
            is_short = kind.__len__(value) <= 2 * _ENDS
            texts = [
                self._element(one, depth) for one in (kind.__iter__(value) if is_short else ())
            ]
            return self._listed(sorted(texts), kind.__len__(value), "{}")
        for kind, brackets, forwards, backwards in _CONTAINERS:
            if issubclass(type(value), kind):
                length = kind.__len__(value)
                first = itertools.islice(forwards(value), _ENDS)
                last = itertools.islice(backwards(value), max(0, min(_ENDS, length - _ENDS)))
                ends = (*first, *reversed(tuple(last)))
                return self._listed([self._element(one, depth) for one in ends], length, brackets)
        return None

    def _element(self, value: Any, depth: int) -> str:
        """Return the fingerprint of an element; of an object of the script that of its attributes."""
        text = self._safe_text(value, depth)
        if text is None and depth > 0 and is_of_script(type(value)):
            own = [f"{name}={self._element(one, depth - 1)}" for name, one in attributes(value)]
            text = f"{type(value).__name__}({', '.join(own)})"
        return "?" if text is None else _cut(text)

    def _listed(self, texts: list[str], length: int, brackets: str) -> str:
        told = "" if length == len(texts) else f"{length}: "
        return f"{brackets[0]}{told}{', '.join(texts)}{brackets[1]}"


def _plain(value: Any) -> str:
    """Return what Python's own class writes, where a class of the script is made from it."""
    if type(value) is bool or value is None:
        return repr(value)
    kind: Any = next(kind for kind in (*_NUMBERS, str, bytes) if issubclass(type(value), kind))
    if kind in (str, bytes) and kind.__len__(value) > 2 * _TEXT_ENDS:
        first, last = slice(None, _TEXT_ENDS), slice(-_TEXT_ENDS, None)
        ends = kind.__getitem__(value, first) + kind.__getitem__(value, last)
        return f"{kind.__len__(value)}: {ends!r}"
    return str(kind.__repr__(value))


def _is_time(value: float) -> bool:
    """Whether a number is a reading of a clock in this process, which no restart could bring back."""
    age = time.monotonic() - _LOADED + _BEFORE
    return any(now() - age <= value <= now() for now in (time.time, time.monotonic))


def _cut(text: str) -> str:
    if len(text) <= _LENGTH:
        return text
    return f"{text[: _LENGTH - 10]}… {zlib.crc32(text.encode(errors='replace')):08x}"


def _kind(value: Any) -> str:
    if issubclass(type(value), nn.Module):
        return "module"
    if type(value) is itertools.count:
        return "count"
    return "random" if type(value) in _RANDOM else "value"


def _tensors_of(module: nn.Module) -> Iterator[torch.Tensor]:
    own = vars(module)
    for kind in ("_parameters", "_buffers"):
        yield from (one for one in own.get(kind, {}).values() if one is not None)
    for part in own.get("_modules", {}).values():
        if part is not None:
            yield from _tensors_of(part)
