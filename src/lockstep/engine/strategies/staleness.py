"""Last versions of a model's parameters, for gradients with staleness.

With a staleness K, a pass with gradients sees the parameters that lack their K latest updates, exactly:

    updates so far        0   1   2   3   4   5        K = 2
    a pass sees version   0   0   0   1   2   3

A parameter holds one of its versions at a time: the oldest one in passes with gradients, and the newest
one everywhere else.
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
    """The versions of one parameter.

    Attributes:
        versions: the oldest first.
        shown: the one that the parameter holds.
        changes: how often the parameter was changed in place, as autograd counts it, when it got that.
    """

    parameter: nn.Parameter
    versions: deque[torch.Tensor]
    shown: torch.Tensor
    changes: int


class Versions:
    """The last versions of a model's parameters.

    Args:
        made_here: whether optimizers update the parameters in this process.
    """

    def __init__(self, module: nn.Module, staleness: int, *, made_here: bool = True) -> None:
        self._module = module
        self._most, self._made_here = staleness + 1, made_here
        self._kept: dict[int, _Versioned] = {}

    def begin(self, parameters: Iterable[nn.Parameter]) -> None:
        """Begin to keep versions of `parameters` that have none yet."""
        for parameter in parameters:
            if id(parameter) not in self._kept:
                first = parameter.detach().clone()
                kept = _Versioned(parameter, deque([first]), first, parameter._version)
                self._kept[id(parameter)] = kept

    def check(self, parameters: Iterable[nn.Parameter], name: str) -> None:
        """Refuse parameters that the script has changed: the next version would overwrite them.

        Raises:
            StepError: if there are some; `name` is that of their optimizer.
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
        """Keep the update that the optimizer `name` makes in the body; `among`: ids of its parameters."""
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
        """Add a version of `parameters` that a server has made."""
        for parameter, value in zip(parameters, values, strict=True):
            self._kept[id(parameter)].versions.append(value)

    def drop(self, parameters: Iterable[nn.Parameter], *, coming: int = 0) -> None:
        """Drop versions that no pass needs any more.

        `coming`: how many newer versions the servers have.
        """
        for parameter in parameters:
            versions = self._kept[id(parameter)].versions
            for _ in range(len(versions) + coming - self._most):
                versions.popleft()

    def count(self, parameters: Sequence[nn.Parameter]) -> int:
        """Return how many versions are kept of `parameters`, which are those of one optimizer."""
        kept = self._kept.get(id(parameters[0]))
        return 0 if kept is None else len(kept.versions)

    def newest(self, parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
        """Return the newest version of each of `parameters`."""
        return [self._kept[id(parameter)].versions[-1] for parameter in parameters]

    def forget(self) -> None:
        """Drop all versions, after other values were loaded."""
        self._kept.clear()

    # --- what parameters hold --------------------------------------------------------------------

    def show_oldest(self) -> None:
        """Set parameters to the version for passes with gradients."""
        self._show(0)

    def show_newest(self) -> None:
        """Set parameters to the version with all updates."""
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
        """Point parameters to copies of their newest versions; a graph may need their own memory."""
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
        """Return the older versions, by age and name, which are saved beside the newest one."""
        older: dict[str, dict[str, torch.Tensor]] = {}
        for name, parameter in self._module.named_parameters():
            kept = self._kept.get(id(parameter))
            for age, value in enumerate(reversed(kept.versions if kept else ())):
                if age:
                    older.setdefault(str(age), {})[name] = value
        shows_newest = all(one.shown is one.versions[-1] for one in self._kept.values())
        return {"older": older, "shows_newest": shows_newest}

    def load(self, state: Mapping[str, Any]) -> None:
        """Load what `state` returned, when parameters have their newest version."""
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
