"""Warning of `run.log` values that are known only after a step, such as a learning rate.

Loggers get the mean over a step's microbatches. A scheduler steps, and the norm of gradients is known, in
the last microbatch of each rank: the mean of such a value would depend on the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from lockstep.engine.training.loop import Loop


class StepValues:
    """Compares values of `run.log` between a batch's last and earlier microbatches; warns once.

    Args:
        loop: position of the run.
        optimizers: optimizers of the run, whose learning rates are compared with logged values.
        warn: shows a line to the user.
    """

    def __init__(
        self, loop: Loop, optimizers: Sequence[Optimizer], warn: Callable[[str], None]
    ) -> None:
        self._loop, self._optimizers, self._warn = loop, optimizers, warn
        self._earlier: dict[str, float] = {}  # of the current batch, up to its last microbatch
        self._warned = False

    def logged(self, values: Mapping[str, Any]) -> None:
        """Warn if one of `values` is known only in the last microbatch of a batch.

        This holds if an earlier microbatch logged NaN instead, or another value than a learning rate that
        is logged now. `values`: arguments of `run.log`, by name, as they are recorded.
        """
        microbatch = self._loop.microbatch
        if self._warned or microbatch is None or (microbatch.first and microbatch.last):
            return  # with one microbatch on the rank there is nothing to compare
        found = {
            name: number for name, own in values.items() if (number := _number(own)) is not None
        }
        if not microbatch.last:
            self._earlier |= found
            return
        if not self._earlier:
            return
        groups = [group for one in self._optimizers for group in one.param_groups]
        rates = {_number(group.get("lr")) for group in groups}
        names = [
            name
            for name, before in self._earlier.items()
            if (now := found.get(name)) is not None
            and not math.isnan(now)
            and (math.isnan(before) or (before != now and now in rates))
        ]
        self._earlier.clear()
        if names:
            self._warned = True
            listed = ", ".join(f"`{name}`" for name in names)
            self._warn(
                f"lockstep: warning: run.log got {listed} inside microbatches, where the value of the step "
                "is known in the last one only: loggers get a mean that depends on the number of ranks; "
                "hint: for batch in run.batches(loader), and call run.log after the loop over the batch"
            )


def _number(value: Any) -> float | None:
    """Return a float, also from a tensor of one float on the CPU; None for values of other types."""
    if isinstance(value, torch.Tensor):  # to read one on a device would wait for the device
        is_read = value.numel() == 1 and value.is_floating_point() and value.is_cpu
        return value.item() if is_read else None
    return value if isinstance(value, float) else None
