"""BatchNorm whose statistics are those of the global batch, gathered in every forward pass.

The method is that of torch.nn.SyncBatchNorm, on any device. Each rank computes the number of values, the
mean and the sum of squared deviations of its samples. Two ranks' statistics are merged by the formula of
Chan, Golub and LeVeque ("Updating formulae and a pairwise algorithm for computing sample variances", 1979),
in the order of a tree over ranks. Ranks may have different numbers of samples. The bits depend on the
number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from lockstep.engine.exchange.scatter import gather_rows
from lockstep.errors import ModelError, StepError

#: Types of inputs whose statistics are computed in fp32, since their sums would be too coarse.
_COARSE = (torch.float16, torch.bfloat16)


class Ranks:
    """The ranks over which BatchNorm statistics are merged.

    `counts`: function that returns whether this rank's current samples enter the statistics. A rank whose
    share of the batch is empty computes a repeated sample, with weight 0, which does not.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        counts: Callable[[], bool] = lambda: True,
        collective: Callable[[], AbstractContextManager[None]] = nullcontext,
        exactness: str = "exact",
    ) -> None:
        self.exactness = exactness
        self.collective = collective
        self.counts = counts
        self.group = group
        self.size = 1 if group is None else dist.get_world_size(group)

    def fold(
        self, own: torch.Tensor, merge: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """All-gather `own`, and merge the tensors of all ranks; all ranks get the same bits.

        `merge`: merges row i of one matrix with row i of another, for all i at once; each row is a flat
        `own` or a result.
        """
        assert self.group is not None
        return fold(gather_rows(own, self.group), merge)

    def __deepcopy__(self, _memo: object) -> Ranks:
        return self  # a copy of a model is on the same ranks

    def __reduce__(self) -> tuple[type[Ranks], tuple[None]]:
        return Ranks, (None,)  # a model that is loaded from a file is alone


def fold(
    rows: torch.Tensor, merge: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Merge all `rows` into one row in the order of a binary tree, with one call of `merge` per level.

    Adjacent rows are siblings; an odd last row moves to the next level unmerged, as in `layout/tree.py`.
    `merge`: function that merges row i of one matrix with row i of another, for all i at once, such as
    `_merge`.
    """
    while len(rows) > 1:
        even = len(rows) // 2 * 2
        merged = merge(rows[0:even:2], rows[1:even:2])
        rows = merged if even == len(rows) else torch.cat([merged, rows[even:]])
    return rows[0]


class SyncedBatchNorm(_BatchNorm):
    """BatchNorm layer that in training mode uses statistics of all ranks' samples.

    `convert` creates such layers from other BatchNorm layers.
    """

    kind: type[_BatchNorm]
    ranks: Ranks

    @property
    def needs_all_ranks(self) -> bool:
        """Whether a forward pass in training mode is collective, even under `torch.no_grad()`.

        It is if the run has several ranks.
        """
        return self.ranks.size > 1

    def _check_input_dim(self, input: torch.Tensor) -> None:  # noqa: A002 - the name that torch gives it
        self.kind._check_input_dim(self, input)  # type: ignore[no-untyped-call]

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - as above
        """Return `input`, of shape `(samples, channels, …)`, normalised per channel.

        In training mode the statistics are those of the samples of all ranks; then the call is collective.
        """
        if not self.training or self.ranks.size == 1:
            return super().forward(input)
        self._check_input_dim(input)
        counts = self.ranks.counts() and input.numel() > 0
        own = _statistics(input.detach(), counts=counts)
        with self.ranks.collective():
            count, mean, squares = _unpack(self.ranks.fold(own, _merge))
        # `item` waits for the device: called only if this rank has at most one value per channel.
        if (not counts or input.numel() == input.shape[1]) and count.item() <= 1:
            raise ValueError(
                f"Expected more than 1 value per channel when training, got input size {input.shape} "
                "and no other sample in the global batch"
            )
        self._track(count, mean, squares)
        batch = _Batch(mean, squares / count, count, self.eps, counts, self.ranks)
        normalised: torch.Tensor = _Normalise.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, batch
        )
        return normalised

    @torch.no_grad()
    def _track(self, count: torch.Tensor, mean: torch.Tensor, squares: torch.Tensor) -> None:
        """Update the running mean and (unbiased) variance as BatchNorm does.

        `count`: number of values of each channel. `mean`: mean of each channel. `squares`: sum of squared
        deviations of each channel.
        """
        if self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None, "the three buffers come together"
        self.num_batches_tracked.add_(1)
        factor = self.momentum
        if factor is None:  # a cumulative average
            factor = 1.0 / float(self.num_batches_tracked)
        for running, new in ((self.running_mean, mean), (self.running_var, squares / (count - 1))):
            running.mul_(1 - factor).add_(new.to(running.dtype), alpha=factor)


class _Batch(NamedTuple):
    """Statistics of a global batch and settings of a BatchNorm layer, as one argument of `_Normalise`.

    Attributes:
        mean: mean of each channel.
        var: the biased variance of each channel.
        number: number of values of each channel in the global batch.
        counts: whether this rank's samples are part of the statistics; a repeated sample of weight
            0 is not.
    """

    mean: torch.Tensor
    var: torch.Tensor
    number: torch.Tensor
    eps: float
    counts: bool
    ranks: Ranks


class _Normalise(torch.autograd.Function):
    """Autograd function `(x - mean) / sqrt(var + eps) * weight + bias`.

    Mean and variance are those of `x` on all ranks.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        batch: _Batch,
    ) -> torch.Tensor:
        kind = _accumulated(x)
        mean, var = batch.mean.to(kind), batch.var.to(kind)
        invstd = (batch.var + batch.eps).rsqrt().to(kind)
        ctx.save_for_backward(x, weight, mean, invstd, batch.number.to(kind))
        ctx.counts, ctx.ranks = batch.counts, batch.ranks
        return F.batch_norm(x, mean, var, weight, bias, eps=batch.eps)

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():  # with create_graph: these sums have no gradient of their own
            raise StepError(
                "a gradient was taken with create_graph=True through a layer of run.sync_batchnorm, whose "
                "backward pass has no gradient itself; expected one backward pass",
                hint="leave the model as it is, or use GroupNorm or LayerNorm in what is differentiated "
                "twice",
            )
        x, weight, mean, invstd, count = ctx.saved_tensors
        kind = mean.dtype
        shape, dims = _across(x)
        gradient = outer[0].to(kind)
        normal = (x.to(kind) - mean.view(shape)) * invstd.view(shape)
        own = torch.cat([gradient.sum(dims), (gradient * normal).sum(dims)])
        to_bias, to_weight = own.chunk(2)
        to_x = None
        if ctx.needs_input_grad[0]:
            # A sample changes the statistics, and so the outputs of all samples on all ranks.
            total = ctx.ranks.fold(own.double(), torch.add).to(kind)
            if ctx.counts:  # samples that do not count have not changed the statistics
                first, second = (part.view(shape) for part in (total / count).chunk(2))
                gradient = gradient - first - normal * second
            scale = invstd if weight is None else invstd * weight.to(kind)
            to_x = (gradient * scale.view(shape)).to(x.dtype)
        if weight is None:
            return to_x, None, None, None
        return to_x, to_weight.to(weight.dtype), to_bias.to(weight.dtype), None


def _accumulated(x: torch.Tensor) -> torch.dtype:
    return torch.float32 if x.dtype in _COARSE else x.dtype


def _across(x: torch.Tensor) -> tuple[list[int], list[int]]:
    """Return the shape in which a vector over channels broadcasts to `x`, and the other dimensions."""
    others = [dim for dim in range(x.dim()) if dim != 1]
    return [1 if dim in others else -1 for dim in range(x.dim())], others


def _statistics(x: torch.Tensor, *, counts: bool) -> torch.Tensor:
    """Return each channel's mean and sum of squared deviations, and the number of values, as one vector.

    The vector is in fp64. `counts`: whether the samples of `x` enter the statistics; if not, the vector is
    zero.
    """
    channels = x.shape[1]
    if not counts:
        return torch.zeros(2 * channels + 1, dtype=torch.float64, device=x.device)
    _, dims = _across(x)
    var, mean = torch.var_mean(x.to(_accumulated(x)), dims, correction=0)
    count = x.numel() // channels
    number = torch.full((1,), count, dtype=torch.float64, device=x.device)
    return torch.cat([mean.double(), var.double() * count, number])


def _unpack(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    mean, squares = packed[..., :-1].chunk(2, dim=-1)
    return packed[..., -1:], mean, squares


def _merge(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return the statistics of the union of two sets of samples (Chan, Golub, LeVeque 1979, eq. 1.5).

    Each row of `left` is merged with the same row of `right`; a row is a vector from `_statistics`.
    """
    count, mean, squares = _unpack(left)
    more, other, spread = _unpack(right)
    merged = torch.empty_like(left)
    total, merged_mean, merged_squares = _unpack(merged)
    torch.add(count, more, out=total)
    share = more / total.clamp(min=1)  # 0 if both sets are empty
    difference = other - mean
    torch.add(mean, difference * share, out=merged_mean)
    torch.add(squares + spread, difference.square() * count * share, out=merged_squares)
    return merged


def convert(
    module: nn.Module,
    ranks: Ranks,
    name: str = "",
    seen: dict[nn.Module, nn.Module] | None = None,
) -> nn.Module:
    """Return `module` with a `SyncedBatchNorm` in place of each BatchNorm and SyncBatchNorm layer.

    A new layer has the parameters, buffers, hooks and other attributes of the one that it replaces. `name`,
    `seen`: for recursive calls, the name of `module`, and modules that are converted already.

    Raises:
        ModelError: for a layer without shapes yet, with its own forward pass, or with a process group.
    """
    seen = {} if seen is None else seen
    if module in seen:
        return seen[module]
    is_norm = isinstance(module, _BatchNorm) and not isinstance(module, SyncedBatchNorm)
    seen[module] = new = _synced(module, ranks, name) if is_norm else module
    for key, child in list(module._modules.items()):
        if child is not None:
            new._modules[key] = convert(child, ranks, f"{name}.{key}".lstrip("."), seen)
    return new


def _synced(module: nn.Module, ranks: Ranks, name: str) -> SyncedBatchNorm:
    kind = type(module)
    what = f"the layer {name or '(the model itself)'}, a {kind.__name__},"
    if any(map(is_lazy, chain(module.parameters(), module.buffers()))):
        raise ModelError(
            f"{what} has no parameters yet; expected a layer that knows its channels",
            hint="pass one batch through the model before run.sync_batchnorm",
        )
    if kind.forward not in (_BatchNorm.forward, nn.SyncBatchNorm.forward):
        raise ModelError(
            f"{what} has a forward pass of its own, which would be lost; expected PyTorch's",
            hint="convert the model before such layers are put in, or use PyTorch's BatchNorm",
        )
    if getattr(module, "process_group", None) is not None:
        raise ModelError(
            f"{what} has a process group of its own; expected statistics over the global batch",
            hint="create it without process_group",
        )
    new: SyncedBatchNorm = SyncedBatchNorm.__new__(SyncedBatchNorm)
    new.__dict__.update(module.__dict__)
    new.kind, new.ranks = kind, ranks  # type: ignore[assignment]
    return new


def layers(module: nn.Module) -> Iterator[SyncedBatchNorm]:
    """Yield the `SyncedBatchNorm` layers of `module`."""
    return (part for part in module.modules() if isinstance(part, SyncedBatchNorm))
