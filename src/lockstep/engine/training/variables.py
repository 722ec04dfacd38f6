"""Fingerprints of the script's variables: short texts of the values that its loops carry.

A walk goes from the variables of the script's frames to their parts, nearest first: attributes of objects,
variables of closures, globals that functions read, variables of the user's modules. It runs no code of the
script: types tell values apart, and containers are read by the methods of Python's own classes. An object
of any other class has the name of its class as its fingerprint. The cost is bounded: of long containers
and large tensors only some elements are read, and an observation reads a limited number of values.
"""

from __future__ import annotations

import contextlib
import enum
import inspect
import io
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
from lockstep.engine.training.observations import Observation, Value, VariableId
from lockstep.engine.training.variable_parts import (
    attributes,
    functions,
    is_data,
    is_of_script,
    name_of,
    parts,
)
from lockstep.state.record import stacks

#: Length of a fingerprint; a longer one ends with a checksum.
_LENGTH = 60
#: Bytes up to which a tensor or an array is read whole; of a larger one, the number of elements read.
_WHOLE, _SAMPLED = 1 << 16, 512
#: Characters of a text, and elements of a container, that are read at either end.
_TEXT_ENDS, _ENDS = 2048, 32
#: Depth to which attributes of objects, and containers in containers, are read.
_ATTRIBUTES, _DEPTH = 4, 4
#: Values that an observation reads; bytes of a tensor that count as one value.
BUDGET, _BYTES = 2000, 2048

