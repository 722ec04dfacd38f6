"""Lightning's optimization loops, for a strategy whose `training_step` also computes the gradients."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.loops.optimization.automatic import (
    Closure,
    ClosureResult,
    _AutomaticOptimization,
)
from lightning.pytorch.loops.optimization.manual import _ManualOptimization


class AutomaticOptimization(_AutomaticOptimization):
    """Lightning's loop for automatic optimization, without the backward pass.

    The loop zeroes the gradients and calls the strategy's `training_step`, which computes all gradients.
    """

    def _make_closure(self, kwargs: Any, optimizer: Any, batch_idx: int) -> Closure:
        zero_grad = self._make_zero_grad_fn(batch_idx, optimizer)

        def step() -> ClosureResult:
            if zero_grad is not None:
                zero_grad()
            return self._training_step(kwargs)

        return Closure(step_fn=step)


class ManualOptimization(_ManualOptimization):
    """Manual optimization: Lightning's `global_step` grows by one per optimizer step on a global batch.

    Each replica of this rank calls `step()` in its own thread; these calls are not counted.
    """

    def on_run_start(self) -> None:
        """Do nothing; Lightning's method would count each replica's call of `step()` in `global_step`."""

    def count(self, optimizer: Any, step: Any) -> None:
        """Call `step`, which steps the optimizer, and add one to Lightning's `global_step`."""
        self._on_before_step()
        step()
        self._on_after_step()
