"""Strategy `fsdp`: FSDP2 shards parameters and optimizer state; gradients are summed in a fixed order."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from lockstep.engine.data.microbatch import Microbatch
from lockstep.engine.exchange.scatter import Scattering, TreeScatter, clone_group
from lockstep.engine.strategies.dtensor import CutState, check_updates
from lockstep.engine.strategies.gradient_accumulation import Gradients
from lockstep.engine.strategies.gradient_norm import each_norm, total_norm
from lockstep.engine.strategies.model_context import ModelContext
from lockstep.engine.strategies.passes import RefusedCopy, refuse_state_dict, watch_forward
from lockstep.engine.strategies.sharded.units import (
    FsdpUnit,
    Gather,
    Gathers,
    merged,
    refuse_graphs_of_gradients,
)
from lockstep.engine.strategies.sharded.wrap_policy import shard
from lockstep.engine.strategies.wrapped_model import WrappedModel
from lockstep.errors import ModelError, StepError
from lockstep.state.checkpoint.parts import local, whole


class ShardedModel(CutState, WrappedModel):
    """A model whose parameters are sharded over all ranks.

    FSDP2 gathers the parameters of a unit (a submodule that it shards separately) before each use. FSDP2's
    reduce-scatter is not used: hooks take the gradients from autograd. As soon as all gradients of a unit
    are computed, this rank sends to each rank the gradients of that rank's shards. The order of units is
    the same on all ranks.

    Args:
        units: the units; the last is the model itself.
        scatter: sends and sums the gradients; `None` for a single rank.
        gather: "unit" gathers parameters before each use of a unit, "batch" once for a global
            batch.
    """

    mixes = True

    def __init__(
        self,
        module: nn.Module,
        context: ModelContext,
        units: Sequence[FsdpUnit],
        scatter: TreeScatter | None,
        gather: str,
    ) -> None:
        self._size = 1 if context.group is None else dist.get_world_size(context.group)
        super().__init__(module, context, shares_buffers=self._size > 1)
        self._context, self._scatter = context, scatter
        self._all = units
        # In about the order in which a backward pass completes them; the model's own unit is last.
        *inner, root = units
        self._units = [unit for unit in [*reversed(inner), root] if unit.parameters]
        place = {id(p): number for number, p in enumerate(self.parameters)}
        self._places = [[place[id(p)] for p in unit.parameters] for unit in self._units]
        self._may_skip = gather == "batch"
        # Ranks with different numbers of replicas have different numbers of forward passes.
        self._once = self._may_skip or context.replicas % self._size != 0
        if self._once:
            for unit in units:
                unit.module.set_reshard_after_forward(False, recurse=False)
                unit.module.set_reshard_after_backward(False, recurse=False)
        units[-1].module.set_requires_gradient_sync(False)
        self._is_over = False
        self._path: list[int] = []
        group = context.group if self._size > 1 else None
        own = None if group is None else clone_group(group)
        names, on_cpu = [unit.name for unit in units], context.device.type == "cpu"
        self._gathers = Gathers(names, own, self._waiting, always=on_cpu)
        self._started: list[Scattering | Gradients] = []
        self._finished = 0
        self._used: dict[int, list[bool]] = {}
        self._is_early = self._expects = False
        self._watch_forward()

    def _watch_forward(self) -> None:
        self.module.register_forward_hook(self._watch_gradients)
        refuse = refuse_state_dict("holds a part of each parameter")
        copied = RefusedCopy(
            f"{type(self.module).__name__}, which is cut over ranks",
            "copy the module before run.model, and give the copy to run.model, too, with requires_grad "
            "as it is: their parameters are cut alike, which an average of weights needs",
        )
        for number, unit in enumerate(self._all):
            unit.module.set_custom_all_gather(Gather(number, self._gathers))  # type: ignore[arg-type]
            part = cast("nn.Module", unit.module)
            watch_forward(part, partial(self._path.append, number))
            part.register_state_dict_pre_hook(refuse)  # type: ignore[no-untyped-call]
            # Called by copy.deepcopy.
            part.__dict__["__deepcopy__"] = copied
        # The first gathering allocates the tensors for gathered parameters: under
        # torch.inference_mode() no backward pass could use them later.
        with torch.inference_mode(False):
            for unit in self._all:
                unit.module.unshard()
                unit.module.reshard()

    def _watch_gradients(self, *called: object) -> None:
        """Register hooks by which each gradient of a gathered parameter is taken from autograd.

        `called`: arguments of the forward hook that calls this method; the last is the model's output.
        """
        if called and not self._may_skip:
            refuse_graphs_of_gradients(type(self.module).__name__, called[-1])
        for unit in self._units:
            unit.watch(self._advance)

    @property
    def leaves(self) -> list[torch.Tensor]:
        """The gathered (unsharded) parameters, which forward passes use."""
        return [leaf for unit in self._units for leaf in unit.leaves]

    # --- a batch ---------------------------------------------------------------------------------

    def microbatch_begins(self, microbatch: Microbatch) -> None:
        """Prepare a microbatch (a replica's share of a batch).

        Before the first microbatch of a batch, parameters that are still gathered are freed. With
        `gather="batch"`, or if ranks have different numbers of replicas, all parameters are then gathered
        for the whole batch.
        """
        if microbatch.first:
            self._reshard()
            self._gathers.batch_begins(microbatch)
        super().microbatch_begins(microbatch)
        self._path.clear()
        if microbatch.first and self._once:
            for unit in self._all:
                unit.module.unshard()

    def microbatch_ends(self, microbatch: Microbatch, *, left: bool = False) -> None:
        """End a microbatch; after the last one of a batch, free all gathered parameters.

        `left`: whether `break` or an exception has ended the loop's body. The batch is over then, too, and
        the parameters are freed.
        """
        if microbatch.last or left:
            self._reshard()
            self._gathers.batch_ends()
        super().microbatch_ends(microbatch, left=left)

    def _reshard(self) -> None:
        for unit in self._all:
            unit.module.reshard()

    def _prepare(self, microbatch: Microbatch) -> None:
        for unit in self._units:
            unit.take()

    def _before_backward(self, microbatch: Microbatch, *, alone: bool) -> None:
        self._check_path()
        for unit in self._units:
            unit.take()
        self._watch_gradients()
        self._expects = True
        self._started, self._finished = [], 0
        # If the loss uses several models, the order of their messages could depend on the data.
        self._is_early = microbatch.last and alone

    def _check_path(self) -> None:
        """Raise a `ModelError` if a separately sharded submodule was not used in the forward passes.

        Other ranks may have used it, and would wait for this rank to gather its parameters with them.
        """
        left_out = [u.name for i, u in enumerate(self._all) if u.parameters and i not in self._path]
        if left_out and not self._may_skip:
            raise ModelError(
                f"{', '.join(left_out)} of {type(self.module).__name__} took no part in a forward pass; "
                "expected every unit in each, since ranks gather its parameters together",
                hint='run.model(…, gather="batch") gathers all units once per batch; or name other '
                "units by wrap=",
            )

    def _advance(self) -> None:
        """Start to sum the gradients of all units whose gradients are complete.

        A unit is a separately sharded submodule. Units are summed in a fixed order: each waits for the
        units before it. Autograd hooks call this method after each gradient.
        """
        if not self._expects:
            for unit in self._units:
                unit.take()
            raise StepError(
                f"{type(self.module).__name__} got gradients outside of run.backward; they would not "
                "be summed with those of the other replicas",
                hint="call run.backward(loss) in the place of loss.backward()",
            )
        while self._is_early and len(self._started) < len(self._units):
            if any(gradient is None for gradient in self._units[len(self._started)].gradients):
                return
            self._start()
            # This must not wait: another rank may wait for this rank to gather parameters.
            while self._finished < len(self._started):
                started = self._started[self._finished]
                if isinstance(started, Scattering) and not started.has_arrived:
                    break
                self._finish()

    def _sum_gradients(self, microbatch: Microbatch) -> None:
        self._expects = self._is_early = False
        if not microbatch.last:
            flat: Gradients = [None] * len(self.parameters)
            for unit, places in zip(self._units, self._places, strict=True):
                for place, gradient in zip(places, unit.take(), strict=True):
                    flat[place] = gradient
            self.accumulation.push(flat)
            return
        while len(self._started) < len(self._units):
            self._start()
        self.accumulation.take()  # gradients of earlier replicas were sent with the last replica's
        self._reshard()
        while self._finished < len(self._units):
            self._finish()

    def _start(self) -> None:
        """Start to sum the gradients of the next unit: send to each rank the gradients of its shards.

        A unit is a separately sharded submodule. No check of the batch is needed: `Gathers` checked that
        all ranks compute the same batch when they gathered the parameters.
        """
        number = len(self._started)
        unit, places = self._units[number], self._places[number]
        nodes = [[node[place] for place in places] for node in self.accumulation.nodes]
        nodes = merged(nodes, self.accumulation.pending_merges, unit.take())
        if self._scatter is None:
            (total,) = nodes
            self._started.append(total)
            return
        used = [any(node[i] is not None for node in nodes) for i in range(len(places))]
        out = unit.pack(self._scatter, nodes, self._size, len(places))
        self._used[number] = used
        out.notes.copy_(torch.tensor(used, dtype=out.notes.dtype), non_blocking=True)
        self._started.append(self._scatter.start(out))

    def _finish(self) -> None:
        """Wait for the summed gradients of the next unit; set the gradients of this rank's shards.

        A unit is a separately sharded submodule.
        """
        number = self._finished
        unit, started = self._units[number], self._started[number]
        self._started[number] = []
        self._finished += 1
        if not isinstance(started, Scattering):
            for parameter, gradient in zip(unit.parameters, started, strict=True):
                if gradient is not None:
                    unit.give(parameter, gradient)
            return
        total, notes = started.finish()
        used = self._used[number]
        if not all(used):  # else no rank need wait for its device
            used = (notes != 0).any(0).tolist()
        for is_used, (parameter, part) in zip(used, unit.unpack(total, self._size), strict=True):
            if is_used:
                unit.give(parameter, part)

    def _has_gradients(self, among: Collection[int]) -> bool:
        return super()._has_gradients(among) or any(
            gradient is not None for unit in self._units for gradient in unit.gradients
        )

    # --- state of the whole model ------------------------------------------------------------------

    def check_gathering(self) -> None:
        """Raise an error if the run has ended, or if other ranks are not about to gather the whole model.

        Collective, unless the run has ended.
        """
        if self._is_over:
            raise StepError(
                f"{type(self.module).__name__} is cut over ranks, and they have left the run; "
                "expected this call before its end",
                hint="call run.export and the like inside of `with lockstep.Run(…) as run:`",
            )
        self._gathers.check_all()

    def state(self) -> dict[str, Any]:
        """Return the model's `state_dict`, whose tensors are this rank's shards."""
        self._reshard()
        return super().state()

    def load(self, state: Mapping[str, Any]) -> None:
        """Load this rank's shards from the `state_dict` of the whole model."""
        self._reshard()
        super().load(state)

    def total_norm(self, parameters: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
        """Return the total norm of the gradients of `parameters`; collective.

        The sharded gradients are gathered one at a time. The bits are the same as in a single process.
        """
        gradients = [p.grad for p in parameters if p.grad is not None]
        # Gathered one at a time, to save memory.
        norms = [each_norm([whole(one)], norm_type)[0] for one in gradients]
        return total_norm(norms, norm_type)

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Check that the updates of `optimizer`, which updates this model, don't depend on the sharding.

        They do if the optimizer computes with whole tensors, or rounds an element by its position in
        memory. In an exact run, this raises an `ExactnessError`.
        """
        if self._context.exact:
            updated = [
                p for group in optimizer.param_groups for p in group["params"] if p.requires_grad
            ]
            check_updates(optimizer, updated)

    def close(self) -> None:
        """Record that the run is over; from then on `check_gathering` raises an error."""
        self._is_over = True

    def _waiting(self) -> AbstractContextManager[object]:
        """Return a context manager for a gathering of parameters; it reports or limits the wait.

        The wait is for other ranks. In a backward pass the watchdog limits the wait; otherwise the wait is
        reported to the launcher.
        """
        if self._expects:
            return self._context.passing(range(self._size))
        return self._context.collective("the gathering of parameters")

    def _are_nonzero(self, gradients: Sequence[torch.Tensor]) -> list[bool]:
        """Return whether each gradient is nonzero on any rank; collective."""
        own = [local(gradient).count_nonzero() for gradient in gradients]
        found = torch.stack(own).to(self._context.device)
        if self._size > 1:
            dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._context.group)
        return found.bool().tolist()

    def clip_values(self, parameters: Sequence[torch.Tensor], value: float) -> None:
        """Clamp this rank's shards of the gradients of `parameters` to the range `-value` to `value`."""
        for parameter in parameters:
            if parameter.grad is not None:
                local(parameter.grad).clamp_(-value, value)


def wrap(module: nn.Module, context: ModelContext, settings: dict[str, Any]) -> ShardedModel:
    """Shard `module` over all ranks, and return it as a `ShardedModel`.

    `settings`: the keywords given to `run.model`; invalid ones raise a `ModelError`.
    """
    assert context.mesh is not None
    made = shard(module, context.mesh["data"], settings)
    names = {id(part): name for name, part in module.named_modules()}
    reduce_type = getattr(settings.get("mp_policy"), "reduce_dtype", None)
    units = [FsdpUnit(one, names[id(one)] or type(module).__name__, reduce_type) for one in made]
    scatter = None
    if context.group is not None and dist.get_world_size(context.group) > 1:
        scatter = TreeScatter(clone_group(context.group), context.forest)
    return ShardedModel(module, context, units, scatter, settings.get("gather", "unit"))