_NUMBERS = (int, float, complex)
_PLAIN, _MISSING = (*_NUMBERS, np.generic), object()
#: Containers, their brackets, and iterators from either end that run no code of the script.
_CONTAINERS: tuple[tuple[Any, str, Callable[[Any], Any], Callable[[Any], Any]], ...] = (
    (list, "[]", list.__iter__, list.__reversed__),
    (tuple, "()", tuple.__iter__, lambda own: reversed(tuple.__getitem__(own, slice(None)))),
    (deque, "[]", deque.__iter__, deque.__reversed__),
    (set, "{}", set.__iter__, set.__iter__),
    (frozenset, "{}", frozenset.__iter__, frozenset.__iter__),
    (dict, "{}", lambda own: iter(dict.items(own)), lambda own: reversed(dict.items(own))),
)
#: Generators of random numbers, and the state of each.
_RANDOM: dict[type, Callable[[Any], Any]] = {
    torch.Generator: lambda own: own.get_state().numpy().tobytes(),
    np.random.Generator: lambda own: own.bit_generator.state,
    np.random.RandomState: lambda own: own.get_state(legacy=False),
    random.Random: random.Random.getstate,
}
#: Versions of iterators: a new number at each observation, since reading an iterator would change it.
_versions = itertools.count(1)
#: A time before the script began, by the monotonic clock.
_BEGUN = time.monotonic() - 30.0


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
    """Return fingerprints of the variables that loops of the script carry, from `frame` outwards.

    Args:
        frame: innermost frame; frames of Lockstep and of libraries are left out.
        skip: ids of objects without a fingerprint: models, optimizers and other state of the run.
        number: returns a number that distinguishes frames of one function.
        look: returns the variables that a frame reads later; those that do not matter are left out.
        innermost: whether to read only the innermost frame of the script.
        budget: number of values that are read at most.
        others: further objects to read, by name.
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
            walk.add(VariableId(*where, one.name), value, use.line, goes_on=use.is_item)
    for name, value in sorted((others or {}).items()):
        walk.add(VariableId(0, "", "", name), value, 0)
    walk.goes_on()
    return Observation(walk.values)


def _with_returns(frame: FrameType | None, *, innermost: bool) -> Iterator[tuple[FrameType, bool]]:
    """Return the script's frames from `frame` outwards, and for each whether its return value is used.

    A value that is only printed counts as not used. With `innermost` only the first frame is returned.
    """
    frames: list[FrameType] = []
    for one in itertools.islice(script_frames(frame), 1 if innermost else None):
        frames.append(one)
        if liveness.is_module(one):
            break
    found: list[tuple[FrameType, bool]] = []
    outer, returns = None, True
    for one in reversed(frames):
        is_called = outer is not None and one.f_back is outer
        returns = not is_called or outer is None or liveness.result_matters(outer, returns=returns)
        found.append((one, returns))
        outer = one
    return reversed(found)


def of_object(name: str, value: Any, skip: Collection[int]) -> dict[VariableId, Value]:
    """Return fingerprints (short texts of the values) of the attributes of the object `value`.

    `name`: name of the object in the result. `skip`: ids of objects that get no fingerprint.
    """
    walk = _Walk(skip, BUDGET)
    walk.looks_into(VariableId(0, "", "", name), value, 0, 1)
    walk.goes_on()
    return walk.values


def script_frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Return the frames that run code in the user's files, from `frame` outwards."""
    while frame is not None:
        if stacks.is_users(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def _locals(frame: FrameType, names: list[str]) -> dict[str, Any]:
    """Return the local variables `names` of a frame, by name.

    The copy of all variables that Python keeps in the frame is emptied, since it would keep tensors alive.
    """
    if not names:
        return {}
    own = frame.f_locals
    found = {name: own[name] for name in names if name in own}
    is_copy = sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED
    # The frame keeps this dictionary, with large tensors, until it ends; the script may use it, too.
    if is_copy and sys.getrefcount(own) <= 3:
        own.clear()
    return found


class _Walk:
    """Takes fingerprints of the script's variables, then of attributes of the objects in them.

    It ends when `budget` values have been read.
    """

    def __init__(self, skip: Collection[int], budget: int) -> None:
        self._skip, self._left = skip, budget
        self._seen: set[int] = set()
        self._open: deque[tuple[VariableId, Any, int, int]] = deque()
        self._version = 0
        self._readers: tuple[tuple[Any, Callable[[Any], str | None]], ...] = (
            (torch.Tensor, self._tensor),
            (np.ndarray, self._array),
            (np.generic, lambda value: _plain(value.item())),
            (nn.Module, self._module),
            (enum.Enum, lambda value: f"{type(value).__name__}.{value._name_}"),
            (itertools.count, repr),
            (tuple(_RANDOM), _random),
        )
        self.values: dict[VariableId, Value] = {}

    def add(
        self,
        place: VariableId,
        value: Any,
        line: int,
        depth: int = _ATTRIBUTES,
        kind: str = "",
        *,
        goes_on: bool = False,
    ) -> None:
        """Record the fingerprint of the variable `place`, whose value is `value`.

        If the value has no fingerprint, record the name of its class, and queue it so that its attributes
        are recorded later. `line`: line of the script that assigns or reads the variable. `depth`: levels
        of attributes that may still be read. `kind`: as in `Value`; by default it follows from the value.
        With `goes_on` the variable counts as changed in each observation, whatever its fingerprint is.
        """
        is_known = place in self.values or id(value) in self._skip
        if is_known or self._left < 0 or "cache" in place.name:
            return
        self._version = next(_versions) if goes_on else 0
        text = self._safe_text(value)
        if self._left < 0:
            return
        if text is not None:
            self.values[place] = Value(_cut(text), line, self._version, kind or _kind(value))
            return
        version = next(_versions) if _is_iterator(value) else 0
        self.values[place] = Value(_cut(name_of(value)), line, version, "object")
        if depth and id(value) not in self._seen:
            self._seen.add(id(value))
            self._open.append((place, value, line, depth))

    def goes_on(self) -> None:
        """Take fingerprints of the parts of all queued objects, until `budget` values have been read."""
        while self._open and self._left >= 0:
            self.looks_into(*self._open.popleft())

    def looks_into(self, place: VariableId, value: Any, line: int, depth: int) -> None:
        """Record fingerprints of what `value` contains, such as elements, attributes and functions.

        Of a function, the variables outside of it that it reads are recorded: closures and globals.

        `place`: the variable that holds `value`. `line`: line of the script that assigns or reads it.
        `depth`: levels of parts that may still be read.
        """
        for function in functions(value):
            code, file = function.__code__, function.__code__.co_filename
            first = code.co_firstlineno
            cells = zip(code.co_freevars, function.__closure__ or (), strict=False)
            for name, cell in cells if function is value else ():
                with contextlib.suppress(ValueError):  # not assigned yet
                    where = VariableId(place.frame, file, code.co_name, name)
                    self.add(where, cell.cell_contents, first, depth - 1)
            for name in sorted(liveness.globals_of(code) & function.__globals__.keys()):
                where = VariableId(0, file, "<module>", name)
                self.add(where, function.__globals__[name], first, depth - 1)
        for name, one in parts(value):
            kind = "data" if is_data(type(value)) and type(one) in _NUMBERS else ""
            self.add(place._replace(name=f"{place.name}.{name}"), one, line, depth - 1, kind)

    def _safe_text(self, value: Any, depth: int = _DEPTH) -> str | None:
        with contextlib.suppress(Exception):  # from a class of the script's that overrides methods
            return self.text(value, depth)
        return None

    def text(self, value: Any, depth: int = _DEPTH) -> str | None:
        """Return a value's fingerprint, of any length; `None` if only its class is known.

        `depth`: levels of nested containers that may still be read.
        """
        self._left -= 1
        if self._left < 0 or depth < 0 or id(value) in self._skip:
            return None
        if value is None or issubclass(type(value), (*_NUMBERS, str, bytes)):
            return None if type(value) is float and _is_time(value) else _plain(value)
        read = next((read for kind, read in self._readers if issubclass(type(value), kind)), None)
        return self._elements(value, depth - 1) if read is None else read(value)

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
            plain = plain.view(-1)[:: plain.numel() // _SAMPLED]
        self._left -= min(size, _WHOLE) // _BYTES
        flat = plain.cpu().contiguous().view(-1).view(torch.uint8)
        return f"{shape} {zlib.crc32(flat.numpy().data):08x}"

    def _array(self, value: np.ndarray[Any, Any]) -> str | None:
        if type(value) is not np.ndarray or value.dtype.hasobject:
            return None
        shape, some = f"array{value.shape}", value
        if value.nbytes > _WHOLE:
            some = value.reshape(-1)[:: value.size // _SAMPLED]
        self._left -= some.nbytes // _BYTES
        return f"{shape} {zlib.crc32(some.tobytes()):08x}"

    def _module(self, value: nn.Module) -> str | None:
        """Return a fingerprint of a module's parameters and buffers; `None` if all belong to the run."""
        own = (*nn.Module.parameters(value), *nn.Module.buffers(value))
        tensors = [one for one in own if id(one) not in self._skip]
        checksum = zlib.crc32(" ".join(str(self.text(one)) for one in tensors).encode())
        return f"{type(value).__name__} {checksum:08x}" if tensors else None

    def _elements(self, value: Any, depth: int) -> str | None:
        for kind, brackets, forwards, backwards in _CONTAINERS:
            if not issubclass(type(value), kind):
                continue
            length = kind.__len__(value)
            ends = [*itertools.islice(forwards(value), _ENDS)]
            ends += itertools.islice(backwards(value), max(0, min(_ENDS, length - _ENDS)))
            if kind in (set, frozenset):  # without an order
                ends = [*forwards(value)] if length <= 2 * _ENDS else []
            texts = [self._element(one, depth) for one in ends]
            texts = sorted(texts) if kind in (set, frozenset) else texts
            count = "" if length == len(texts) else f"{length}: "
            return f"{brackets[0]}{count}{', '.join(texts)}{brackets[1]}"
        return None

    def _element(self, value: Any, depth: int) -> str:
        """Return the fingerprint of `value`, an element of a container; `?` if it has none.

        For an object whose class the script defines, the fingerprint lists the attributes. `depth`: levels
        of containers and attributes that may still be read.
        """
        text = self._safe_text(value, depth)
        if text is None and depth > 0 and is_of_script(type(value)):
            own = [f"{name}={self._element(one, depth - 1)}" for name, one in attributes(value)]
            text = f"{type(value).__name__}({', '.join(own)})"
        return "?" if text is None else _cut(text)


def _plain(value: Any) -> str:
    """Return the text of a number or string, of long strings only both ends and the length.

    No `__repr__` of a subclass in the script is run.
    """
    if type(value) is bool or value is None:
        return repr(value)
    kind: Any = next(kind for kind in (*_NUMBERS, str, bytes) if issubclass(type(value), kind))
    if kind in (str, bytes) and kind.__len__(value) > 2 * _TEXT_ENDS:
        first, last = slice(None, _TEXT_ENDS), slice(-_TEXT_ENDS, None)
        ends = kind.__getitem__(value, first) + kind.__getitem__(value, last)
        return f"{kind.__len__(value)}: {ends!r}"
    return str(kind.__repr__(value))


def _random(generator: Any) -> str:
    state = repr(_RANDOM[type(generator)](generator)).encode()
    return f"{type(generator).__name__} {zlib.crc32(state):08x}"


def _is_iterator(value: Any) -> bool:
    """Whether a second iteration over `value` may give other items.

    This holds for iterators and open files, but not for generators, and files that cannot be read.
    """
    if issubclass(type(value), io.IOBase) and (value.closed or not value.readable()):
        return False
    return hasattr(type(value), "__next__") and type(value) is not types.GeneratorType


def _is_time(value: float) -> bool:
    """Return whether a number may be a time that a clock has shown since this process began.

    The clocks are `time.time` and `time.monotonic`.
    """
    age = time.monotonic() - _BEGUN
    return any(now() - age <= value <= now() for now in (time.time, time.monotonic))


def _cut(text: str) -> str:
    if len(text) <= _LENGTH:
        return text
    return f"{text[: _LENGTH - 10]}… {zlib.crc32(text.encode(errors='replace')):08x}"


def _kind(value: Any) -> str:
    kinds: dict[Any, str] = {
        nn.Module: "module",
        itertools.count: "count",
        tuple(_RANDOM): "random",
    }
    return next((kind for own, kind in kinds.items() if issubclass(type(value), own)), "value")
