"""Hooks on a module's forward passes, copies and `state_dict`; a check for replaced parameters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NoReturn, TypeVar

from torch import nn

from lockstep.errors import ModelError

T = TypeVar("T")


class _Hook:
    """A forward hook that has no effect in copies of its module, made by `copy.deepcopy` or pickle."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act

    def __call__(self, *_called: object) -> None:
        self._act()

    def __deepcopy__(self, _memo: object) -> _NoHook:
        return _NoHook()

    def __reduce__(self) -> tuple[type[_NoHook], tuple[()]]:
        return _NoHook, ()


class _NoHook:
    """The forward hook of a copied module, without any effect."""

    def __call__(self, *_called: object) -> None:
        pass


class RefusedCopy:
    """The `__deepcopy__` of a module of which this rank holds only a part: raises a `ModelError`."""

    def __init__(self, problem: str, hint: str) -> None:
        self._problem, self._hint = problem, hint

    def __call__(self, _memo: object) -> NoReturn:
        """Raise a `ModelError`; `copy.deepcopy` calls this method as the module's `__deepcopy__`."""
        raise ModelError(
            f"copy.deepcopy of {self._problem}; a copy would be no model", hint=self._hint
        )


def refuse_state_dict(part: str) -> Callable[[nn.Module, str, bool], None]:
    """Return a hook for `state_dict` of a split model, which raises a `ModelError` if a script calls it.

    A rank holds only a part of a split model. The run itself calls `state_dict` with `keep_vars`, which
    raises no error. `part`: end of a sentence "this rank …" in the message, such as "has one stage of it".
    """

    def refuse(module: nn.Module, _prefix: str, keep_vars: bool) -> None:
        if not keep_vars:
            raise ModelError(
                f"{type(module).__name__}.state_dict() was called, and this rank {part}; "
                "expected a call of the run's",
                hint="run.export(path) writes whole weights, run.save() the state of the run, and "
                "run.digest() tells whether bits are the same",
            )

    return refuse


def watch_forward(
    module: nn.Module,
    before: Callable[[], None],
    after: Callable[[], None] | None = None,
    *,
    always: bool = False,
) -> Callable[[], None]:
    """Call `before` and `after` around each forward pass; return a function to remove both.

    `always`: call `after` also if the forward pass of `module` raises an exception.
    """
    handles = [module.register_forward_pre_hook(_Hook(before))]
    if after is not None:
        handles.append(module.register_forward_hook(_Hook(after), always_call=always))

    def end() -> None:
        for handle in handles:
            handle.remove()

    return end


class TrainableParameters:
    """Checks that a model's trainable parameters are those that it had when it was wrapped."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._find_parts()
        self._first = {id(p): name for name, p in module.named_parameters() if p.requires_grad}

    def _find_parts(self) -> None:
        # Cached: walking through a small model takes longer than its forward pass.
        parts = list(self._module.modules())
        self._inside = [part._modules for part in parts]
        self._owners = [part._parameters for part in parts]
        self._children = _values(self._inside)

    def check(self) -> None:
        """Raise a `ModelError` if trainable parameters were added, removed, frozen or replaced."""
        if _values(self._inside) != self._children:
            self._find_parts()
        # Without regard to order: pruning renames a parameter, which moves it to the end.
        now = {id(p) for p in _values(self._owners) if p is not None and p.requires_grad}
        if now != self._first.keys():
            raise ModelError(
                f"{type(self._module).__name__} has {len(now)} trainable parameters; it had "
                f"{len(self._first)} when it was given to run.model ({self._changes(now)})",
                hint="leave requires_grad as it was at run.model: only parameters of an optimizer "
                "change, so leave others out of it (until add_param_group), and use torch.no_grad() "
                "around their layers",
            )

    def _changes(self, now: Collection[int]) -> str:
        """Return, as text, names of parameters replaced, added, frozen or removed since `run.model`.

        `now`: ids of the parameters that are trainable now.
        """
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
