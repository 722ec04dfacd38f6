"""`OnRun`: base class of Lockstep's strategies for Lightning's `Trainer` and `Fabric`; opens the run."""

from __future__ import annotations

import os
from typing import Any

from lockstep.engine.training.columns import of_all
from lockstep.integrations import process
from lockstep.run import Run
from lockstep.world import World


class OnRun:
    """A strategy whose processes are the ranks of a run, while Lightning sees one process.

    Attributes:
        run: the run that executes the training loop; `setup_environment` opens it.
    """

    run: Run
    _world: World
    _replicas: int | None
    _seed: int | None

    def _open_run(self, accelerator: Any) -> None:
        seed = int(os.environ.get("PL_GLOBAL_SEED", "0")) if self._seed is None else self._seed
        on_cpu = type(accelerator).__name__ == "CPUAccelerator"
        self.run = process.current.open(
            seed=seed, replicas=self._replicas, devices="cpu" if on_cpu else "auto"
        )
        self._root_device = self.run.device

    def _model_of(self, module: Any) -> Any:
        """Return the wrapped model of `module`; call `run.model` unless an earlier fit has done so."""
        for known in self.run._session.state.models:
            if known.module is module:
                return known.wrapped
        return self.run.model(module)

    @property
    def is_global_zero(self) -> bool:
        """Whether this process is rank 0, which logs, prints and writes checkpoints."""
        return self._world.is_main

    def barrier(self, *_: Any, **__: Any) -> None:
        """Wait for all ranks."""
        self.run.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return rank `src`'s value of `obj`: a number, text or `None`, or a container of these."""
        return of_all(obj, self.run._session.context.group)[src]
