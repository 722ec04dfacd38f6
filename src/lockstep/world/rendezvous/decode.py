"""What members tell each other: dataclasses that `asdict` and JSON have made plain, made whole again."""

from __future__ import annotations

import dataclasses
import functools
import types
from enum import Enum
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
_hints = functools.cache(get_type_hints)


def decode(kind: type[T], told: Any) -> T:
    """Return the dataclass that was told; in it may be others, tuples of them, enumerations and `None`.

    Raises:
        KeyError: if it has a field that `kind` has not.
        TypeError: if it is none.
        ValueError: if it is none.
    """
    value: T = _decode(kind, told)
    return value


def _decode(kind: Any, told: Any) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return None if told is None else _decode(arguments[0], told)
    if origin is tuple:
        return tuple(_decode(arguments[0], one) for one in told)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = _hints(kind)
        return kind(**{name: _decode(hints[name], one) for name, one in dict(told).items()})
    return kind(told) if isinstance(kind, type) and issubclass(kind, Enum) else told
