"""Strategy `dp`: `nn.DataParallel`, one process with a thread for each GPU.

In every forward pass the inputs are cut to as many pieces as there are GPUs, the module is copied to
each of them, and the outputs are gathered on one; in the backward pass the first GPU receives all
gradients. Without a GPU it is the module as it is, as in PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel

from lockstep.errors import DeviceError, ExactnessError
from lockstep.strategies.checks import index_of, refuse_sparse, refuse_unknown
from lockstep.strategies.model_context import ModelContext
from lockstep.strategies.single import SingleModel
from lockstep.strategies.wrapped_model import WrappedModel
from lockstep.strategies.wrapper import wrap


class DataParallelModel(SingleModel):
    """A model that threads copy to several GPUs, for every forward pass of every replica.

    Args:
        module: the user's model, on the first of the GPUs.
        replicas: number of replicas in all.
        settings: keyword arguments for DataParallel, with the GPUs where there are any.
    """

    def __init__(self, module: nn.Module, replicas: int, settings: dict[str, Any]) -> None:
        super().__init__(module, replicas)
        self._scattered = wrap(module, settings)
        # Each piece has statistics and a dropout of its own, and gradients are added in another order.
        self.exactness = "close" if len(self._scattered.device_ids) > 1 else "exact"

    @property
    def wrapped(self) -> nn.Module:
        """The module inside DataParallel."""
        return self._scattered


def check_settings(
    module: nn.Module, settings: dict[str, Any], *, exact: bool, device: torch.device
) -> None:
    """Refuse what DataParallel cannot do here, and with `exact` several GPUs.

    Raises:
        DeviceError: for devices that the run does not compute on.
        ExactnessError: for several GPUs.
        ModelError: for sparse gradients, or a setting that DataParallel does not have.
    """
    refuse_sparse(module)
    refuse_unknown(DataParallel, settings)
    if device.type == "cpu":
        _refuse_devices(settings)
        return
    ids = choose_devices(settings.get("device_ids"), device.index, torch.cuda.device_count())
    if exact and len(ids) > 1:
        raise ExactnessError(
            f"strategy=dp on GPUs {', '.join(map(str, ids))}: the result depends on how many there are, "
            "since each computes its own statistics and sums on a piece of the batch",
            hint="strategy='ddp', or say exact=False to the run (lockstep run --no-exact)",
        )


def _refuse_devices(settings: dict[str, Any]) -> None:
    for name in ("device_ids", "output_device"):
        if settings.get(name) is not None:
            raise DeviceError(
                f"{name}={settings[name]!r} with strategy=dp, and the run computes on the CPU; "
                "expected GPUs",
                hint=f"leave {name} out: then the model runs as it is where there is no GPU",
            )


def choose_devices(asked: Sequence[Any] | None, own: int, count: int) -> list[int]:
    """Return the GPUs to compute on: those that were asked for, or all, the run's own first.

    Args:
        asked: the setting `device_ids`.
        own: the GPU on which the run keeps its models and batches.
        count: how many GPUs this process sees.

    Raises:
        DeviceError: if they are not there, or the first is another one than the run's.
    """
    if asked is None:
        return [own, *(k for k in range(count) if k != own)]
    ids = [index_of(one) for one in asked]
    if not ids or len(set(ids)) < len(ids) or not all(k in range(count) for k in ids):
        raise DeviceError(
            f"device_ids={list(asked)!r}; expected different ones of the {count} GPU(s) that this "
            "process sees",
            hint="indices count from 0 among what CUDA_VISIBLE_DEVICES leaves visible",
        )
    if ids[0] != own:
        raise DeviceError(
            f"device_ids={list(asked)!r} begins with another GPU than cuda:{own}, on which the run "
            f"keeps its models; expected {own} to be the first",
            hint=f"device_ids=[{own}, …], or choose the run's GPU with --devices",
        )
    return [k for k in ids if k is not None]


def scatter(module: nn.Module, context: ModelContext, settings: dict[str, Any]) -> WrappedModel:
    """Hold `module` inside DataParallel; without a GPU as it is, which is said."""
    if context.device.type == "cpu":
        context.warn(
            f"lockstep: strategy=dp without a GPU: {type(module).__name__} runs as it is, "
            "on the CPU and in one thread of Python"
        )
        return SingleModel(module, context.replicas)
    own = context.device.index
    ids = choose_devices(settings.get("device_ids"), own, torch.cuda.device_count())
    return DataParallelModel(module, context.replicas, {**settings, "device_ids": ids})
