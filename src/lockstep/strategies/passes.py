"""Hooks on forward passes of a module, and its trainable parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from torch import nn

T = TypeVar("T")


class _Hook:
    """Says that a module is called, but not that a copy of it is, or what was loaded from a file."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act

    def __call__(self, *_called: object) -> None:
        self._act()

    def __deepcopy__(self, _memo: object) -> Callable[..., None]:
        return _nothing

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _of_copies, ()


def _of_copies() -> Callable[..., None]:
    return _nothing


def _nothing(*_: object) -> None:
    """The hook of a copy."""


def watch_forward(
    module: nn.Module,
    before: Callable[[], None],
    after: Callable[[], None] | None = None,
    *,
    always: bool = False,
) -> Callable[[], None]:
    """Call `before` and `after` around each forward pass of `module`; return what ends that.

    Args:
        module: the module.
        before: called first.
        after: called last, after a pass that raises only with `always`.
        always: see `after`.
    """
    handles = [module.register_forward_pre_hook(_Hook(before))]
    if after is not None:
        handles.append(module.register_forward_hook(_Hook(after), always_call=always))

    def end() -> None:
        for handle in handles:
            handle.remove()

    return end


class Parameters:
    """The parameters of a model, also of parts that come later.

    Args:
        module: the model.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._find_parts()

    def _find_parts(self) -> None:
        # Kept, since walking through a model takes longer than a small one's forward pass.
        parts = list(self._module.modules())
        self._inside = [part._modules for part in parts]
        self._owners = [part._parameters for part in parts]
        self._children = _values(self._inside)

    def trainable(self) -> set[int]:
        """Return the ids of those that are to be trained, also in parts that have come since."""
        if _values(self._inside) != self._children:
            self._find_parts()
        return {id(p) for p in _values(self._owners) if p is not None and p.requires_grad}


def _values(owners: Iterable[Mapping[str, T]]) -> list[T]:
    return [value for own in owners for value in own.values()]
