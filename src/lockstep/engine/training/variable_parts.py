"""Parts of the script's objects: attributes, and variables of functions, found without running any code."""

from __future__ import annotations

import argparse
import contextlib
import inspect
import sys
import types
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.utils.data import Dataset, Sampler

from lockstep.engine.data.loader import Loader
from lockstep.state.record import stacks

#: Attributes that each module has.
_OF_MODULES = frozenset(vars(nn.Module()))
#: Classes of data.
_DATA = (Dataset, Sampler)


def parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield name and value of an object's parts; of a library's object, only parts that affect training."""
    kind = type(value)
    if is_data(kind):
        # Containers that grow are a cache, but for numbers.
        yield from (one for one in attributes(value) if not _may_grow(one[1]))
    elif is_of_script(kind) or kind in (argparse.Namespace, types.SimpleNamespace):
        yield from attributes(value)
    elif issubclass(kind, nn.Module):
        own = (one for one in attributes(value) if one[0] != "training")
        yield from (one for one in own if type(one[1]) in (int, float, str))
    elif (kind is type and is_of_script(value)) or _is_users_module(value):
        yield from _variables(vars(value))
    elif kind is types.FunctionType:
        yield from list(value.__dict__.items())
        yield from list((value.__kwdefaults__ or {}).items())
    elif kind is types.MethodType:
        yield "__self__", value.__self__
    elif kind is Loader:
        yield from (("dataset", value.dataset), ("sampler", value.sampler))


def _is_users_module(value: Any) -> bool:
    file = getattr(value, "__file__", None) if type(value) is types.ModuleType else None
    return file is not None and stacks.is_users(file)


def is_data(kind: type) -> bool:
    """Whether `kind` is a class of datasets or samplers.

    Such a class is torch's or derived from it, or a class of the script with `__getitem__`.
    """
    return issubclass(kind, _DATA) or (is_of_script(kind) and hasattr(kind, "__getitem__"))


def _may_grow(value: Any) -> bool:
    """Whether a dataset's attribute may be a cache: `None`, or a container other than a list of numbers."""
    is_list = type(value) is list and bool(value) and type(value[0]) in (int, float)
    return value is None or (issubclass(type(value), (list, dict, set, deque)) and not is_list)


def name_of(value: Any) -> str:
    """Return `<NAME>`, with the name of the class or function `value`, or of its class."""
    kind: Any = type(value)
    own = value if kind in (type, types.FunctionType, types.BuiltinFunctionType) else kind
    return f"<{own.__qualname__}>"


def _variables(own: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield name and value of the variables in `own`, the namespace of a module or a class.

    Functions, classes, modules and names that begin with `__` are left out.
    """
    code = (types.ModuleType, type, types.FunctionType, property, staticmethod, classmethod)
    yield from (
        one
        for one in list(own.items())
        if not (one[0].startswith("__") or isinstance(one[1], code))
    )


def functions(value: Any) -> list[types.FunctionType]:
    """Return `value` if it is a function, else the methods of its class.

    Functions that are not defined in the user's files are left out.
    """
    kind = value if type(value) is type else type(value)
    own = [value] if type(value) is types.FunctionType else []
    if type(value) is not types.FunctionType and is_of_script(kind):
        own = [one for one in list(vars(kind).values()) if type(one) is types.FunctionType]
    return [one for one in own if stacks.is_users(one.__code__.co_filename)]


def attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield name and value of attributes in an object's `__dict__` and slots; properties are left out."""
    with contextlib.suppress(AttributeError):
        own = object.__getattribute__(value, "__dict__")
        # Set by integrations, for a class or an object.
        kept = own.get("_kept_by_run") or getattr(type(value), "_kept_by_run", ())
        hidden = {*kept, *(_OF_MODULES if issubclass(type(value), nn.Module) else ())}
        yield from (pair for pair in list(own.items()) if pair[0] not in hidden)
    for kind in type(value).__mro__:
        for name, slot in list(vars(kind).items()):
            if inspect.ismemberdescriptor(slot):
                with contextlib.suppress(AttributeError):
                    yield name, slot.__get__(value)


_of_script: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()


def is_of_script(kind: type) -> bool:
    """Whether a class is defined in the user's script or in another of the user's files."""
    if kind not in _of_script:
        module = sys.modules.get(str(vars(kind).get("__module__")))
        file = getattr(module, "__file__", None)
        is_main = module is not None and module.__name__ == "__main__"
        _of_script[kind] = is_main if file is None else stacks.is_users(file)
    return _of_script[kind]
