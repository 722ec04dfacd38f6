"""`Accelerator` of accelerate on a `lockstep.Run`: a script changes its import, and nothing else.

One iteration over a prepared DataLoader is one microbatch, the batch of one replica; `num_processes` is the
number of replicas, also for what a scheduler counts. While the models are in evaluation mode each rank
goes through all of the data by itself, so that `gather_for_metrics` has everything.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import accelerate
import torch
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

from lockstep.engine.data.loader import to_device
from lockstep.integrations import process, refusals
from lockstep.integrations.loaders import global_loader

process.see_alone()


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """`accelerate.Accelerator` that trains through a run.

    Args:
        replicas: number of logical data-parallel workers, each with batches of the DataLoader's size; by
            default the number of processes of the first launch.
        seed: seed of the run: order of the data, dropout, augmentation.
        settings: arguments of `accelerate.Accelerator`.

    Raises:
        UsageError: for a setting that would make the result depend on the layout.
    """

    def __init__(self, *, replicas: int | None = None, seed: int = 0, **settings: Any) -> None:
        refusals.check_accelerator(settings)
        super().__init__(**settings)
        accumulated = self.gradient_state.num_steps
        precision = {"no": "fp32"}.get(self.mixed_precision, self.mixed_precision)
        self._run = process.open_run(
            seed=seed,
            replicas=process.replicas_of(replicas, accumulated),
            precision=precision,
            devices="cpu" if settings.get("cpu") else "auto",
        )
        self.scaler = None  # the run scales losses by itself
        self._is_in_loop = False

    # --- what is trained -------------------------------------------------------------------------------

    def prepare_model(
        self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """Pass a model through the run; one that is only evaluated is moved to the device."""
        if evaluation_mode:
            return model.to(self._run.device)
        self._models.append(self._run.model(model))
        return self._models[-1]

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """Pass an optimizer through the run: it steps once per global batch."""
        self._optimizers.append(self._run.optimizer(optimizer))
        return optimizer

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Pass a scheduler through the run: once per global batch it counts a step for each replica."""
        if self.step_scheduler_with_optimizer and not self.split_batches:
            _count_for(scheduler, self.num_processes)
        self._schedulers.append(self._run.scheduler(scheduler))
        return scheduler

    def prepare_data_loader(
        self,
        data_loader: Any,
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Any = None,
    ) -> Any:
        """Return a loader that yields microbatches, and all of the data in evaluation mode."""
        return _PreparedLoader(self, data_loader)

    # --- a step ----------------------------------------------------------------------------------------

    @property
    def num_processes(self) -> int:
        """Number of replicas, without those that gradients are accumulated over."""
        return self._run.replicas // int(self.gradient_state.num_steps)

    @property
    def sync_gradients(self) -> bool:
        """Whether optimizers act in this iteration."""
        return self._run.sync_gradients

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether an update was left out: one that overflows counts as a step that changes nothing."""
        return False

    def backward(self, loss: torch.Tensor, **_: Any) -> None:
        """Compute the gradients of the mean loss of this microbatch."""
        self._run.backward(loss)

    def accumulate(self, *_: Any) -> AbstractContextManager[None]:
        """Return a context without effect: every microbatch is accumulated."""
        return contextlib.nullcontext()

    def no_sync(self, *_: Any) -> AbstractContextManager[None]:
        """Return a context without effect: gradients are summed once per global batch."""
        return contextlib.nullcontext()

    def join_uneven_inputs(self, *_: Any, **__: Any) -> AbstractContextManager[None]:
        """Return a context without effect: inputs are never uneven."""
        return contextlib.nullcontext()

    def clip_grad_norm_(
        self, parameters: Any, max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """Clip gradients of the global batch by norm."""
        return self._run.clip_grad_norm_(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clip gradients of the global batch by value."""
        self._run.clip_grad_value_(parameters, clip_value)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Do nothing: gradients that a script sees are not scaled."""

    # --- ranks -----------------------------------------------------------------------------------------

    def wait_for_everyone(self) -> None:
        """Wait for all ranks; inside of an iteration, which ranks make different numbers of, go on."""
        if not self._is_in_loop:
            self._run.barrier()

    def main_process_first(self) -> AbstractContextManager[Any]:
        """Return a context whose body runs on the main rank first."""
        return contextlib.nullcontext() if self._is_in_loop else self._run.main_process_first()

    local_main_process_first = main_process_first

    def print(self, *values: Any, sep: str = " ", **_: Any) -> None:
        """Print on the main rank."""
        self._run.print(*values, sep=sep)

    def log(self, values: dict[str, Any], step: int | None = None, log_kwargs: Any = None) -> None:
        """Log values on the main rank, once."""
        if not self._run.is_replaying:
            super().log(values, step=step, log_kwargs=log_kwargs or {})

    # --- files -----------------------------------------------------------------------------------------

    def save_state(
        self, output_dir: str | None = None, safe_serialization: bool = True, **arguments: Any
    ) -> Any:
        """Save models, optimizers and schedulers in accelerate's own layout, on the main rank."""
        saved = None
        if self.is_main_process and self.sync_gradients and not self._run.is_replaying:
            saved = super().save_state(output_dir, safe_serialization, **arguments)
        self.wait_for_everyone()
        return saved

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save objects with the run, too."""
        for value in objects:
            self._run.register(f"checkpointed-{len(self._custom_objects) + 1}", value)
            super().register_for_checkpointing(value)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Refuse to skip: a run continues by itself where it stopped."""
        process.refuse(
            "skip_first_batches", "--run-dir, with which a run continues where it stopped"
        )

    def end_training(self) -> None:
        """End the trackers and the run."""
        for tracker in self.trackers:
            tracker.finish()
        process.end_run()


