"""Units of a sharded model: parameters that FSDP2 gathers together, and their gradients.

Only this module uses private attributes of FSDP2: a unit's parameters, and the gathered tensors that
forward passes use instead (torch 2.11 to 2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_leaves

from lockstep.engine.data.microbatch import Microbatch
from lockstep.engine.exchange.scatter import Outgoing, TreeScatter, gather_numbers
from lockstep.engine.exchange.tree import all_gather
from lockstep.engine.strategies.dtensor import assembled, cut_dimension
from lockstep.engine.strategies.gradient_accumulation import NO_GRADIENT, Gradients, add
from lockstep.engine.strategies.model_context import Waiting
from lockstep.errors import MismatchError, ModelError, StepError
from lockstep.state.checkpoint.parts import local


class FsdpUnit:
    """A submodule that FSDP2 shards and gathers separately, with its gradients on this rank.

    Args:
        sum_type: dtype in which gradients are summed; `None` for the gradients' own dtype.

    Attributes:
        parameters: this rank's shards of trainable parameters.
        gradients: unsharded gradients of the current backward pass; `None` for those not computed
            yet.
    """

    def __init__(self, module: FSDPModule, name: str, sum_type: torch.dtype | None) -> None:
        self.module = module
        self.name = name
        self._sum_type = sum_type
        self._inner = [one for one in _fsdp_params(module) if one.sharded_param.requires_grad]
        self.parameters: list[DTensor] = [one.sharded_param for one in self._inner]
        self.gradients: Gradients = [None] * len(self.parameters)
        self._handles: list[Any] = []
        for one in self._inner:
            if not isinstance(one.fsdp_placement, Shard):
                raise ModelError(
                    f"shard_placement_fn gave {one.fsdp_placement}; expected Shard or None"
                )

    @property
    def leaves(self) -> list[torch.Tensor]:
        """The gathered (unsharded) parameters, which get gradients; empty before the first gathering."""
        return [one.unsharded_param for one in self._inner if hasattr(one, "_unsharded_param")]

    def watch(self, arrived: Callable[[], None]) -> None:
        """Register hooks that move each computed gradient to `self.gradients`, and then call `arrived`."""
        if self._handles or not self.leaves:
            return
        for place, leaf in enumerate(self.leaves):

            def take(leaf: torch.Tensor, place: int = place) -> None:
                assert leaf.grad is not None
                self.gradients[place] = leaf.grad.to(self._sum_type or leaf.grad.dtype)
                leaf.grad = None
                arrived()

            handle = leaf.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]
            self._handles.append(handle)

    def take(self) -> Gradients:
        """Return the gradients of the current backward pass, and remove them from this object."""
        gradients, self.gradients = self.gradients, [None] * len(self.parameters)
        return gradients

    # --- messages to other ranks ----------------------------------------------------------------

    def pack(
        self, scatter: TreeScatter, nodes: Sequence[Gradients], size: int, notes: int
    ) -> Outgoing:
        """Return the sums of gradients as messages, one for each of `size` ranks.

        A message has the receiver's shard of each gradient, padded to the length of the longest shard.
        `scatter`: allocates the messages. `nodes`: this rank's partial sums over its replicas, each with
        one gradient per parameter. `notes`: number of additional elements of a message.
        """
        filled = [self._filled(node) for node in nodes]
        share = sum(self._share(parameter, size) for parameter in self.parameters)
        out = scatter.memory(filled[0][0], share, notes)
        for node, slot in zip(filled, out.nodes, strict=True):
            rows = []
            for gradient, parameter in zip(node, self.parameters, strict=True):
                dimension = cut_dimension(parameter)
                # Move the dimension along which the parameter is cut to the front, shard by shard.
                parts = torch.chunk(gradient, size, dim=dimension) if dimension else (gradient,)
                rows.append(torch.cat(parts) if dimension else gradient)
            torch._chunk_cat(rows, 0, size, out=slot)
        return out

    def _filled(self, node: Gradients) -> list[torch.Tensor]:
        first = self.leaves[0]
        kind = next((g.dtype for g in node if g is not None), self._sum_type or first.dtype)
        device = first.device
        return [
            torch.full(parameter.shape, NO_GRADIENT, dtype=kind, device=device) if g is None else g
            for g, parameter in zip(node, self.parameters, strict=True)
        ]

    @staticmethod
    def _share(parameter: DTensor, size: int) -> int:
        length = parameter.shape[cut_dimension(parameter)]
        return -(-length // size) * (parameter.numel() // length) if length else 0

    def unpack(self, total: torch.Tensor, size: int) -> Iterator[tuple[DTensor, torch.Tensor]]:
        """Yield each parameter together with this rank's shard of the parameter's summed gradient.

        `total`: flat tensor with the padded shards of all parameters; the yielded shards are views of it.
        `size`: number of ranks.
        """
        offset = 0
        for parameter in self.parameters:
            own = local(parameter)
            part = total[offset : offset + own.numel()].view(own.shape)
            yield parameter, part
            offset += self._share(parameter, size)

    def give(self, parameter: DTensor, part: torch.Tensor) -> None:
        """Set this rank's shard of a parameter's gradient to `part`, or add `part` to an existing shard."""
        own = local(parameter)
        part = part.to(device=own.device, dtype=own.dtype)
        if parameter.grad is None:
            parameter.grad = assembled(part, parameter)
        else:
            local(parameter.grad).add_(part)


class Gathers:
    """Checks that all ranks are about to gather the same unit of a model in the same batch.

    A unit is a submodule that FSDP2 shards separately. Without this check a rank could receive the
    parameters of another unit: with Gloo the process would end, or numbers would be wrong.

    Args:
        group: process group for these checks alone; `None` for a single rank.
        always: whether every gathering is checked, also after the first batches.
    """

    def __init__(
        self,
        names: Sequence[str],
        group: dist.ProcessGroup | None,
        waiting: Waiting,
        *,
        always: bool,
    ) -> None:
        self.names = [*names, "all units, for run.digest, run.export and the like"]
        self._group, self._waiting, self._always = group, waiting, always
        self._place = _OUTSIDE
        self._batches = 0  # number of batches in which a unit was gathered
        self._is_first = False

    def batch_begins(self, microbatch: Microbatch) -> None:
        """Record the number of the batch that begins, which `check` compares between ranks."""
        loader, epoch, round_, step, _ = microbatch.numbers
        self._place, self._is_first = (loader, epoch, round_, step, microbatch.turn), True

    def batch_ends(self) -> None:
        """Record that a batch has ended: parameters are gathered outside of batches until the next one."""
        self._place, self._is_first = _OUTSIDE, False

    def check_all(self) -> None:
        """Raise an error unless all ranks are about to gather the whole model; collective."""
        self._compare(len(self.names) - 1)

    def check(self, number: int) -> None:
        """Raise an error unless all ranks are about to gather unit `number`; collective.

        A unit is a separately sharded submodule. On GPUs, after the first batches only the first gathering
        of each batch is checked.

        Raises:
            MismatchError: if ranks are in different batches.
            ModelError: if ranks are about to gather different units.
        """
        is_first, self._is_first = self._is_first, False
        self._batches += is_first
        if is_first or self._always or self._batches <= _COMPARED:
            self._compare(number)

    def _compare(self, number: int) -> None:
        if self._group is None:
            return
        with self._waiting():
            found = gather_numbers([*self._place, number], self._group)
        first = found[0]
        other, there = next(
            ((rank, one) for rank, one in enumerate(found) if one != first), (0, first)
        )
        if there[:-1] != first[:-1]:
            raise MismatchError(
                f"rank 0 is {_describe(first[:-1])}, rank {other} {_describe(there[:-1])}, and both are "
                "about to gather parameters; expected all ranks in the same batch",
                hint="a `break` or `continue` must not depend on the rank or on one rank's values; reduce "
                "them first, for instance with run.mean",
            )
        if there != first:
            raise ModelError(
                f"rank 0 is about to gather {self.names[first[-1]]}, rank {other} "
                f"{self.names[there[-1]]}; expected the same units in the same order on all ranks, "
                "since they gather them together",
                hint='where the data decides, run.model(…, gather="batch") gathers all units once per '
                "batch; and no rank may call the model alone",
            )


#: Number of global batches in which ranks on GPUs check each gathering; on CPUs they always do.
_COMPARED = 8
_OUTSIDE = (-1, -1, -1, -1, -1)


def _describe(place: Sequence[int]) -> str:
    if tuple(place) == _OUTSIDE:
        return "outside of a batch"
    loader, epoch, _, step, _ = place
    return f"in batch {step} of loader {loader} in epoch {epoch}"


class Gather:
    """Function object that all-gathers the parameters of a unit, after a check of the ranks' units.

    It is passed to `FSDPModule.set_custom_all_gather`. The check raises an error if ranks are about to
    gather different units (sharded submodules).
    """

    def __init__(self, number: int, gathers: Gathers) -> None:
        self._number, self._gathers = number, gathers

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return an uninitialised tensor of shape `size`, for gathered parameters."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Check that all ranks gather the same unit, then all-gather `input_tensor` into `output_tensor`.

        The arguments are those that FSDP2 passes.
        """
        self._gathers.check(self._number)
        work: dist.Work | None = all_gather(
            output_tensor, input_tensor, group=group, async_op=async_op
        )
        return work


