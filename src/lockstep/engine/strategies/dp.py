"""Strategy `dp`: `nn.DataParallel`, one process with a thread for each GPU.

In every forward pass the inputs are cut to as many pieces as there are GPUs, the module is copied to
each of them, and the outputs are gathered on one; in the backward pass the first GPU receives all
gradients. Without a GPU it is the module as it is, as in PyTorch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
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

#: What Python looks up on the class rather than on the object, where a module may define it.
_SPECIAL = ("__len__", "__getitem__", "__setitem__", "__delitem__", "__iter__", "__contains__")


class DataParallelModel(SingleModel):
    """A model that threads copy to several GPUs, for every forward pass of every replica."""

    def __init__(self, module: nn.Module, context: ModelContext, settings: dict[str, Any]) -> None:
        super().__init__(module, context)
        self._scattered = scatter(module, settings)
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
    """Return the GPUs to compute on: those that were asked for, or all, the run's own first.

    `own`: the GPU on which the run keeps its models and batches.

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
    """Wrap `module` in DataParallel; without a GPU leave it as it is, with a warning."""
    if context.device.type == "cpu":
        context.warn(
            f"lockstep: strategy=dp without a GPU: {type(module).__name__} runs as it is, "
            "on the CPU and in one thread of Python"
        )
        return SingleModel(module, context)
    own = context.device.index
    ids = choose_devices(settings.get("device_ids"), own, accelerator.count())
    return DataParallelModel(module, context, {**settings, "device_ids": ids})


# --- DataParallel that looks like the module inside -------------------------------------------------


class Scattered(DataParallel[nn.Module]):
    """DataParallel under the names of the module inside.

    Attributes, parameter names and `state_dict` are the module's own, so that a script reads the
    same on every layout and no checkpoint has keys that begin with `module.`. Made by `scatter`.
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

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's own state."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load a state into the module."""
        return self.module.load_state_dict(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the module's parameters under the module's own names."""
        yield from self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the module's buffers under the module's own names."""
        yield from self.module.named_buffers(*args, **kwargs)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """Yield the module's parts under the module's own names."""
        yield from self.module.named_modules(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """Return a copy of the module: what an average of weights, say, is made from."""
        copied: nn.Module = copy.deepcopy(self.module, memo)
        return copied


def scatter(module: nn.Module, settings: dict[str, Any]) -> Scattered:
    """Return `module` inside a `Scattered` that also has the special methods of its class."""
    names = [name for name in _SPECIAL if hasattr(type(module), name)]
    kind = type("Scattered", (Scattered,), {name: _forward(name) for name in names})
    wrapped: Scattered = kind(module, **settings)
    wrapped._is_complete = True
    return wrapped


def _forward(name: str) -> Callable[..., Any]:
    def method(self: Scattered, *args: Any) -> Any:
        return getattr(self.module, name)(*args)

    return method
