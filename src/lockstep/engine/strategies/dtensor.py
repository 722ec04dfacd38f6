"""State of models whose tensors are `DTensor`s (sharded): each rank saves and loads its own shards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from lockstep.engine.strategies import optimizer_state
from lockstep.errors import ExactnessError
from lockstep.state.checkpoint.parts import Box, StoredTensor, cut_of, is_dtensor, local
from lockstep.world import accelerator

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def bytes_here(tensors: Iterable[torch.Tensor]) -> int:
    """Return the total bytes of this rank's parts of `tensors`; a tensor on the device `meta` has none."""
    own = map(local, tensors)
    return sum(part.numel() * part.element_size() for part in own if not part.is_meta)


def cut_dimension(like: DTensor) -> int:
    """Return the tensor dimension along which a `DTensor` is sharded over ranks."""
    cut = cut_of(like)
    assert cut is not None
    return cut.dimension


def part_of(value: Any, like: Any) -> Any:
    """Return a whole tensor as a `DTensor` that is sharded over ranks as the `DTensor` `like` is.

    `value`: the tensor, or a `StoredTensor` (a tensor in a checkpoint, read on demand). The tensor is
    returned whole if `like` is no `DTensor` or has a different shape. Values of other types are returned
    unchanged.
    """
    if not isinstance(value, torch.Tensor | StoredTensor):
        return value
    if is_dtensor(value) or not is_dtensor(like) or value.shape != like.shape:
        return value.read() if isinstance(value, StoredTensor) else value
    cut, mesh = cut_of(like), like.device_mesh
    box = Box.whole(like.shape) if cut is None else cut.box(like.shape, mesh.get_local_rank())
    if isinstance(value, StoredTensor):
        own = value.fetch(box)
    else:
        own = box.of(value.detach()).clone(memory_format=torch.contiguous_format)
    return assembled(own.to(local(like).device), like)


def assembled(own: torch.Tensor, like: DTensor) -> DTensor:
    """Return a `DTensor` of which `own` is this rank's part; shape and placements are those of `like`."""
    from torch.distributed.tensor import DTensor

    made: DTensor = DTensor.from_local(
        own,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
    return made


class CutState:
    """Mixin of a `WrappedModel` whose tensors are `DTensor`s: each rank saves and loads its own shards."""

    is_split = is_cut = True
    module: nn.Module

    def state(self) -> dict[str, Any]:
        """Return the model's `state_dict`, with this rank's part of each tensor."""
        # The hook of `refuse_state_dict` raises an error for calls of a script, which lack `keep_vars`.
        own: dict[str, Any] = self.module.state_dict(keep_vars=True)
        return type(own)(
            {n: v.detach() if isinstance(v, torch.Tensor) else v for n, v in own.items()}
        )

    def load(self, state: Mapping[str, Any]) -> None:
        """Load this rank's part of each tensor in `state`, the `state_dict` of the whole model."""
        own = self.module.state_dict(keep_vars=True)
        self.module.load_state_dict({n: part_of(v, own.get(n)) for n, v in state.items()})

    def load_optimizer(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Load into an optimizer this rank's part of each tensor in `state`.

        `state`: the optimizer's `state_dict` for the whole model.
        """
        owner = optimizer_state.numbered(optimizer, state)
        cut = {
            number: {name: part_of(value, owner.get(number)) for name, value in own.items()}
            for number, own in state["state"].items()
        }
        optimizer_state.load(optimizer, {**state, "state": cut})


# --- updates -----------------------------------------------------------------------------------------

#: Optimizers whose update of an element depends on other elements of the parameter.
_ACROSS = ("Adafactor", "LBFGS", "Muon", "SparseAdam")


def check_updates(optimizer: Optimizer, parameters: Iterable[torch.Tensor]) -> None:
    """Raise an `ExactnessError` if the optimizer's updates depend on how parameters are sharded.

    Such an optimizer uses whole tensors, or rounds an element by its position in memory.
    """
    name = type(optimizer).__name__
    where = "with strategy=fsdp it sees shards, so the result would depend on the layout"
    if name in _ACROSS:
        raise ExactnessError(
            f"{name} computes on whole parameters; {where}",
            hint="AdamW, SGD and others that go element by element, strategy='ddp', or exact=False",
        )
    own = [local(parameter) for parameter in parameters]
    if all(accelerator.holds(part) for part in own):
        return
    if any(group.get("fused") for group in optimizer.param_groups):
        raise ExactnessError(
            f"{name} is fused, which rounds by place; {where}", hint="take fused=True out"
        )
    # Vector instructions compute an update of short types in fp32 and round it once; the last elements
    # of a tensor are computed one by one, and rounded after each operation.
    short = sorted(
        {str(part.dtype) for part in own if part.dtype.itemsize < torch.float32.itemsize}
    )
    if short:
        raise ExactnessError(
            f"{name} updates parameters of {', '.join(short)} on the CPU, which rounds by place; {where}",
            hint="fp32 parameters with precision='bf16', strategy='ddp', or exact=False",
        )
