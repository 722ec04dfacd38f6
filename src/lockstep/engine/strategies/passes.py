"""Hooks on forward passes of a module, and its trainable parameters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TypeVar

from torch import nn

from lockstep.errors import ModelError

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


class TrainableParameters:
    """The trainable parameters of a model, which stay the same ones while it is trained.

    Args:
        module: the model.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._find_parts()
        self._first = {id(p): name for name, p in module.named_parameters() if p.requires_grad}

    def _find_parts(self) -> None:
        # Kept, since walking through a model takes longer than a small one's forward pass.
        parts = list(self._module.modules())
        self._inside = [part._modules for part in parts]
        self._owners = [part._parameters for part in parts]
        self._children = _values(self._inside)

    def check(self) -> None:
        """Refuse others than there were at first.

        Raises:
            ModelError: naming them.
        """
        if _values(self._inside) != self._children:
            self._find_parts()
        # In any order: pruning gives a parameter another name, behind those that were there.
        now = {id(p) for p in _values(self._owners) if p is not None and p.requires_grad}
        if now != self._first.keys():
            raise ModelError(
                f"{type(self._module).__name__} has {len(now)} trainable parameters; it had "
                f"{len(self._first)} when it was given to run.model ({self._changes(now)})",
                hint="freeze, unfreeze and replace before run.model; later, leave parameters out of the "
                "optimizer, until add_param_group, or set their learning rate to 0",
            )

    def _changes(self, now: Collection[int]) -> str:
        """Return which parameters are trainable that were not, or the other way round."""
        own = ((name, id(p)) for name, p in self._module.named_parameters())
        new = [name for name, one in own if one in now and one not in self._first]
        old = [name for one, name in self._first.items() if one not in now]
        changes = {
            "replaced": [name for name in new if name in old],
            "new": [name for name in new if name not in old],
            "frozen or removed": [name for name in old if name not in new],
        }
        few = {word: names[:4] + ["…"] * (len(names) > 4) for word, names in changes.items()}
        return "; ".join(f"{word}: {', '.join(names)}" for word, names in few.items() if names)


def _values(owners: Iterable[Mapping[str, T]]) -> list[T]:
    return [value for own in owners for value in own.values()]
