"""Detection of modules that draw random numbers or compute statistics of a batch.

Results of such modules depend on how a model or a batch is divided over ranks.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm

from lockstep.engine.data.randomness import Generators
from lockstep.engine.strategies.passes import watch_forward


def draws(module: nn.Module) -> bool:
    """Whether a submodule is a torch layer that draws random numbers in training, such as dropout."""
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
    """Whether a submodule, such as BatchNorm, uses or updates statistics of a batch."""
    return any(
        isinstance(part, _NormBase)
        and (part.track_running_stats or not isinstance(part, _InstanceNorm))
        for part in module.modules()
    )


def watch_draws(module: nn.Module, act: Callable[[], None]) -> None:
    """Call `act` once, after the first forward pass of `module` that has drawn random numbers."""
    before: Generators | None = None

    def begin() -> None:
        nonlocal before
        before = Generators.now()

    def look() -> None:
        if before is not None and Generators.now().since(before) is not None:
            end()
            act()

    end = watch_forward(module, begin, look)
