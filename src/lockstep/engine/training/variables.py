"""Fingerprints of what a script's variables hold: short texts of the values that its loop carries.

No code of the script runs for them: values are told apart by their types, and containers are read by
the methods of Python's own. What is not known has no fingerprint. The cost is bounded: long containers and
large tensors count by some of their elements, and all of an observation shares one budget.
"""

from __future__ import annotations

import contextlib
import enum
import inspect
import itertools
import random
import sys
import time
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from lockstep.engine.training import liveness
from lockstep.engine.training.variable_parts import attributes, is_of_script, parts
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
#: Containers, and how their elements are had from either end without code of the script.
_CONTAINERS: tuple[
    tuple[Any, str, Callable[[Any], Iterator[Any]], Callable[[Any], Iterator[Any]]], ...
] = (
    (list, "[]", list.__iter__, list.__reversed__),
    (tuple, "()", tuple.__iter__, lambda own: reversed(tuple.__getitem__(own, slice(None)))),
    (deque, "[]", deque.__iter__, deque.__reversed__),
    (dict, "{}", lambda own: iter(dict.items(own)), lambda own: reversed(dict.items(own))),
)
_RANDOM = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
#: When this module was loaded, and how many seconds before a script may have begun.
_LOADED, _BEFORE = time.monotonic(), 30.0


class Place(NamedTuple):
    """Where a variable is.

    Attributes:
        frame: tells frames of one function from each other; 0 for variables of a module.
        file: of the code.
        function: the name of it.
        name: of the variable, with attributes after dots.
    """

    frame: int
    file: str
    function: str
    name: str

    @property
    def key(self) -> str:
        """The same in another process."""
        return f"{self.file.rpartition('/')[2]}:{self.function}:{self.name}"


@dataclass(frozen=True, slots=True)
class Value:
    """What a variable holds.

    Attributes:
        text: fingerprint of the value.
        line: where the loop writes it, or reads it.
        version: what changes with the value in this process, where the text may not.
        kind: `module`, `random` for a generator of random numbers, `value` for all else; a user of this
            class may have others.
    """

    text: str
    line: int
    version: int = 0
    kind: str = "value"


@dataclass(frozen=True, slots=True)
class Change:
    """A variable that has another value than before; `key` is the same in another process."""

    name: str
    file: str
    line: int
    before: str
    after: str
    kind: str = "value"
    key: str = ""

    @property
    def is_count(self) -> bool:
        """Whether the value is one more than it was."""
        return self.before.isdecimal() and self.after == str(int(self.before) + 1)

    @property
    def shown(self) -> str:
        """The variable, and its line where it has one, for messages."""
        place = f" ({Path(self.file).name}:{self.line})" if self.line else ""
        return f"`{self.name}`{place}"


@dataclass(frozen=True, slots=True)
class Observation:
    """What variables hold at one time."""

    values: Mapping[Place, Value] = field(default_factory=dict)

    def changes_since(self, earlier: Observation) -> list[Change]:
        """Return the variables that both have seen, with different values."""
        return [
            Change(place.name, place.file, now.line, before.text, now.text, now.kind, place.key)
            for place, now in self.values.items()
            if (before := earlier.values.get(place)) is not None
            and (before.text, before.version) != (now.text, now.version)
        ]

    def changes_since_saved(self, saved: Mapping[str, str]) -> list[Change]:
        """Return the variables that have other fingerprints than in `saved`, which `texts` has returned."""
        return [
            Change(place.name, place.file, now.line, before, now.text, now.kind, place.key)
            for place, now in self.values.items()
            if (before := saved.get(place.key)) is not None and before != now.text
        ]

    def texts(self, limit: int) -> dict[str, str]:
        """Return fingerprints by name, of together at most `limit` characters."""
        texts: dict[str, str] = {}
        for place, value in self.values.items():
            limit -= len(place.key) + len(value.text) + 8
            if limit < 0:
                break
            texts[place.key] = value.text
        return texts


