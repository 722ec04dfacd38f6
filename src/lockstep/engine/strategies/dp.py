"""Strategy `dp`: `nn.DataParallel`, one process with a thread for each GPU.

In every forward pass the inputs are scattered to the GPUs, the module is copied to each GPU, and the
outputs are gathered on the first one. In the backward pass the first GPU receives all gradients.
Without a GPU the module is used unchanged, as in PyTorch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel

from lockstep.engine.strategies.checks import index_of, refuse_sparse, refuse_unknown
from lockstep.engine.strategies.model_context import ModelContext
from lockstep.engine.strategies.single import SingleModel
from lockstep.engine.strategies.wrapped_model import WrappedModel
from lockstep.errors import DeviceError, ExactnessError
from lockstep.world import accelerator

#: Methods that `TransparentDataParallel` forwards to the wrapped module. With those of `nn.DataParallel`
#: itself, names of parameters would begin with `module.`.
_OWN = ("state_dict", "load_state_dict", "named_parameters", "named_buffers", "named_modules")
#: Forwarded by a subclass if the module has them: Python looks them up on the class, not the object.
_SPECIAL = ("__len__", "__getitem__", "__setitem__", "__delitem__", "__iter__", "__contains__")


class DataParallelModel(SingleModel):
    """A model inside `nn.DataParallel`, which computes each forward pass on all GPUs of the process."""

    def __init__(self, module: nn.Module, context: ModelContext, settings: dict[str, Any]) -> None:
        super().__init__(module, context)
        self._scattered = scatter(module, settings)
        # Each GPU computes its own batch statistics and dropout, and sums gradients in a different order.
        self.exactness = "close" if len(self._scattered.device_ids) > 1 else "exact"

    @property
    def wrapped(self) -> nn.Module:
        """The `nn.DataParallel` module, which the script calls in place of the module that it created."""
        return self._scattered


def check_settings(
    module: nn.Module, settings: dict[str, Any], *, exact: bool, device: torch.device
) -> None:
    """Check a model, the keywords of `run.model` and the number of GPUs for `nn.DataParallel`.

    Raises:
        DeviceError: if `device_ids` has invisible or repeated GPUs, or does not begin with the
            run's GPU; on the CPU, if `device_ids` or `output_device` is given.
        ExactnessError: with `exact`, for several GPUs.
        ModelError: for sparse gradients, or a keyword that DataParallel does not have.
    """
    refuse_sparse(module)
    refuse_unknown(DataParallel, settings)
    if device.type == "cpu":
        for name in ("device_ids", "output_device"):
            if settings.get(name) is not None:
                raise DeviceError(
                    f"{name}={settings[name]!r} with strategy=dp, and the run computes on the CPU; "
                    "expected GPUs",
                    hint=f"leave {name} out: then the model runs as it is where there is no GPU",
                )
        return
    ids = choose_devices(settings.get("device_ids"), device.index, accelerator.count())
    if exact and len(ids) > 1:
        raise ExactnessError(
            f"strategy=dp on GPUs {', '.join(map(str, ids))}: the result depends on how many there are, "
            "since each computes its own statistics and sums on a piece of the batch",
            hint="strategy='ddp', or say exact=False to the run (lockstep run --no-exact)",
        )


def choose_devices(asked: Sequence[Any] | None, own: int, count: int) -> list[int]:
    """Return the indices of the GPUs to compute on: `asked`, or by default all, with `own` as the first.

    `own`: the GPU on which the run keeps its models and batches. `count`: number of visible GPUs. A
    `DeviceError` is raised if `asked` has invisible or repeated indices, or does not begin with `own`.
    """
    if asked is None:
        return [own, *(k for k in range(count) if k != own)]
    ids = [index_of(one) for one in asked]
    if not ids or len(set(ids)) < len(ids) or not all(k in range(count) for k in ids):
        raise DeviceError(
            f"device_ids={list(asked)!r}; expected different ones of the {count} GPU(s) that this "
            "process sees",
            hint=f"indices count from 0 among what {accelerator.facts().visible} leaves visible",
        )
    if ids[0] != own:
        raise DeviceError(
            f"device_ids={list(asked)!r} begins with another GPU than cuda:{own}, on which the run "
            f"keeps its models; expected {own} to be the first",
            hint=f"device_ids=[{own}, …], or choose the run's GPU with --devices",
        )
    return [k for k in ids if k is not None]


def wrap(module: nn.Module, context: ModelContext, settings: dict[str, Any]) -> WrappedModel:
    """Return `module` wrapped in `nn.DataParallel`; without a GPU return it unwrapped, with a warning.

    `settings`: the keywords given to `run.model`.
    """
    if context.device.type == "cpu":
        context.warn(
            f"lockstep: strategy=dp without a GPU: {type(module).__name__} runs as it is, "
            "on the CPU and in one thread of Python"
        )
        return SingleModel(module, context)
    own = context.device.index
    ids = choose_devices(settings.get("device_ids"), own, accelerator.count())
    return DataParallelModel(module, context, {**settings, "device_ids": ids})


# --- DataParallel with the attributes and names of the module inside ---------------------------------


class TransparentDataParallel(DataParallel[nn.Module]):
    """`nn.DataParallel` with the attributes, parameter names and `state_dict` of the wrapped module.

    So no key of a checkpoint begins with `module.`. Created by `scatter`.
    """

    _is_complete = False

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if self._is_complete and name not in self.__dict__ and not hasattr(type(self), name):
            setattr(self.module, name, value)
        else:
            super().__setattr__(name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """Return a deep copy of the module without `nn.DataParallel`, as `AveragedModel` needs."""
        copied: nn.Module = copy.deepcopy(self.module, memo)
        return copied


def scatter(module: nn.Module, settings: dict[str, Any]) -> TransparentDataParallel:
    """Return `module` wrapped in a `TransparentDataParallel`; its `state_dict` is that of `module`."""
    names = [*_OWN, *(name for name in _SPECIAL if hasattr(type(module), name))]
    kind = type(
        "TransparentDataParallel",
        (TransparentDataParallel,),
        {name: _forward(name) for name in names},
    )
    wrapped: TransparentDataParallel = kind(module, **settings)
    wrapped._is_complete = True
    return wrapped


def _forward(name: str) -> Callable[..., Any]:
    def method(self: TransparentDataParallel, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.module, name)(*args, **kwargs)

    return method
