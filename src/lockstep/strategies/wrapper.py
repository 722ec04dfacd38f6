"""Wrapper of `nn.DataParallel` with the attributes of its module."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel

#: What Python looks up on the class rather than on the object, where a module may define it.
_SPECIAL = ("__len__", "__getitem__", "__setitem__", "__delitem__", "__iter__", "__contains__")


class Scattered(DataParallel[nn.Module]):
    """DataParallel under the names of the module inside.

    Attributes, parameter names and `state_dict` are the module's own, so that a script reads the
    same on every layout and no checkpoint has keys that begin with `module.`. Made by `wrap`.
    """

    _is_complete = False

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if self._is_complete and name not in self.__dict__ and not hasattr(type(self), name):
            setattr(self.module, name, value)
        else:
            super().__setattr__(name, value)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's own state."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load a state into the module."""
        return self.module.load_state_dict(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the module's parameters under the module's own names."""
        yield from self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the module's buffers under the module's own names."""
        yield from self.module.named_buffers(*args, **kwargs)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """Yield the module's parts under the module's own names."""
        yield from self.module.named_modules(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """Return a copy of the module: what an average of weights, say, is made from."""
        copied: nn.Module = copy.deepcopy(self.module, memo)
        return copied


def wrap(module: nn.Module, settings: dict[str, Any]) -> Scattered:
    """Return `module` inside a `Scattered` that also has the special methods of its class."""
    names = [name for name in _SPECIAL if hasattr(type(module), name)]
    kind = type("Scattered", (Scattered,), {name: _forward(name) for name in names})
    wrapped: Scattered = kind(module, **settings)
    wrapped._is_complete = True
    return wrapped


def _forward(name: str) -> Callable[..., Any]:
    def method(self: Scattered, *args: Any) -> Any:
        return getattr(self.module, name)(*args)

    return method
