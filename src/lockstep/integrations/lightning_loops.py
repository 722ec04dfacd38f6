"""Lightning's loops of one step, for strategies that run the backward pass inside of `training_step`."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.loops.optimization.automatic import (
    Closure,
    ClosureResult,
    _AutomaticOptimization,
)
from lightning.pytorch.loops.optimization.manual import _ManualOptimization


class AutomaticOptimization(_AutomaticOptimization):
    """Sets gradients to zero before `training_step`, which computes them for a whole batch."""

    def _make_closure(self, kwargs: Any, optimizer: Any, batch_idx: int) -> Closure:
        zero_grad = self._make_zero_grad_fn(batch_idx, optimizer)

        def step() -> ClosureResult:
            if zero_grad is not None:
                zero_grad()
            return self._training_step(kwargs)

        return Closure(step_fn=step)


class ManualOptimization(_ManualOptimization):
    """Counts a step of an optimizer in Lightning's `global_step` once per global batch.

    A rank computes each of its replicas in a thread of its own; these do not count.
    """

    def on_run_start(self) -> None:
        """Leave out what Lightning does around each call of `step()`; `count` does it."""

    def count(self, optimizer: Any, step: Any) -> None:
        """Call `step`, which steps the optimizer, and add one to Lightning's `global_step`."""
        self._on_before_step()
        step()
        self._on_after_step()
