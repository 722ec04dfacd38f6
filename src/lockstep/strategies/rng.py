"""Parts of a model that depend on how a batch or a layer is divided: they draw, or look at all samples."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm

from lockstep.data.randomness import Generators


def draws(module: nn.Module) -> bool:
    """Whether a part is one of torch's that draw in training; what else draws shows when it does."""
    return any(map(_draws, module.modules()))


def _draws(part: nn.Module) -> bool:
    if isinstance(part, _DropoutNd):
        return bool(part.p > 0)
    if isinstance(part, nn.MultiheadAttention):
        return bool(part.dropout > 0)
    if isinstance(part, nn.RNNBase):
        return bool(part.dropout > 0 and part.num_layers > 1)
    return isinstance(part, nn.RReLU | nn.FractionalMaxPool2d | nn.FractionalMaxPool3d)


def looks_at_batches(module: nn.Module) -> bool:
    """Whether a part of `module` computes with statistics of a batch, or keeps them."""
    return any(
        isinstance(part, _NormBase)
        and (part.track_running_stats or not isinstance(part, _InstanceNorm))
        for part in module.modules()
    )


class DrawWatch:
    """Looks whether forward passes of a module draw, until one has.

    Args:
        module: the module.
        tell: called once, when it has drawn.
    """

    def __init__(self, module: nn.Module, tell: Callable[[], None]) -> None:
        self._tell = tell
        self._before: Generators | None = None
        self._hooks = [
            module.register_forward_pre_hook(self._begin),
            module.register_forward_hook(self._end),
        ]

    def _begin(self, _module: nn.Module, _inputs: object) -> None:
        self._before = Generators.now()

    def _end(self, _module: nn.Module, _inputs: object, _output: torch.Tensor) -> None:
        before, self._before = self._before, None
        if before is not None and Generators.now().since(before) is not None:
            for hook in self._hooks:
                hook.remove()
            self._tell()
