"""Strategy `pipeline`: each rank of a row of the mesh holds one stage of a model.

Rows hold copies of the model, which are trained data-parallel.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lockstep.engine.data.microbatch import Microbatch
from lockstep.engine.strategies.buffers import Buffers
from lockstep.engine.strategies.gradient_accumulation import take_gradients
from lockstep.engine.strategies.gradient_norm import each_norm, total_norm
from lockstep.engine.strategies.model_context import ModelContext
from lockstep.engine.strategies.model_part_reducer import Reducer, SpreadModel, make_reducer
from lockstep.engine.strategies.optimizer_state import numbered
from lockstep.engine.strategies.passes import RefusedCopy, refuse_state_dict
from lockstep.engine.strategies.pipeline.consistency import OUTSIDE, CallCheck
from lockstep.engine.strategies.pipeline.p2p import RowCommunicator
from lockstep.engine.strategies.pipeline.partition import cut
from lockstep.engine.strategies.pipeline.schedule import Schedule
from lockstep.engine.strategies.pipeline.stage import Program
from lockstep.engine.strategies.rng import draws, looks_at_batches
from lockstep.errors import ExactnessError, UsageError


class PipelinedModel(SpreadModel):
    """A model of which this rank has one stage.

    The script calls its own module, whose `forward` is replaced by a pass through the stages of all ranks.
    Parameters of other stages are on the device `meta`, with a shape and without memory. So the optimizer
    of each rank has all parameters of the model, but updates only those of this rank's stage: parameters of
    other stages have no gradients.
    """

    def __init__(
        self, module: nn.Module, context: ModelContext, schedule: Schedule, reducer: Reducer | None
    ) -> None:
        super().__init__(module, context, reducer)
        if schedule.chunks > 1:
            # Batch statistics and random numbers of chunks differ from those of the whole batch.
            other = looks_at_batches(module) or draws(module)
            self.exactness = "approximate" if other else "close"
            schedule.drawn = lambda: self._warn_of_draws("for each chunk by itself")
        self._row, self._schedule = schedule.row, schedule
        group = context.group if context.mesh is None or context.mesh["data"].size() > 1 else None
        stage, waiting = schedule.stage.module, context.sharing
        self.buffers = Buffers(stage, context.block, group, modes=module, waiting=waiting)
        self._own = [p for p in self.parameters if not p.is_meta]
        module.__dict__["forward"] = schedule
        module.__dict__["__deepcopy__"] = RefusedCopy(
            f"{type(module).__name__}, of which this rank has a stage",
            "copy the module before run.model, and give the copy to run.model, too: it is cut alike, "
            "so that an average of weights works on both; leave requires_grad on",
        )
        refuse = refuse_state_dict("has one stage of it")
        module.register_state_dict_pre_hook(refuse)  # type: ignore[no-untyped-call]

    @property
    def leaves(self) -> list[torch.Tensor]:
        """A list of one dummy leaf tensor, which stands for all stages' parameters in autograd's graph."""
        return [self._schedule.leaf]

    def _prepare(self, microbatch: Microbatch) -> None:
        where = (
            f"batch {microbatch.step} of loader {microbatch.loader}, replica {microbatch.replica}"
        )
        self._schedule.calls.where = f"epoch {microbatch.epoch}, {where}, turn {microbatch.turn}"

    def microbatch_ends(self, microbatch: Microbatch, *, left: bool = False) -> None:
        """End a microbatch: synchronize buffers, and check its gradients.

        `left`: whether `break` or an exception has ended the loop's body. Calls of the model before the
        next microbatch count as outside of a loop.
        """
        super().microbatch_ends(microbatch, left=left)
        self._schedule.calls.where = OUTSIDE

    def _sum_gradients(self, microbatch: Microbatch) -> None:
        if not self.several_replicas:
            return
        total = self._accumulate(take_gradients(self._own), microbatch)
        if total is None:
            return
        for parameter, gradient in zip(self._own, total, strict=True):
            parameter.grad = gradient

    # --- state of the whole model ------------------------------------------------------------------

    def _gathered(self, own: Mapping[Any, Any]) -> dict[Any, Any]:
        """Gather the dictionaries `own` from all ranks that hold the model; return their union."""
        return {key: value for part in self._row.gather(dict(own)) for key, value in part.items()}

    def state(self) -> dict[str, Any]:
        """Gather the whole model's `state_dict` from all stages; collective."""
        state = self.module.state_dict(keep_vars=True)
        own = {n: v.detach() for n, v in state.items() if _is_here(v)}
        everything = self._gathered(own)
        return {name: everything.get(name, value) for name, value in state.items()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Load this rank's stage from `state`, the `state_dict` of the whole model."""
        known = self.module.state_dict(keep_vars=True)
        if known.keys() != state.keys():
            missing, strange = known.keys() - state.keys(), state.keys() - known.keys()
            raise RuntimeError(f"missing: {sorted(missing)}; unexpected: {sorted(strange)}")
        own = {
            name: value
            for name, value in state.items()
            if not (isinstance(known[name], torch.Tensor) and known[name].is_meta)
        }
        self.module.load_state_dict(own, strict=False)

    def gradients(self) -> dict[str, torch.Tensor]:
        """Gather from all stages the gradients that no optimizer step has used yet; collective."""
        return self._gathered(super().gradients())

    def load_gradients(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Load the gradients of this rank's stage from `gradients`.

        `gradients`: gradients of the whole model, by parameter name.
        """
        here = {name for name, p in self.module.named_parameters() if not p.is_meta}
        super().load_gradients({n: v for n, v in gradients.items() if n in here})

    def unsaved_buffers(self) -> dict[str, torch.Tensor]:
        """Gather the buffers with `persistent=False` from all stages; collective."""
        own = super().unsaved_buffers()
        return self._gathered({name: value for name, value in own.items() if _is_here(value)})

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Gather an optimizer's state from all stages, and return its `state_dict` for the whole model."""
        state = optimizer.state_dict()
        own = _of_stage(optimizer, state)  # Adagrad has state of parameters on `meta`, too
        return {**state, "state": dict(sorted(self._gathered(own).items()))}

    def load_optimizer(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Load an optimizer's state for this rank's stage; `state`: a `state_dict` for all stages."""
        super().load_optimizer(optimizer, {**state, "state": _of_stage(optimizer, state)})

    def total_norm(self, parameters: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
        """Return the norm of the gradients of all stages together; collective.

        The bits are the same as in a single process. `parameters`: parameters of the whole model.
        """
        own = {
            place: each_norm([p.grad], norm_type)[0]
            for place, p in enumerate(parameters)
            if p.grad is not None
        }
        norms = self._gathered(own)
        return total_norm([norms[place] for place in sorted(norms)], norm_type)

    def ends(self) -> dict[str, int]:
        """Return `{"sent": N, "received": M}`: the bytes that this rank exchanged with other stages."""
        return self._row.moved


def wrap(module: nn.Module, context: ModelContext, settings: Mapping[str, Any]) -> PipelinedModel:
    """Cut `module` into one stage for each rank that holds the model, and wrap this rank's stage.

    `settings`: the keywords given to `run.model`.

    Raises:
        UsageError: if the model has too few parts for the ranks, or a keyword is invalid.
        ModelError: if the model cannot be cut.
        ExactnessError: with `exact`, for several chunks.
    """
    assert context.mesh is not None
    row = RowCommunicator(context.mesh.get_group("model"), context.device)
    chunks = _chunks(settings.get("chunks"), row.size, exact=context.exact)
    program = cut(module, row.size, settings.get("split"))
    inputs = _chunk_inputs(settings.get("chunk_inputs"), program)
    stages = "; ".join(map(str, program.stages))
    context.say(
        f"lockstep: {type(module).__name__} in {row.size} stages: {stages}; "
        f"{chunks} chunk{'s' if chunks > 1 else ''} per batch"
    )
    own_ids = {id(t) for t in _tensors(program.stages[row.rank].module)}
    if row.rank == row.size - 1:  # tensors that no stage uses are on the last rank
        used = {id(t) for stage in program.stages for t in _tensors(stage.module)}
        own_ids |= {id(t) for t in _tensors(module)} - used
    _place(module, own_ids, context.device)
    own = [p for p in module.parameters() if p.requires_grad and not p.is_meta]
    reducer = make_reducer(own, context, row.rank)
    calls = CallCheck(row, context.number, type(module).__name__)
    passing = partial(context.passing, context.ranks_of_row)
    schedule = Schedule(program.only(row.rank), row, (chunks, inputs), calls, passing)
    return PipelinedModel(module, context, schedule, reducer)


def _chunks(asked: Any, stages: int, *, exact: bool) -> int:
    if asked is None:
        return 1 if exact else stages
    if not isinstance(asked, int) or isinstance(asked, bool) or asked < 1:
        raise UsageError(f"chunks is {asked!r}; expected an integer of at least 1")
    if exact and asked > 1:
        raise ExactnessError(
            f"chunks={asked} would break the promise: gradients of parts of a batch are summed in "
            "a different order, and BatchNorm sees each part by itself",
            hint="chunks=1, or say exact=False to the run (lockstep run --no-exact)",
        )
    return asked


def _chunk_inputs(asked: Any, program: Program) -> Sequence[str] | None:
    known = list(program.inputs)
    if asked is None:
        return None
    is_list = isinstance(asked, Collection) and not isinstance(asked, str)
    if not is_list or not asked or any(name not in known for name in asked):
        raise UsageError(
            f"chunk_inputs is {asked!r}; expected a list of one or more names of forward's arguments: "
            f"{', '.join(known)}",
            hint="without chunk_inputs, the only tensor of a call is cut into chunks",
        )
    return list(asked)


def _place(module: nn.Module, own_ids: set[int], device: torch.device) -> None:
    """Move the tensors of `module` with ids in `own_ids` to `device`, and all others to `meta`.

    Tensors are the parameters and buffers. Those on `meta` have no memory.
    """
    shapes: dict[int, torch.Tensor] = {}
    for part in module.modules():
        for own in (part._parameters, part._buffers):
            for name, tensor in own.items():
                if tensor is None:
                    continue
                if id(tensor) in own_ids:
                    _move(tensor, device)
                elif not tensor.is_meta:
                    # One tensor for all names of a tied parameter, which an optimizer has once.
                    shape = shapes.setdefault(id(tensor), _shape_of(tensor))
                    own[name] = shape  # type: ignore[assignment]


def _move(tensor: torch.Tensor, device: torch.device) -> None:
    """Move a tensor to `device` in place, so that references to it, such as an optimizer's, stay valid."""
    moved = tensor.detach().to(device)
    if torch._has_compatible_shallow_copy_type(tensor, moved):
        tensor.data = moved
    else:  # a device of PrivateUse1, such as Ascend's, has a different type of tensor
        if isinstance(tensor, nn.Parameter):
            moved = nn.Parameter(moved, tensor.requires_grad)
        moved.__dict__.update(tensor.__dict__)
        torch.utils.swap_tensors(tensor, moved)  # type: ignore[no-untyped-call]


def _shape_of(tensor: torch.Tensor) -> torch.Tensor:
    meta = tensor.detach().to("meta")
    if not isinstance(tensor, nn.Parameter):
        return meta
    parameter = nn.Parameter(meta, requires_grad=tensor.requires_grad)
    parameter.__dict__.update(copy.copy(tensor.__dict__))
    return parameter


def _tensors(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def _of_stage(optimizer: Optimizer, state: Mapping[str, Any]) -> dict[int, Any]:
    """Return the entries of an optimizer's state for parameters of this rank's stage.

    `state`: the optimizer's `state_dict`. Entries have the parameters' numbers in it as keys.
    """
    here = {number for number, p in numbered(optimizer, state).items() if not p.is_meta}
    return {number: value for number, value in state["state"].items() if number in here}


def _is_here(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_meta
