"""`Accelerator` of accelerate on a `lockstep.Run`: a script changes its import, and nothing else.

One iteration over a prepared DataLoader is one microbatch, the batch of one replica. `num_processes` is the
number of replicas. After each update a scheduler makes one step per replica, as accelerate makes one per
process. While the models are in evaluation mode each rank iterates over all of the data, so that
`gather_for_metrics` has nothing to gather.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import accelerate
import torch
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

from lockstep.engine.data.loader import to_device
from lockstep.integrations import alone, process, refusals
from lockstep.integrations.loaders import global_loader

alone.see_alone()


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """`accelerate.Accelerator` whose training loop is executed by a `lockstep.Run`.

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
        self._run = process.current.open(
            seed=seed,
            replicas=process.replicas_of(replicas, accumulated),
            precision=precision,
            devices="cpu" if settings.get("cpu") else "auto",
        )
        self.scaler = None  # the run scales losses by itself
        self._is_in_loop = False
        self._late_saves: list[Callable[[], Any]] = []

    # --- what is trained -------------------------------------------------------------------------------

    def prepare_model(
        self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """Return `model` wrapped by `run.model`.

        With `evaluation_mode`, only move the model to the run's device and return it.
        """
        if evaluation_mode:
            return model.to(self._run.device)
        self._models.append(self._run.model(model))
        return self._models[-1]

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """Pass `optimizer` to `run.optimizer`, so that it steps once per global batch; return it."""
        self._optimizers.append(self._run.optimizer(optimizer))
        return optimizer

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Pass `scheduler` to `run.scheduler` and return it.

        By default the scheduler makes one step per replica after each global batch, as accelerate makes one
        step per process.
        """
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
        """Return a loader of this rank's microbatches, or of all batches in eval mode.

        `data_loader` gives the batches. The other arguments are those of Accelerate, and are not used.
        """
        return _PreparedLoader(self, data_loader)

    # --- a step ----------------------------------------------------------------------------------------

    @property
    def num_processes(self) -> int:
        """Number of the script's replicas; accelerate itself has the number of processes here.

        If the script accumulates gradients over k batches, the run has k times as many replicas.
        """
        return self._run.replicas // int(self.gradient_state.num_steps)

    @property
    def sync_gradients(self) -> bool:
        """Whether this microbatch is the last of a global batch, at which optimizers step."""
        return self._run.sync_gradients

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Always `False`: a step whose fp16 gradients overflow changes nothing, but counts as a step."""
        return False

    def backward(self, loss: torch.Tensor, **_: Any) -> None:
        """Compute the gradients of `loss`, the mean over this microbatch, by `run.backward`."""
        self._run.backward(loss)

    def accumulate(self, *_: Any) -> AbstractContextManager[None]:
        """Return a context manager without effect: the run itself accumulates gradients."""
        return contextlib.nullcontext()

    def no_sync(self, *_: Any) -> AbstractContextManager[None]:
        """Return a context manager without effect: gradients are summed once per global batch."""
        return contextlib.nullcontext()

    def join_uneven_inputs(self, *_: Any, **__: Any) -> AbstractContextManager[None]:
        """Return a context manager without effect: all ranks have the same number of updates."""
        return contextlib.nullcontext()

    def clip_grad_norm_(
        self, parameters: Any, max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """Scale the global batch's gradients to a total norm of at most `max_norm`; return the old norm."""
        return self._run.clip_grad_norm_(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Limit each element of the global batch's gradients to the range `-clip_value` to `clip_value`."""
        self._run.clip_grad_value_(parameters, clip_value)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Do nothing: gradients have no loss scale any more when the script can read them."""

    def set_trigger(self) -> None:
        """Set the flag that `check_trigger` reads; in a loop over a loader, raise a `UsageError`."""
        self._refuse_in_loop("set_trigger")
        super().set_trigger()

    def check_trigger(self) -> bool:
        """Return whether `set_trigger` was called; in a loop over a loader, raise a `UsageError`."""
        self._refuse_in_loop("check_trigger")
        return bool(super().check_trigger())

    def _refuse_in_loop(self, method: str) -> None:
        if self._is_in_loop:
            process.refuse(
                f"{method} in a loop over a loader",
                "a decision after the epoch, from an evaluation, which has the same values on every rank",
            )

    # --- ranks -----------------------------------------------------------------------------------------

    def wait_for_everyone(self) -> None:
        """Wait for all ranks; in a loop over a loader, do nothing.

        Inside a loop ranks may have different numbers of iterations, so that they cannot wait for each
        other.
        """
        if not self._is_in_loop:
            self._run.barrier()

    def main_process_first(self) -> AbstractContextManager[Any]:
        """Return a context manager that the main rank enters first; it has no effect inside a loop.

        A loop is a loop over a loader. Ranks may have different numbers of iterations there.
        """
        return contextlib.nullcontext() if self._is_in_loop else self._run.main_process_first()

    local_main_process_first = main_process_first

    def print(self, *values: Any, sep: str = " ", **_: Any) -> None:
        """Print values on the main rank, but not again while a resumed run repeats earlier calls."""
        if not self._run.is_replaying:
            self._run.print(*values, sep=sep)

    def log(self, values: dict[str, Any], step: int | None = None, log_kwargs: Any = None) -> None:
        """Log values on the main rank, but not again while a resumed run repeats earlier calls."""
        if not self._run.is_replaying:
            super().log(values, step=step, log_kwargs=log_kwargs or {})

    # --- files -----------------------------------------------------------------------------------------

    def save_state(
        self, output_dir: str | None = None, safe_serialization: bool = True, **arguments: Any
    ) -> Any:
        """Save models, optimizers and schedulers in accelerate's file format, on the main rank.

        If further microbatches of the same global batch follow, the files are written after the last one,
        so that they contain the optimizer's update.
        """
        saved = None
        if self.is_main_process and not self._run.is_replaying:
            save = functools.partial(
                super().save_state, output_dir, safe_serialization, **arguments
            )
            if self.sync_gradients:
                saved = save()
            else:
                self._late_saves.append(save)
        self.wait_for_everyone()
        return saved

    def _save_late(self) -> None:
        """Write the files that `save_state` has postponed to the last microbatch of the global batch."""
        while self._late_saves and self.sync_gradients:
            self._late_saves.pop(0)()

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save and restore `objects` with the run, and with accelerate's own checkpoints."""
        for value in objects:
            self._run.register(f"checkpointed-{len(self._custom_objects) + 1}", value)
            super().register_for_checkpointing(value)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Raise a `UsageError`: a resumed run continues at the right batch by itself."""
        process.refuse(
            "skip_first_batches", "--run-dir, with which a run continues where it stopped"
        )

    def end_training(self) -> None:
        """Finish accelerate's trackers (such as TensorBoard), and end the run."""
        for tracker in self.trackers:
            tracker.finish()
        process.current.end()


class _PreparedLoader:
    """A script's DataLoader after `prepare`: yields this rank's microbatches while a model trains.

    While all models are in evaluation mode it yields all batches of the DataLoader, on each rank.
    """

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
        """Number of samples of a global batch."""
        return int(self._global.batch_size)

    def __len__(self) -> int:
        """Return the number of iterations in one loop over the loader.

        While a model trains this is the number of batches of one replica of the script. Otherwise it is the
        number of batches of the DataLoader.
        """
        if not self._trains:
            return len(self._data)
        return len(self._global) * int(self._accelerator.gradient_state.num_steps)

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: the run counts epochs itself."""

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
                accelerator._save_late()
        finally:
            accelerator._is_in_loop = False


def _count_for(scheduler: Any, replicas: int) -> None:
    """Change `scheduler` so that each call of `step()` makes `replicas` steps.

    Accelerate makes one step per process in each call.
    """
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