def observe(
    frame: FrameType | None,
    skip: Collection[int] = frozenset(),
    *,
    number: Callable[[FrameType], int] = id,
    look: Callable[[FrameType], liveness.Lines] = liveness.carried,
    innermost: bool = False,
    budget: int = BUDGET,
) -> Observation:
    """Return what the script's variables hold that its loop carries, from `frame` outwards.

    Args:
        frame: the innermost; those of Lockstep and of libraries are passed over.
        skip: ids of objects that have no fingerprint: those of the run, which are its state.
        number: tells frames of one function from each other.
        look: returns which variables of a frame count.
        innermost: whether the innermost frame of the script is the only one.
        budget: how many values are looked at.
    """
    reader = _Reader(skip, budget)
    for own in itertools.islice(script_frames(frame), 1 if innermost else None):
        lines = look(own)
        local = _locals(own, [one.name for one in lines if not one.is_global])
        file, function = own.f_code.co_filename, own.f_code.co_name
        for one, line in lines.items():
            source = own.f_globals if one.is_global else local
            if one.name in source:
                where = (0, file, "<module>") if one.is_global else (number(own), file, function)
                reader.add(Place(*where, one.name), source[one.name], line)
        if liveness.is_module(own):
            break
    return Observation(reader.values)


def of_attributes(name: str, value: Any, skip: Collection[int]) -> dict[Place, Value]:
    """Return what the attributes of an object of the script hold, under `name`."""
    reader = _Reader(skip, BUDGET)
    for attribute, one in attributes(value):
        reader.add(Place(0, "", "", f"{name}.{attribute}"), one, 0, 1)
    return reader.values


def text_of(value: Any) -> str | None:
    """Return the fingerprint of a value; `None` where it has none."""
    return _Reader((), BUDGET).text_of(value)


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


class _Reader:
    """Takes fingerprints of values.

    Args:
        skip: ids of objects that have none.
        budget: how many values it looks at.

    Attributes:
        values: what it has seen.
    """

    def __init__(self, skip: Collection[int], budget: int) -> None:
        self._skip, self._left = skip, budget
        self._inside: set[int] = set()  # objects that are being looked at
        self._version = 0
        self._readers: tuple[tuple[Any, Callable[[Any], str | None]], ...] = (
            (torch.Tensor, self._tensor),
            (np.ndarray | np.generic, self._array),
            (nn.Module, self._module),
            (enum.Enum, lambda value: f"{type(value).__name__}.{value._name_}"),
        )
        self.values: dict[Place, Value] = {}

    def add(self, place: Place, value: Any, line: int, depth: int = _ATTRIBUTES) -> None:
        """Take the fingerprint of a variable; of an object of the script, those of its parts."""
        if place in self.values or id(value) in self._inside or id(value) in self._skip:
            return
        self._version = 0
        text = self.text_of(value)
        if text is not None and self._left >= 0:
            self.values[place] = Value(text, line, self._version, _kind(value))
        elif text is None and depth:
            self._inside.add(id(value))
            for name, one in parts(value):
                self.add(place._replace(name=f"{place.name}.{name}"), one, line, depth - 1)
            self._inside.discard(id(value))

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
        return _random_state(value) or self._container(value, depth - 1)

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
    return "random" if type(value) in _RANDOM else "value"


def _random_state(value: Any) -> str | None:
    """Return the fingerprint of a generator of random numbers; `None` for anything else."""
    state: Any = None
    if type(value) is torch.Generator:
        state = bytes(value.get_state().numpy().data)
    elif type(value) is np.random.Generator:
        state = value.bit_generator.state
    elif type(value) is np.random.RandomState:
        state = value.get_state(legacy=False)
    elif type(value) is random.Random:
        state = value.getstate()
    if state is None:
        return None
    return f"{type(value).__name__} {zlib.crc32(repr(state).encode()):08x}"


def _tensors_of(module: nn.Module) -> Iterator[torch.Tensor]:
    own = vars(module)
    for kind in ("_parameters", "_buffers"):
        yield from (one for one in own.get(kind, {}).values() if one is not None)
    for part in own.get("_modules", {}).values():
        if part is not None:
            yield from _tensors_of(part)
