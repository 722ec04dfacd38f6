"""Which updates give a shard the bits that they give the same elements of the whole parameter."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.optim import Optimizer

from lockstep.checkpoint.parts import local
from lockstep.errors import ExactnessError

#: Optimizers that look at more of a parameter than one element at a time.
_ACROSS = ("Adafactor", "LBFGS", "Muon", "SparseAdam")


def check_updates(optimizer: Optimizer, parameters: Iterable[torch.Tensor]) -> None:
    """Refuse an optimizer whose updates of `parameters`, which are shards, depend on where those are cut.

    Raises:
        ExactnessError: for one that looks at whole tensors, or rounds by place in memory.
    """
    name = type(optimizer).__name__
    where = "with strategy=fsdp it sees shards, so the result would depend on the layout"
    if name in _ACROSS:
        raise ExactnessError(
            f"{name} computes on whole parameters; {where}",
            hint="AdamW, SGD and others that go element by element, strategy='ddp', or exact=False",
        )
    own = [local(parameter) for parameter in parameters]
    if all(part.is_cuda for part in own):
        return
    if any(group.get("fused") for group in optimizer.param_groups):
        raise ExactnessError(
            f"{name} is fused, which rounds by place; {where}", hint="take fused=True out"
        )
    # Vector instructions compute such an update in fp32 and round it once; the elements that are left
    # at the end of a tensor go one by one, and are rounded after each operation.
    short = sorted(
        {str(part.dtype) for part in own if part.dtype.itemsize < torch.float32.itemsize}
    )
    if short:
        raise ExactnessError(
            f"{name} updates parameters of {', '.join(short)} on the CPU, which rounds by place; {where}",
            hint="fp32 parameters with precision='bf16', strategy='ddp', or exact=False",
        )
