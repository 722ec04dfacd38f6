"""`Scaler`: the loss scale of fp16, updated as in torch's GradScaler, with the same bits on every layout.

Gradients below 6e-8 are zero in fp16. So the loss is multiplied by a large scale before the backward pass,
and the summed gradients are divided by it. If gradients overflow in fp16, the step is skipped and the scale
is halved; after many steps without overflow, it is doubled. See Micikevicius et al., "Mixed Precision
Training", ICLR 2018 (arXiv:1710.03740).

`torch.amp.GradScaler` divides at the optimizer's step, called by the script, and each rank decides for
itself. Here gradients are divided right after they are summed over ranks, and the sums are checked, which
have the same bits on all ranks. Constants and kernel are those of GradScaler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from lockstep.engine.data.microbatch import Microbatch
from lockstep.engine.strategies.wrapped_model import WrappedModel
from lockstep.engine.training.listeners import Listener
from lockstep.errors import NonFiniteLossError
from lockstep.state.checkpoint.parts import local

#: The defaults of torch.amp.GradScaler; powers of two, so that scaling changes no bit but the exponent's.
FIRST = 65536.0
GROWTH, BACKOFF = 2.0, 0.5
INTERVAL = 2000
#: Smallest scale, the smallest normal number of fp16: with it, the scale is not the cause of an overflow.
LEAST = 2.0**-14
#: Largest scale, so that scaled values do not overflow in fp32.
_MOST = 2.0**100


class Scaler(Listener):
    """Multiplies losses by a scale, divides gradients by it, and skips steps if gradients are not finite.

    `group` is the process group in which ranks with parts of one model agree on skipping a step; `None` on
    a single rank.

    Attributes:
        scale: current factor of the losses.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        device: torch.device,
        warn: Callable[[str], None],
        log: Callable[[Mapping[str, Any]], object],
    ) -> None:
        self._group, self._device, self._warn, self._log = group, device, warn, log
        self.scale = FIRST
        self._good = 0
        self._found: dict[int, list[torch.Tensor]] = {}
        self._skipped = False

    # --- a backward pass -------------------------------------------------------------------------

    def before_backward(self, models: Iterable[WrappedModel]) -> None:
        """Multiply the gradients that `models` already have by the loss scale.

        The next backward pass adds gradients of a scaled loss to them, so that both must have the same
        scale. Nothing is done in a run of several replicas.
        """
        for model in models:
            waiting = [] if model.several_replicas else gradients_of(model)
            if waiting:
                torch._foreach_mul_(waiting, self.scale)

    def after_backward(self, models: Iterable[WrappedModel]) -> None:
        """Divide the summed gradients of `models` by the scale, and check whether they are finite."""
        for model in models:
            self._found[id(model)] = found = self._unscale(gradients_of(model))
            if model.is_split and self._group is not None:
                # Each rank has another part of the gradients.
                result = torch.zeros((), device=self._device)
                for own in found:
                    result = torch.maximum(result, own.to(self._device))
                dist.all_reduce(result, op=dist.ReduceOp.MAX, group=self._group)
                found[:] = [result]

    def _unscale(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for gradient in gradients:
            groups.setdefault((gradient.device, gradient.dtype), []).append(gradient)
        found = []
        for (device, _), ours in groups.items():
            found.append(torch.zeros((), device=device))
            inverse = torch.full((), 1 / self.scale, device=device)
            torch._amp_foreach_non_finite_check_and_unscale_(ours, found[-1], inverse)
        return found

    # --- a step ----------------------------------------------------------------------------------

    def skips(self, models: Iterable[WrappedModel]) -> bool:
        """Whether to skip the current step, because gradients of `models` are not finite.

        Raises:
            NonFiniteLossError: if the scale cannot be halved any more.
        """
        found = any(one.item() for model in models for one in self._found.get(id(model), ()))
        if found and self.scale <= LEAST:
            raise NonFiniteLossError(
                f"gradients are not finite in fp16 even with a loss scale of {self.scale:g}",
                hint="look at the data and the learning rate, or take precision='bf16', whose numbers "
                "are as large as those of fp32",
            )
        self._skipped |= found
        return found

    def step_ends(self, step: int, microbatch: Microbatch) -> None:
        """Halve the loss scale if the step was skipped; double it after `INTERVAL` good steps.

        A step is good if no gradient overflowed. `step`: number of the step, for the warning. `microbatch`
        is not used.
        """
        before = self.scale
        if self._skipped:
            self.scale, self._good, self._skipped = self.scale * BACKOFF, 0, False
            self._warn(
                f"lockstep: fp16 overflow: skipped step {step}; "
                f"the loss scale is {self.scale:g} from here on"
            )
        else:
            self._good += 1
            if self._good == INTERVAL:
                self.scale, self._good = min(self.scale * GROWTH, _MOST), 0
        self._found.clear()
        if self.scale != before:
            self._log({"scale": self.scale})

    # --- state -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, float]:
        """Return the scale, and the number of steps since its last change."""
        return {"scale": self.scale, "good": self._good}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Load a state that `state_dict` returned."""
        self.scale, self._good = float(state["scale"]), int(state["good"])


def gradients_of(model: WrappedModel) -> list[torch.Tensor]:
    """Return the gradients of a model's parameters; of parameters sharded over ranks, this rank's part."""
    return [local(p.grad) for p in model.parameters if p.grad is not None]