def merged(nodes: Sequence[Gradients], count: int, last: Gradients) -> list[Gradients]:
    """Add the last replica's gradients to the partial sums over earlier replicas; return the new sums.

    `nodes`: the partial sums. `last`: the gradients. The `count` latest partial sums and `last` become one
    sum; earlier ones are returned unchanged.
    """
    kept = len(nodes) - count
    for node in reversed(nodes[kept:]):
        last = add(node, last)
    return [*nodes[:kept], last]


def _fsdp_params(module: FSDPModule) -> list[Any]:
    state: Any = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch 2.11 has at most one group
        groups = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    if len(groups) > 1:
        raise ModelError("shard_placement_fn names meshes of its own; expected Shard or None")
    return [one for group in groups for one in group.fsdp_params]


def refuse_graphs_of_gradients(name: str, output: object) -> None:
    """Make a backward pass with `create_graph=True` from `output` raise a `StepError`.

    Its gradients could not be differentiated, since parameters are resharded after the pass. `name`: the
    model's name in the message.
    """

    def check(_gradient: torch.Tensor) -> None:
        if torch.is_grad_enabled():
            raise StepError(
                f"a gradient was taken with create_graph=True through {name}, whose parameters are let go "
                "of after a backward pass; expected one backward pass",
                hint='run.model(…, gather="batch") keeps them for the whole batch',
            )

    for tensor in tree_leaves(output):
        if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
            tensor.register_hook(check)  # type: ignore[no-untyped-call]
