"""State of models with sharded tensors: each rank saves and loads its shards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from lockstep.engine.strategies import optimizer_state
from lockstep.errors import ExactnessError
from lockstep.state.checkpoint.parts import Box, Stored, cut_of, is_dtensor, local
from lockstep.world import accelerator

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def bytes_here(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of `tensors` on this rank; what is on `meta` is on another rank."""
    own = map(local, tensors)
    return sum(part.numel() * part.element_size() for part in own if not part.is_meta)


def cut_dimension(like: DTensor) -> int:
    """Return along which dimension a tensor is cut."""
    cut = cut_of(like)
    assert cut is not None
    return cut.dimension


def part_of(value: Any, like: Any) -> Any:
    """Return this rank's part of a value: of a whole tensor or a `Stored`, cut as the `DTensor` `like`.

    Other values, and tensors of another shape than `like`, are returned as they are.
    """
    if not isinstance(value, torch.Tensor | Stored):
        return value
    if is_dtensor(value) or not is_dtensor(like) or value.shape != like.shape:
        return value.read() if isinstance(value, Stored) else value
    cut, mesh = cut_of(like), like.device_mesh
    box = Box.whole(like.shape) if cut is None else cut.box(like.shape, mesh.get_local_rank())
    if isinstance(value, Stored):
        own = value.fetch(box)
    else:
        own = box.of(value.detach()).clone(memory_format=torch.contiguous_format)
    return assembled(own.to(local(like).device), like)


def assembled(own: torch.Tensor, like: DTensor) -> DTensor:
    """Return the `DTensor` cut as `like` with `own` as this rank's part."""
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
    """The state of a model whose tensors are `DTensor`s: a mixin of a `WrappedModel`.

    Nothing here is gathered or sent.
    """

    is_split = is_cut = True
    module: nn.Module

    def state(self) -> dict[str, Any]:
        """Return the model's `state_dict`, with this rank's part of each tensor."""
        # Only `state_dict()` of a script is refused, which has no `keep_vars`.
        own: dict[str, Any] = self.module.state_dict(keep_vars=True)
        return type(own)(
            {n: v.detach() if isinstance(v, torch.Tensor) else v for n, v in own.items()}
        )

    def load(self, state: Mapping[str, Any]) -> None:
        """Load this rank's part of a whole model's `state_dict`."""
        own = self.module.state_dict(keep_vars=True)
        self.module.load_state_dict({n: part_of(v, own.get(n)) for n, v in state.items()})

    def load_gradients(self, gradients: Mapping[str, Any]) -> None:
        """Load this rank's part of gradients that wait for a step."""
        own = dict(self.module.named_parameters())
        for name, value in gradients.items():
            if name in own:
                own[name].grad = part_of(value, own[name]).to(own[name].device)

    def load_optimizer(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Load this rank's part of the state of an optimizer of the whole model."""
        owner = optimizer_state.numbered(optimizer, state)
        cut = {
            number: {name: part_of(value, owner.get(number)) for name, value in own.items()}
            for number, own in state["state"].items()
        }
        optimizer_state.load(optimizer, {**state, "state": cut})


# --- updates -----------------------------------------------------------------------------------------

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
    if all(accelerator.holds(part) for part in own):
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
