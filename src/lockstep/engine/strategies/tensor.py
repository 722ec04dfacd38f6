"""Strategy `tensor`: tensor parallelism, in which each rank of a row holds a part of each large matrix.

The ranks of a row of the mesh hold one model together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from lockstep.engine.data.microbatch import Microbatch
from lockstep.engine.strategies.dtensor import CutState, assembled
from lockstep.engine.strategies.gradient_accumulation import Gradients, take_gradients
from lockstep.engine.strategies.gradient_norm import total_norm
from lockstep.engine.strategies.model_context import ModelContext
from lockstep.engine.strategies.model_part_reducer import Reducer, SpreadModel, make_reducer
from lockstep.engine.strategies.rng import draws, watch_draws
from lockstep.errors import ExactnessError, ModelError, UsageError
from lockstep.state.checkpoint.parts import local, whole

_WHERE = "torch.distributed.tensor.parallel"


class TensorModel(CutState, SpreadModel):
    """A model whose layers `parallelize_module` has sharded over the ranks of a row of the mesh."""

    exactness = "close"

    def __init__(self, module: nn.Module, context: ModelContext, reducer: Reducer | None) -> None:
        super().__init__(module, context, reducer)
        if draws(module):
            self.exactness = "approximate"
        else:
            # Ranks draw equal numbers for different parts of the activations.
            watch_draws(module, lambda: self._warn_of_draws("on each rank for its part"))

    def _sum_gradients(self, microbatch: Microbatch) -> None:
        if not self.several_replicas:
            for parameter in self.parameters:
                if parameter.grad is not None:  # so that a rank captures its part alone
                    parameter.grad = _placed(parameter.grad, parameter)
            return
        pairs = zip(self.parameters, take_gradients(self.parameters), strict=True)
        own: Gradients = [None if g is None else local(_placed(g, p)) for p, g in pairs]
        total = self._accumulate(own, microbatch)
        if total is None:
            return
        for parameter, gradient in zip(self.parameters, total, strict=True):
            if gradient is not None and isinstance(parameter, DTensor):
                gradient = assembled(gradient, parameter)  # noqa: PLW2901
            parameter.grad = gradient

    def _are_nonzero(self, gradients: Sequence[torch.Tensor]) -> list[bool]:
        return super()._are_nonzero([whole(gradient) for gradient in gradients])

    def clip_values(self, parameters: Sequence[torch.Tensor], value: float) -> None:
        """Clamp this rank's parts of the gradients of `parameters` to the range `-value` to `value`."""
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad = _placed(parameter.grad, parameter)
                local(parameter.grad).clamp_(-value, value)

    # --- norms of whole gradients ------------------------------------------------------------------

    def total_norm(self, parameters: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
        """Return the total norm of the gradients of `parameters`, including the parts on other ranks.

        Collective. `norm_type`: as in `torch.nn.utils.clip_grad_norm_`.
        """
        placed = [_placed(p.grad, p) for p in parameters if p.grad is not None]
        norms = [whole(torch.linalg.vector_norm(gradient, norm_type)) for gradient in placed]
        return total_norm(norms, norm_type)

    def clip(self, parameters: Sequence[torch.Tensor], max_norm: float, norm: torch.Tensor) -> None:
        """Scale gradients of `parameters` from total norm `norm` to at most `max_norm`, one by one.

        torch cannot scale `DTensor`s and other tensors in one call.
        """
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm, foreach=False)


def wrap(module: nn.Module, context: ModelContext, settings: Mapping[str, Any]) -> TensorModel:
    """Shard `module` by `parallelize_module` over the ranks of a row; return it as a `TensorModel`.

    `settings`: keywords of `run.model`. `plan` among them is a dictionary with a `ParallelStyle` for each
    submodule to shard.

    Raises:
        UsageError: without `plan`.
        ModelError: for a `plan` with submodules that the model lacks, or that torch cannot apply.
        ExactnessError: with `exact`, since sums over parts of a matrix are rounded differently.
    """
    assert context.mesh is not None
    row = context.mesh["model"]
    plan = settings.get("plan")
    if context.exact:
        raise ExactnessError(
            "strategy=tensor sums parts of each product, which is rounded otherwise than the whole; "
            "expected a strategy that keeps the bits",
            hint="say exact=False to the run (lockstep run --no-exact), or strategy='pipeline' or 'fsdp'",
        )
    _check_plan(module, plan)
    try:
        parallelize_module(module, row, plan)
    except (NotImplementedError, ValueError, RuntimeError, AssertionError) as error:
        raise ModelError(
            f"{type(module).__name__} cannot be parallelised by this plan: {error}",
            hint=f"{_WHERE} says what each style is for",
        ) from error
    _check_parts(module, row.size())
    own = [local(p) for p in module.parameters() if p.requires_grad]
    return TensorModel(module, context, make_reducer(own, context, row.get_local_rank()))


def _check_plan(module: nn.Module, plan: Any) -> None:
    if plan is None:
        raise UsageError(
            f"strategy=tensor, and run.model was given no plan for {type(module).__name__}",
            hint='run.model(net, plan={"fc1": ColwiseParallel(), "fc2": RowwiseParallel()}), '
            f"with the styles of {_WHERE}",
        )
    if not isinstance(plan, Mapping) or not all(
        isinstance(v, ParallelStyle) for v in plan.values()
    ):
        raise ModelError(
            f"plan is {plan!r}; expected names of parts, each with a style of {_WHERE}"
        )
    names = [name for name, _ in module.named_modules()]
    for pattern in plan:
        if not any(_matches(name, pattern) for name in names):
            parts = ", ".join(name for name in names if name)
            raise ModelError(
                f"plan names {pattern!r}, and the model has no such part; expected some of {parts}"
            )


def _check_parts(module: nn.Module, size: int) -> None:
    """Raise a `ModelError` if the shards of a parameter differ in size.

    torch 2.13 cannot multiply such shards. `size`: number of ranks that hold the model together.
    """
    for name, parameter in module.named_parameters():
        for placement in parameter.placements if isinstance(parameter, DTensor) else ():
            if isinstance(placement, Shard) and parameter.shape[placement.dim] % size:
                raise ModelError(
                    f"{name} has shape {tuple(parameter.shape)}, whose dimension {placement.dim} the plan "
                    f"cuts over {size} ranks; expected a size that {size} divides",
                    hint="a different width, another mesh, or leave this part out of the plan",
                )


def _matches(name: str, pattern: str) -> bool:
    """Whether the submodule name `name` matches `pattern`, a key of `plan`.

    `*` in the pattern is any text between dots, as in torch.
    """
    own, asked = name.split("."), pattern.split(".")
    return len(own) == len(asked) and all(map(fnmatchcase, own, asked))


def _placed(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return `gradient` redistributed to the placements of `parameter`, if both are `DTensor`s.

    Autograd may return gradients that are partial sums. Other gradients are returned unchanged.
    """
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
        placed: torch.Tensor = gradient.redistribute(placements=parameter.placements)
        return placed
    return gradient
