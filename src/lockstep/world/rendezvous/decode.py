"""`decode`: make a dataclass instance from JSON values, as the inverse of `dataclasses.asdict`."""

from __future__ import annotations

import dataclasses
import functools
import types
from enum import Enum
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
_hints = functools.cache(get_type_hints)
#: Types whose values are the same in JSON.
_PLAIN = (bool, int, float, str)


def decode(kind: type[T], fields: Any) -> T:
    """Return an instance of the dataclass `kind` from its fields as JSON values.

    Fields may be dataclasses, tuples, enumerations or `None`.

    Raises:
        KeyError: if `fields` has an unknown field.
        TypeError: if a field is missing or has a wrong type.
        ValueError: if a field has an invalid value.
    """
    value: T = _decode(kind, fields)
    return value


def _decode(kind: Any, fields: Any) -> Any:
    if kind in _PLAIN:
        return fields
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return None if fields is None else _decode(arguments[0], fields)
    if origin is tuple:
        if arguments[0] in _PLAIN:  # a launcher's card has the numbers of all its CPUs
            return tuple(fields)
        return tuple(_decode(arguments[0], part) for part in fields)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = _hints(kind)
        return kind(**{name: _decode(hints[name], part) for name, part in dict(fields).items()})
    return kind(fields) if isinstance(kind, type) and issubclass(kind, Enum) else fields
