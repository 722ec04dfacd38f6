"""What the objects of a script are made of: attributes, variables of closures and of generators.

No code of the script runs for it.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import inspect
import sys
import types
import weakref
from collections.abc import Iterator
from typing import Any

from torch import nn

from lockstep.state.record import stacks

#: Attributes that each module has.
_OF_MODULES = frozenset(vars(nn.Module()))

Part = tuple[str, Any]


def parts(value: Any) -> Iterator[Part]:
    """Yield the parts of an object by name; none of an object whose class is a library's.

    Args:
        value: an object of a class of the script, a class or a function of the script, a method, a
            `functools.partial`, a generator, a namespace, or a module of torch.
    """
    kind = type(value)
    if is_of_script(kind) or kind in (argparse.Namespace, types.SimpleNamespace):
        yield from attributes(value)
    elif kind is type and is_of_script(value):
        own = list(vars(value).items())
        yield from (one for one in own if not (one[0].startswith("__") or callable(one[1])))
    elif kind is types.FunctionType:
        yield from _of_function(value)
    elif kind is types.MethodType:
        yield "__self__", value.__self__
    elif kind is functools.partial:
        yield from ((f"args[{number}]", one) for number, one in enumerate(value.args))
        yield from list(value.keywords.items())
    elif kind is types.GeneratorType:
        frame = value.gi_frame
        if frame is not None and stacks.is_users(value.gi_code.co_filename):
            # Numbers and text: what it yields, such as batches, is no state.
            own = list(frame.f_locals.items())
            yield from (one for one in own if isinstance(one[1], int | float | str))
    elif issubclass(kind, nn.Module):
        yield from (one for one in attributes(value) if one[0] != "training")


def _of_function(function: types.FunctionType) -> Iterator[Part]:
    if not stacks.is_users(function.__code__.co_filename):
        return
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        with contextlib.suppress(ValueError):  # not assigned yet
            yield name, cell.cell_contents
    yield from list(function.__dict__.items())
    for number, one in enumerate(function.__defaults__ or ()):
        yield f"__defaults__[{number}]", one


def attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """Return the attributes that an object itself holds, without its properties."""
    with contextlib.suppress(AttributeError):
        own = object.__getattribute__(value, "__dict__")
        hidden = _OF_MODULES if issubclass(type(value), nn.Module) else ()
        yield from (pair for pair in list(own.items()) if pair[0] not in hidden)
    for kind in type(value).__mro__:
        for name, slot in list(vars(kind).items()):
            if inspect.ismemberdescriptor(slot):
                with contextlib.suppress(AttributeError):
                    yield name, slot.__get__(value)


_of_script: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()


def is_of_script(kind: type) -> bool:
    """Whether a class is defined by the script, or by a module of the user's."""
    if kind not in _of_script:
        module = sys.modules.get(str(vars(kind).get("__module__")))
        file = getattr(module, "__file__", None)
        is_main = module is not None and module.__name__ == "__main__"
        _of_script[kind] = is_main if file is None else stacks.is_users(file)
    return _of_script[kind]
