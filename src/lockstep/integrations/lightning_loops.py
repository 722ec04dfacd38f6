"""Lightning's loops for one optimizer step, if the strategy's `training_step` also runs backward passes."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.loops.optimization.automatic import (
    Closure,
    ClosureResult,
    _AutomaticOptimization,
)
from lightning.pytorch.loops.optimization.manual import _ManualOptimization


class AutomaticOptimization(_AutomaticOptimization):
    """Loop that zeroes gradients, then calls the strategy's `training_step`, which computes them all."""

    def _make_closure(self, kwargs: Any, optimizer: Any, batch_idx: int) -> Closure:
        zero_grad = self._make_zero_grad_fn(batch_idx, optimizer)

        def step() -> ClosureResult:
            if zero_grad is not None:
                zero_grad()
            return self._training_step(kwargs)

        return Closure(step_fn=step)


class ManualOptimization(_ManualOptimization):
    """Manual optimization: adds an optimizer's step to Lightning's `global_step` once per global batch.

    `step()` calls of single replicas, each of which runs in a thread, are not counted.
    """

    def on_run_start(self) -> None:
        """Do nothing: Lightning would make each call of `step()` count; here only `count` does so."""

    def count(self, optimizer: Any, step: Any) -> None:
        """Call `step`, which steps the optimizer, and add one to Lightning's `global_step`."""
        self._on_before_step()
        step()
        self._on_after_step()
