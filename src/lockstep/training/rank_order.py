"""Letting one rank go first: who downloads or prepares what the others then find."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist

from lockstep.errors import PeerError
from lockstep.training.heartbeat import Heartbeat
from lockstep.world.meet import TIMEOUT
from lockstep.world.model import World


class RankOrder:
    """The ranks of a run, one after the other.

    Args:
        world: who this process is.
        store: where ranks leave notes for each other.
        standing: where this rank says that it waits.
    """

    def __init__(self, world: World, store: dist.Store, standing: Heartbeat) -> None:
        self._world, self._store, self._standing = world, store, standing
        self._taken = 0

    @contextlib.contextmanager
    def first(self) -> Iterator[None]:
        """Let the main rank go first, then one rank per node, then all others."""
        world = self._world
        self._taken += 1
        prefix = f"first/{self._taken}"
        mine = f"{prefix}/{world.node_rank}/{world.local_rank}"
        if not world.is_main:
            leader = 0 if world.local_rank == 0 else world.node_rank
            with self._standing.meeting("run.first"):
                self._wait(f"{prefix}/{leader}/0", leader)
        else:
            self._standing.pass_by("run.first")
        yield
        self._store.set(mine, "done")

    def _wait(self, key: str, node: int) -> None:
        try:
            self._store.wait([key], TIMEOUT)
        except dist.DistError as error:
            raise PeerError(
                f"the first rank of node {node} did not come out of run.first() within {TIMEOUT}"
            ) from error
