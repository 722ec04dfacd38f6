"""`StateWatch`: checks that nothing but optimizers' steps changes parameters while a loop's body runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lockstep.engine.recovery.state import State
from lockstep.engine.training.audit_report import changed
from lockstep.engine.training.tensor_bits import Bits, bits, read
from lockstep.state.checkpoint import state_codec


class StateWatch:
    """Detects parameters that a loop's body changes other than by an optimizer's step.

    An `AuditError` is raised then.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._with_buffers = False
        self._before: dict[str, Bits] | None = None

    @property
    def is_on(self) -> bool:
        """Whether the changes in a microbatch are being checked now."""
        return self._before is not None

    def begins(self, *, with_buffers: bool = False) -> None:
        """Begin to check a microbatch for changed parameters, and for changed buffers if `with_buffers`."""
        self._with_buffers = with_buffers
        self._before = self._now()

    def step(self, act: Callable[[], Any]) -> Any:
        """Call `act`, an optimizer's step, whose changes of parameters are allowed; return its result.

        Raises:
            AuditError: if parameters have changed before the step.
        """
        self._check()
        result = act()
        self._before = self._now()
        return result

    def ends(self) -> None:
        """End the check of a microbatch.

        Raises:
            AuditError: if anything but an optimizer's step has changed parameters.
        """
        self._check()
        self.drop()

    def drop(self) -> None:
        """End the check of a microbatch without a comparison.

        The script has left the microbatch by `break` or an exception.
        """
        self._before = None

    def _check(self) -> None:
        if (before := self._before) is None:
            return
        now = self._now()
        names = [name for name in before if name in now]
        old, new = read([before[name] for name in names]), read([now[name] for name in names])
        different = [name for name, a, b in zip(names, old, new, strict=True) if a != b]
        if different:
            self.drop()
            raise changed(different)

    def _now(self) -> dict[str, Bits]:
        """Return hashes of parameters, by names such as `weight of Linear (model 1)`.

        Buffers are included if `begins` was called for parameters and buffers.
        """
        models = self._state.models
        owned: list[tuple[str, nn.Module, Mapping[str, torch.Tensor]]] = []
        for number, model in enumerate(models):
            owner = type(model.module).__name__ + (f" (model {number})" * (len(models) > 1))
            own = dict(model.module.named_parameters())
            if model.is_cut:  # of a model that is cut, the parts on this rank
                own = {f"parameter {place}": one for place, one in enumerate(model.parameters)}
            # With a staleness the body sees other versions of parameters than steps do.
            owned.append((owner, model.module, own if model.versions is None else {}))
        registered = [one for one in self._state.registered.values() if isinstance(one, nn.Module)]
        for number, module in enumerate(registered):
            owner = f"{type(module).__name__} (registered object {number})"
            owned.append((owner, module, dict(module.named_parameters())))
        return {
            f"{name} of {owner}": bits(tensor)
            for owner, module, own in owned
            for name, tensor in (
                *own.items(),
                *(module.named_buffers() if self._with_buffers else ()),
            )
            if not (is_lazy(tensor) or tensor.is_meta)
        }


def texts(state: State) -> dict[str, str]:
    """Return, for each object of `run.register` that is not a module, its state as text, by name.

    Tensors are hashed.
    """
    found = {}
    for name, one in state.registered.items():
        if not isinstance(one, nn.Module):
            text, tensors = state_codec.flatten({"state": dict(one.state_dict())})
            found[name] = f"{text} {read([bits(tensor) for tensor in tensors.values()])}"
    return found
