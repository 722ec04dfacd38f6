"""Refuse (raise an error for) options of Lightning that make the result depend on the layout or on time."""

from __future__ import annotations

import inspect
from collections.abc import Sized
from typing import Any

import torch
from lightning.pytorch.utilities.model_helpers import is_overridden

from lockstep.errors import UsageError
from lockstep.integrations.process import refuse
from lockstep.world import World

#: Values of `precision` that were tried; others are refused.
PRECISIONS = ("32-true", "64-true", "bf16-true", "bf16-mixed")
#: Attributes of a Trainer; the only value that is not refused, and what to use instead of others.
_TRAINER: dict[str, tuple[object, str]] = {
    "overfit_batches": (0.0, "limit_train_batches=, which keeps the order of the data"),
    "reload_dataloaders_every_n_epochs": (0, "one DataLoader for all epochs"),
    "_val_check_time_interval": (None, "val_check_interval= as a number of batches"),
}
#: Classes of callbacks that are refused; what to use instead.
_CALLBACKS: dict[str, str] = {
    "Timer": "max_steps= or max_epochs=: the number of steps in a given time depends on the layout",
    "StochasticWeightAveraging": "an average of weights with run.register of lockstep.Run",
    "WeightAveraging": "an average of weights with run.register of lockstep.Run",
    "BatchSizeFinder": "batch_size= of the DataLoader: a size that is found depends on the device",
    "LearningRateFinder": "lr= of the optimizer",
}
#: Methods of a LightningModule that may not be overridden; what to use instead.
_METHODS: dict[str, str] = {
    "backward": "a loss that training_step returns; the run computes its gradients",
    "on_before_batch_transfer": "on_after_batch_transfer, or collate_fn of the DataLoader",
}


def check_processes(strategy: Any, world: World) -> None:
    """Raise an error if the Trainer's `devices=` or `num_nodes=` contradicts the processes of the world.

    Raises:
        UsageError: if `devices=` is not 1 or the number of ranks or accelerators of this node, or
            `num_nodes=` is not 1 or the number of nodes.
    """
    devices = len(strategy.parallel_devices)
    if devices not in (1, world.local_size, torch.accelerator.device_count()):
        _refuse_count("devices", devices, world.local_size)
    if strategy.num_nodes not in (1, world.node_count):
        _refuse_count("num_nodes", strategy.num_nodes, world.node_count)


def _refuse_count(option: str, count: int, real: int) -> None:
    raise UsageError(
        f"{option}={count} was given; there are {real}: LockstepStrategy starts no processes",
        hint=f"leave {option}= out; lockstep run -n N script.py, or torchrun, starts N processes",
    )


def check_precision(plugin: Any) -> None:
    """Raise an error for a precision that has not been tried with Lockstep, such as `16-mixed`."""
    if plugin.precision not in PRECISIONS:
        refuse(f"precision={plugin.precision!r}", "precision= one of " + ", ".join(PRECISIONS))


def check_trainer(trainer: Any, strategy: Any) -> None:
    """Raise an error if the trainer or its module would make the result depend on the layout.

    Options and callbacks of `trainer` are checked, and methods of its module. `strategy` shows whether the
    trainer was to synchronize BatchNorm layers.

    Raises:
        UsageError: for the first problem; the hint says what to use instead.
    """
    for name, (allowed, instead) in _TRAINER.items():
        if getattr(trainer, name) != allowed:
            shown = "val_check_interval" if name.startswith("_") else name
            refuse(f"Trainer({shown}={getattr(trainer, name)!r})", instead)
    if strategy._layer_sync is not None:
        refuse(
            "Trainer(sync_batchnorm=True)",
            "BatchNorm as it is, with the statistics of one replica, or lockstep.Run.sync_batchnorm",
        )
    for callback in trainer.callbacks:
        for kind in type(callback).__mro__:
            if kind.__name__ in _CALLBACKS:
                refuse(f"the callback {type(callback).__name__}", _CALLBACKS[kind.__name__])
    module = trainer.lightning_module
    for name, instead in _METHODS.items():
        if is_overridden(name, module):
            refuse(f"{type(module).__name__}.{name}", instead)
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        refuse("training_step(dataloader_iter)", "training_step(self, batch, batch_idx)")


def check_optimizer(optimizer: Any) -> None:
    """Raise an error for an optimizer that computes the loss several times in a step (LBFGS)."""
    if isinstance(optimizer, torch.optim.LBFGS):
        refuse("LBFGS", "an optimizer whose step() needs no closure")


def check_data(data: Any, trainer: Any) -> None:
    """Raise an error unless the training data is one DataLoader over a dataset with a length."""
    loader = trainer.fit_loop._data_source.instance
    if isinstance(loader, list | tuple | dict):
        refuse("several train DataLoaders", "one DataLoader, over a dataset that joins the others")
    if not (
        isinstance(data, torch.utils.data.DataLoader)
        and isinstance(data.dataset, Sized)
        and hasattr(type(data.dataset), "__getitem__")
    ):
        refuse(
            f"a train DataLoader without a length ({type(data).__name__})",
            "a torch.utils.data.DataLoader over a dataset with __getitem__ and __len__",
        )


def check_backward(args: Any, kwargs: Any) -> None:
    """Raise an error for arguments of `manual_backward` besides the loss, such as `retain_graph`."""
    if args or any(kwargs.values()):
        refuse(
            f"manual_backward(…, {', '.join(kwargs) or repr(args[0])})",
            "one manual_backward(loss_a + loss_b) for each step of an optimizer",
        )
