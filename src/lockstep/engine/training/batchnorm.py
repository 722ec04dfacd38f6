"""`run.sync_batchnorm`: makes BatchNorm layers use statistics of the global batch.

It raises an error where this is impossible, for instance with a strategy that cuts microbatches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist
from torch import nn

from lockstep.engine.exchange.scatter import clone_group
from lockstep.engine.recovery.state import State
from lockstep.engine.strategies.sync_batchnorm import Ranks, convert
from lockstep.engine.training.context import Context
from lockstep.engine.training.loop import Loop
from lockstep.errors import ExactnessError, ModelError
from lockstep.registry import STRATEGIES


def synchronise(context: Context, state: State, loop: Loop, module: nn.Module) -> nn.Module:
    """Return `module` with BatchNorm layers that use statistics of the global batch.

    With more replicas than ranks, they are statistics of one microbatch of each rank. See
    `Run.sync_batchnorm`.
    """
    _check(context, state, module)
    replicas, ranks = context.replicas, context.dims.mesh.data
    if replicas > ranks:
        _check_several(replicas, ranks, exact=context.settings.exact)
    with context.collectives.collective("run.sync_batchnorm"):
        group = _group(context)
    exactness = "exact" if replicas == 1 else "close" if replicas == ranks else "approximate"

    of_model = context.of_model(-1)
    row = of_model.ranks_of_row

    @contextlib.contextmanager
    def collective() -> Iterator[None]:
        with context.heartbeat.collective("the statistics of BatchNorm"), of_model.passing(row):
            yield

    def counts() -> bool:
        microbatch = loop.microbatch
        return microbatch is None or microbatch.size > 0

    return convert(module, Ranks(group, counts, collective, exactness))


def _check(context: Context, state: State, module: nn.Module) -> None:
    if not isinstance(module, nn.Module):
        raise ModelError(
            f"run.sync_batchnorm was given a {type(module).__name__}; expected a Module"
        )
    if any(module in (model.module, model.wrapped) for model in state.models):
        raise ModelError(
            f"run.sync_batchnorm was given a {type(module).__name__} that belongs to the run already",
            hint="model = run.model(run.sync_batchnorm(model))",
        )
    strategy = STRATEGIES.find(context.settings.strategy)
    if strategy.cuts_batches:
        raise ModelError(
            f"run.sync_batchnorm with strategy={strategy.name}, which cuts each replica's share to "
            "pieces; expected a strategy that computes on it at once",
            hint="strategy='ddp' or 'fsdp', or a normalisation without statistics of the batch",
        )
    if strategy.has_servers and context.settings.staleness:
        raise ModelError(
            f"run.sync_batchnorm with staleness={context.settings.staleness}, under which workers run "
            "without each other; expected workers that wait for each other",
            hint="leave staleness out, or use a normalisation without statistics of the batch",
        )


def _check_several(replicas: int, ranks: int, *, exact: bool) -> None:
    what = f"run.sync_batchnorm with {replicas} replicas on {ranks} rank(s)"
    if exact:
        raise ExactnessError(
            f"{what}: replicas on one rank compute one after the other, so their statistics cannot "
            "be summed; expected a rank for each replica",
            hint=f"start {replicas} ranks, or say exact=False to the run (lockstep run --no-exact): "
            "then statistics are over the replicas that compute at the same time",
        )
    if replicas % ranks:
        raise ModelError(
            f"{what}: ranks would come to different numbers of forward passes, and wait for each other; "
            "expected as many replicas on each rank",
            hint=f"replicas={replicas - replicas % ranks} or {replicas + ranks - replicas % ranks}",
        )


def _group(context: Context) -> dist.ProcessGroup | None:
    """Return a new process group for BatchNorm statistics; `None` if one rank computes all replicas.

    The run's own group may be busy with the sum of gradients.
    """
    data = context.groups.data
    if data is None or dist.get_world_size(data) == 1:
        return None
    return clone_group(data, local=True)
