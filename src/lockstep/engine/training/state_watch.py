"""Watch over parameters: in the passes of a loop's body only optimizers' steps change them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from lockstep.engine.recovery.state import State
from lockstep.engine.strategies.wrapped_model import WrappedModel
from lockstep.engine.training.audit_report import changed
from lockstep.engine.training.tensor_bits import Bits, bits, read
from lockstep.state.checkpoint import state_codec


class StateWatch:
    """Compares the parameters of models, and of registered modules, over a pass of the loop's body.

    Args:
        state: models and registered objects of the run.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._with_buffers = False
        self._before: dict[str, Bits] | None = None

    @property
    def is_on(self) -> bool:
        """Whether a pass is watched."""
        return self._before is not None

    def begins(self, *, with_buffers: bool = False) -> None:
        """A pass begins; `with_buffers` where forward passes must leave buffers as they were, too."""
        self._with_buffers = with_buffers
        self._before = self._now()

    def step(self, act: Callable[[], Any]) -> Any:
        """Return what an optimizer's step does, with its hooks.

        Raises:
            AuditError: if parameters have changed before.
        """
        self._check()
        result = act()
        self._before = self._now()
        return result

    def ends(self) -> None:
        """A pass is over.

        Raises:
            AuditError: if parameters have changed besides by steps.
        """
        self._check()
        self._before = None

    def drop(self) -> None:
        """A pass was left."""
        self._before = None

    def _check(self) -> None:
        if (before := self._before) is None:
            return
        now = self._now()
        names = [name for name in before if name in now]
        old, new = read([before[name] for name in names]), read([now[name] for name in names])
        different = [name for name, a, b in zip(names, old, new, strict=True) if a != b]
        if different:
            self._before = None
            raise changed(different)

    def _now(self) -> dict[str, Bits]:
        registered = [one for one in self._state.registered.values() if isinstance(one, nn.Module)]
        found: dict[str, Bits] = {}
        several = len(self._state.models) > 1
        for number, model in enumerate(self._state.models):
            owner = type(model.module).__name__ + (f" (model {number})" if several else "")
            # With a staleness passes see other versions of parameters than steps do.
            if model.versions is None:
                found |= self._hashes(owner, _tensors(model))
            if self._with_buffers:
                found |= self._hashes(owner, dict(model.module.named_buffers()))
        for number, module in enumerate(registered):
            owner = f"{type(module).__name__} (registered object {number})"
            found |= self._hashes(owner, dict(module.named_parameters()))
            if self._with_buffers:
                found |= self._hashes(owner, dict(module.named_buffers()))
        return found

    @staticmethod
    def _hashes(owner: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, Bits]:
        return {
            f"{name} of {owner}": bits(tensor)
            for name, tensor in tensors.items()
            if not (nn.parameter.is_lazy(tensor) or tensor.is_meta)
        }


def _tensors(model: WrappedModel) -> Mapping[str, torch.Tensor]:
    """Return the parameters of a model; of one that is cut the parts that stay on this rank."""
    if model.is_cut:
        return {f"parameter {number}": one for number, one in enumerate(model.parameters)}
    return dict(model.module.named_parameters())


def texts(state: State) -> dict[str, str]:
    """Return the state of registered objects that are no modules, as text that differs where they do."""
    found = {}
    for name, one in state.registered.items():
        if not isinstance(one, nn.Module):
            text, tensors = state_codec.flatten({"state": dict(one.state_dict())})
            found[name] = f"{text} {read([bits(tensor) for tensor in tensors.values()])}"
    return found