class _PreparedLoader:
    """A DataLoader of a script: microbatches while models train, else all of the data on each rank."""

    def __init__(self, accelerator: Accelerator, data: DataLoader[Any]) -> None:
        self._accelerator, self._data = accelerator, data
        self._loader: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._data, name)

    @property
    def _global(self) -> Any:
        own = self._accelerator
        if self._loader is None:  # one that is only evaluated over needs none
            times = own.gradient_state.num_steps if own.split_batches else own._run.replicas
            self._loader = global_loader(own._run, self._data, times)
        return self._loader

    @property
    def total_batch_size(self) -> int:
        """Samples of a global batch."""
        return int(self._global.batch_size)

    def __len__(self) -> int:
        """Return the number of iterations that a process of accelerate would make with as many replicas."""
        if not self._trains:
            return len(self._data)
        return len(self._global) * int(self._accelerator.gradient_state.num_steps)

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: the run counts epochs."""

    @property
    def _trains(self) -> bool:
        models = self._accelerator._models
        return not models or any(model.training for model in models)

    def __iter__(self) -> Iterator[Any]:
        accelerator = self._accelerator
        if not self._trains:
            for batch in self._data:
                yield to_device(batch, accelerator._run.device)
            return
        loader = self._global
        try:
            for batch in loader:
                accelerator._is_in_loop = True
                yield batch
        finally:
            accelerator._is_in_loop = False


def _count_for(scheduler: Any, replicas: int) -> None:
    """Let each step of a scheduler count for so many replicas, as accelerate does for processes."""
    own = type(scheduler)
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) or replicas == 1:
        return

    def step(self: Any, *args: Any, **kwargs: Any) -> None:
        for _ in range(replicas):
            # A schedule of fixed length, such as OneCycleLR, is over at its end.
            if self._step_count <= getattr(self, "total_steps", self._step_count):
                own.step(self, *args, **kwargs)

    named = {"step": step, "__module__": own.__module__, "__qualname__": own.__qualname__}
    scheduler.__class__ = type(own.__name__, (own,), {**named, "__slots__": ()})
