"""`RunProperties`, a base class of `lockstep.Run`: rank, device, replicas, epoch, step, mesh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from lockstep.engine.layout.replicas import share
from lockstep.engine.recovery.script_state import ScriptState
from lockstep.engine.training.loop import Loop
from lockstep.engine.training.session import Session
from lockstep.errors import StepError, UsageError
from lockstep.registry import STRATEGIES
from lockstep.world import World


class RunProperties:
    """Base class of `lockstep.Run` with its properties, such as rank, device, epoch and step."""

    _session: Session
    _is_begun = False

    def _begin_once(self) -> None:
        if self._is_begun:
            raise StepError(
                f"the run {self._name} was entered before; expected one `with` for a run",
                hint="make another lockstep.Run(…) for another run",
            )
        self._is_begun = True

    def _require_open(self, call: str) -> None:
        """Raise an error if the run has ended; `call` is the method of the run that the script calls."""
        if self._session.loop.closed:
            raise StepError(
                f"{call} was called after the end of the run {self._name}; "
                "expected to be inside its `with` block",
                hint="make another lockstep.Run(…) for another run",
            )

    def _count(self, call: str) -> int:
        """Return how often the script has called the run's method `call`, this call included.

        Raises:
            StepError: if the same line called it in an earlier epoch or batch of the current loop.
        """
        self._require_open(call)
        return self._session.call_sites.count(call)

    @property
    def _name(self) -> str:
        return self._session.context.settings.name

    def state(self, name: str | None = None, /, **values: Any) -> ScriptState:
        """Return a namespace of variables that are saved and restored with the run, and part of its digest.

        Change the variables where all ranks change them alike: between the batches of `run.batches`, or
        between epochs.

        Args:
            name: name of the namespace in saved states; by default `state`, and `state-2` for the second.
            values: the variables with their first values: numbers, text, None, tensors, arrays, and
                containers of them. After a resume tensors are on the device of the run.

        Raises:
            ModelError: if a value cannot be saved, or the name is taken.
            VariableError: later, if the script uses a name that is not in `values`.
        """
        self._require_open("run.state")
        registered = self._session.state.registered
        count = 1 + sum(isinstance(value, ScriptState) for value in registered.values())
        own = name or ("state" if count == 1 else f"state-{count}")
        state = ScriptState(own, values, self.device)
        self._session.register(own, state)
        return state

    @property
    def world(self) -> World:
        """The ranks of this run: this process's rank and local rank, and the number of processes."""
        return self._session.context.world

    @property
    def device(self) -> torch.device:
        """Device of this rank."""
        return self._session.context.device

    @property
    def replicas(self) -> int:
        """Number of replicas: logical data-parallel workers, which may be more than there are ranks."""
        return self._session.context.replicas

    @property
    def is_main_process(self) -> bool:
        """Whether this process is rank 0, which prints and writes files."""
        return self.world.is_main

    @property
    def directory(self) -> Path:
        """Directory with the run's events, logs and checkpoints."""
        return self._session.context.record.directory

    @property
    def epoch(self) -> int:
        """Current epoch, from 0."""
        return self._loop.epoch

    @property
    def step(self) -> int:
        """Number of updates of the parameters so far."""
        self._loop.step_is_read()
        return self._loop.updates

    @property
    def batch_index(self) -> int:
        """Number of the current global batch in this loop, from 0; equal on any number of ranks.

        Use it instead of `enumerate(loader)`, which counts microbatches. A resumed loop counts on.

        Raises:
            StepError: outside of a loop over a loader.
        """
        self._loop.step_is_read()
        return self._loop.batch_index

    @property
    def batch_rows(self) -> slice:
        """Rows of this microbatch in the result of `run.all_gather`; empty for a replica without samples.

        Raises:
            StepError: outside of a loop over a loader.
        """
        microbatch = self._loop.require_microbatch("run.batch_rows")
        rows = share(microbatch.total, self.replicas, microbatch.replica)
        return slice(rows.start, rows.stop)

    @property
    def sync_gradients(self) -> bool:
        """Whether `optimizer.step()` acts here, as gradients are summed over the whole global batch.

        True in this rank's last microbatch of a global batch, and outside of loops.
        """
        return self._loop.acts_now()

    @property
    def is_replaying(self) -> bool:
        """Whether a resumed run is still repeating the script's calls up to its saved position."""
        return self._loop.is_replaying

    @property
    def exchange(self) -> str:
        """Name of the exchange, the algorithm that sums gradients over ranks; `none` on one rank."""
        return self._session.context.exchange

    @property
    def scale(self) -> float:
        """Loss scale with `precision="fp16"`, as of `torch.amp.GradScaler`; else 1."""
        scaler = self._session.state.scaler
        return 1.0 if scaler is None else scaler.scale

    @property
    def mesh(self) -> DeviceMesh:
        """DeviceMesh of all ranks, with the dimensions `data` and `model`.

        Raises:
            UsageError: if the strategy gives each rank a whole model.
        """
        context = self._session.context
        if context.groups.mesh is None:
            raise UsageError(
                f"run.mesh was asked for with strategy={context.settings.strategy}; expected one that "
                "shards or spreads models",
                hint=", ".join(STRATEGIES.where(lambda entry: entry.meshed)),
            )
        return context.groups.mesh

    @property
    def exactness(self) -> str:
        """Class of exactness: `exact`, `close` (only roundings depend on the layout) or `approximate`."""
        return self._session.models.exactness

    @property
    def _loop(self) -> Loop:
        return self._session.loop
