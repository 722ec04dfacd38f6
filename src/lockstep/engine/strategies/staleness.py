"""Older values ("versions") of a model's parameters, with which gradients are computed (staleness).

With a staleness K, forward and backward passes use parameters that lack exactly the K latest updates:

    updates so far        0   1   2   3   4   5        K = 2
    version in use        0   0   0   1   2   3

While gradients are computed, the module's parameters have the values of the oldest version. At other times
they have those of the newest version.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lockstep.errors import StepError


@dataclass(slots=True)
class _Versioned:
    """The latest values ("versions") of one parameter.

    Attributes:
        versions: the values after each of the last updates, the oldest first.
        shown: the version that was last copied into the parameter.
        changes: `parameter._version` (autograd's count of in-place changes) just after that copy.
    """

    parameter: nn.Parameter
    versions: deque[torch.Tensor]
    shown: torch.Tensor
    changes: int


class Versions:
    """Stores `staleness + 1` values ("versions") of each parameter of a model.

    They are the values after each of the latest `staleness` updates, and the value before them.
    `made_here`: whether optimizers in this process update the parameters; otherwise parameter servers do.
    """

    def __init__(self, module: nn.Module, staleness: int, *, made_here: bool = True) -> None:
        self._module = module
        self._most, self._made_here = staleness + 1, made_here
        self._kept: dict[int, _Versioned] = {}

    def begin(self, parameters: Iterable[nn.Parameter]) -> None:
        """Store the current values of those `parameters` of which no value is stored yet."""
        for parameter in parameters:
            if id(parameter) not in self._kept:
                first = parameter.detach().clone()
                kept = _Versioned(parameter, deque([first]), first, parameter._version)
                self._kept[id(parameter)] = kept

    def check(self, parameters: Iterable[nn.Parameter], name: str) -> None:
        """Raise a `StepError` if the script itself has changed any of `parameters`.

        The next update would undo such a change. `name`: name of the optimizer of the parameters, for the
        message.
        """
        kept = [self._kept[id(p)] for p in parameters if id(p) in self._kept]
        if any(one.changes != one.parameter._version for one in kept):
            raise StepError(
                f"the script has changed parameters of {name} itself; expected only its steps to do so: "
                "with a staleness there are several versions of them, or they are with the servers",
                hint="leave out the staleness: then every worker updates its own copy; or load weights "
                "with run.load",
            )

    @contextlib.contextmanager
    def updating(self, among: Collection[int], name: str) -> Iterator[None]:
        """Return a context manager for an optimizer's step; it stores the parameters' new values.

        Inside of it, parameters have their newest values. If servers update the parameters, nothing is
        done. `among`: ids of the optimizer's parameters. `name`: its name in messages.
        """
        if not self._made_here:
            yield
            return
        own = [p for p in self._module.parameters() if id(p) in among]
        self.check(own, name)
        self.begin(own)
        self.show_newest()
        yield
        for parameter in own:
            kept = self._kept[id(parameter)]
            kept.shown = parameter.detach().clone()
            kept.changes = parameter._version
            kept.versions.append(kept.shown)
        self.drop(own)
        self.show_oldest()

    def add(self, parameters: Iterable[nn.Parameter], values: Iterable[torch.Tensor]) -> None:
        """Append `values`, computed by a parameter server, as the newest version of `parameters`."""
        for parameter, value in zip(parameters, values, strict=True):
            self._kept[id(parameter)].versions.append(value)

    def drop(self, parameters: Iterable[nn.Parameter], *, coming: int = 0) -> None:
        """Drop the oldest stored values of each of `parameters`, so that at most `staleness + 1` remain.

        `coming`: number of values per parameter that were requested from parameter servers and not received
        yet. They count as stored.
        """
        for parameter in parameters:
            versions = self._kept[id(parameter)].versions
            for _ in range(len(versions) + coming - self._most):
                versions.popleft()

    def count(self, parameters: Sequence[nn.Parameter]) -> int:
        """Return the number of stored versions of each parameter; 0 if none is stored.

        `parameters`: those of one optimizer, which have equally many versions.
        """
        kept = self._kept.get(id(parameters[0]))
        return 0 if kept is None else len(kept.versions)

    def newest(self, parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
        """Return the newest version of each of `parameters`."""
        return [self._kept[id(parameter)].versions[-1] for parameter in parameters]

    def forget(self) -> None:
        """Drop all stored values of parameters; called after the model's `state_dict` was loaded."""
        self._kept.clear()

    # --- values of the parameters ------------------------------------------------------------------

    def show_oldest(self) -> None:
        """Set all parameters to their oldest stored values, with which gradients are computed."""
        self._show(0)

    def show_newest(self) -> None:
        """Set all parameters to their newest values, which contain all updates."""
        self._show(-1)

    def _show(self, which: int) -> None:
        others = [one for one in self._kept.values() if one.shown is not one.versions[which]]
        if not others:
            return
        sources = [one.versions[which] for one in others]
        with torch.no_grad():
            targets: list[torch.Tensor] = [one.parameter for one in others]
            torch._foreach_copy_(targets, sources)
        for one, source in zip(others, sources, strict=True):
            one.shown, one.changes = source, one.parameter._version

    @contextlib.contextmanager
    def with_newest(self) -> Iterator[None]:
        """Return a context manager in which each parameter's `data` is a copy of its newest version.

        The parameter's own memory is not changed, since a backward pass may still need it.
        """
        others = [one for one in self._kept.values() if one.shown is not one.versions[-1]]
        own = [one.parameter.data for one in others]
        for one in others:
            one.parameter.data = one.versions[-1].to(one.parameter.device, copy=True)
        try:
            yield
        finally:
            for one, data in zip(others, own, strict=True):
                one.parameter.data = data

    # --- state -----------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the older versions of parameters, and whether the parameters have their newest values.

        The keys are `older`, a dictionary by age and then by parameter name, and `shows_newest`. The newest
        versions are in the model's `state_dict`.
        """
        older: dict[str, dict[str, torch.Tensor]] = {}
        for name, parameter in self._module.named_parameters():
            kept = self._kept.get(id(parameter))
            for age, value in enumerate(reversed(kept.versions if kept else ())):
                if age:
                    older.setdefault(str(age), {})[name] = value
        shows_newest = all(one.shown is one.versions[-1] for one in self._kept.values())
        return {"older": older, "shows_newest": shows_newest}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore the older versions from `state`, a result of `state()`.

        Called when the parameters already have their newest values.
        """
        self.forget()
        if not state["older"]:
            return
        named = dict(self._module.named_parameters())
        self.begin(named[name] for name in state["older"]["1"] if name in named)
        for age in sorted(state["older"], key=int):
            for name, value in state["older"][age].items():
                kept = self._kept.get(id(named.get(name)))
                if kept is not None and len(kept.versions) < self._most:
                    kept.versions.appendleft(value)
        if not state["shows_newest"]:
            self.show_oldest()
