"""`FabricStrategy`: the class that a `LockstepStrategy` object gets when it is passed to a `Fabric`.

The script has its own training loop. One iteration over a DataLoader from `fabric.setup_dataloaders` yields
one microbatch: a replica's share of a batch of the DataLoader. While the models are in evaluation mode,
each rank iterates over all batches.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import torch
from lightning.fabric.strategies.single_device import SingleDeviceStrategy

from lockstep.engine.data.loader import to_device
from lockstep.errors import NonFiniteLossError
from lockstep.integrations import lightning_refusals as refusals
from lockstep.integrations.lightning_run import OnRun
from lockstep.integrations.loaders import global_loader
from lockstep.run import Run


class FabricStrategy(OnRun, SingleDeviceStrategy):
    """Strategy of Lightning's `Fabric` that passes models, optimizers and loaders to a run."""

    is_in_loop = False
    _backward_sync_control = None

    @functools.cached_property
    def run(self) -> Run:  # type: ignore[override]
        """The open run; opened at its first use if the script never calls `fabric.launch()`."""
        self.setup_environment()
        return self.__dict__["run"]  # type: ignore[no-any-return]

    def setup_environment(self) -> None:
        """Check Fabric's precision setting, and open the `lockstep.Run` that trains."""
        refusals.check_precision(self.precision)
        self._open_run(self.accelerator)
        super().setup_environment()

    def setup_module(self, module: Any) -> Any:
        """Pass a model to the run; return the wrapped model, which the script calls."""
        return self._model_of(module)

    def setup_optimizer(self, optimizer: Any) -> Any:
        """Pass `optimizer` to `run.optimizer`, so that it steps once per global batch; return it."""
        refusals.check_optimizer(optimizer)
        return self.run.optimizer(optimizer)

    def process_dataloader(self, dataloader: Any) -> Any:
        """Return a loader of this rank's microbatches, or of all batches while models are in eval mode."""
        return _FabricLoader(self, dataloader)

    def backward(self, tensor: torch.Tensor, module: Any, *args: Any, **kwargs: Any) -> None:
        """Compute the gradients of `tensor`, the mean loss of this microbatch; `module` is not used."""
        refusals.check_backward(args, kwargs)
        self.run.backward(tensor)

    def clip_gradients_norm(
        self,
        module: Any,
        optimizer: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:
        """Scale the global batch's gradients to a total norm of at most `max_norm`; return the old norm.

        Raises:
            NonFiniteLossError: if `error_if_nonfinite`, and the norm is infinite or NaN.
        """
        parameters = list(self.precision.main_params(optimizer))
        norm = self.run.clip_grad_norm_(parameters, max_norm, norm_type)
        if error_if_nonfinite and self.run.sync_gradients and not math.isfinite(norm):
            raise NonFiniteLossError(
                f"the norm of the gradients is {float(norm)}; expected a finite one",
                hint="clip_gradients(…, error_if_nonfinite=False) continues",
            )
        return norm

    def clip_gradients_value(self, module: Any, optimizer: Any, clip_val: float) -> None:
        """Limit each element of the global batch's gradients to the range `-clip_val` to `clip_val`."""
        self.run.clip_grad_value_(list(self.precision.main_params(optimizer)), clip_val)

    def barrier(self, *_: Any, **__: Any) -> None:
        """Wait for all ranks; in a loop over a loader, do nothing.

        Inside a loop ranks may have different numbers of iterations, so that they cannot wait for each
        other.
        """
        if not self.is_in_loop:
            self.run.barrier()

    def save_checkpoint(self, path: Any, state: Any, *rest: Any, **settings: Any) -> None:
        """Write a checkpoint on the main rank, if this is the last microbatch of its global batch.

        While a resumed run repeats calls from before the restart, nothing is written.
        """
        if self.run.sync_gradients and not self.run.is_replaying:
            super().save_checkpoint(path, state, *rest, **settings)


class _FabricLoader:
    """Loader around a script's DataLoader: yields this rank's microbatches, or all batches in eval mode."""

    def __init__(self, strategy: FabricStrategy, data: Any) -> None:
        # Fabric copies its public attributes, such as `dataset`, from here to the loader of the script.
        vars(self).update({k: v for k, v in vars(data).items() if not k.startswith("_")})
        self._strategy, self._data = strategy, data
        self._loader: Any = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._data, name)

    def __len__(self) -> int:
        """Return the number of batches of the DataLoader, which is the number of updates."""
        return len(self._data)

    def __iter__(self) -> Iterator[Any]:
        strategy = self._strategy
        run: Run = strategy.run
        models = run._session.state.models
        if models and not any(model.module.training for model in models):
            for batch in self._data:
                yield to_device(batch, run.device)
            return
        if self._loader is None:
            self._loader = global_loader(run, self._data, 1)
        try:
            for batch in self._loader:
                strategy.is_in_loop = True
                yield batch
        finally:
            strategy.is_in_loop = False
