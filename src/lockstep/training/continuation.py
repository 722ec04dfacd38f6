"""How a run goes on from what it has been: the state that is found, and what keeps it from there on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from lockstep.checkpoint.catalog import DIRECTORY
from lockstep.checkpoint.disk import Checkpoints
from lockstep.checkpoint.schedule import Schedule
from lockstep.record.recorder import Recorder
from lockstep.settings import Settings
from lockstep.training.checkpointing import Checkpointing
from lockstep.training.coordination import Alone, Coordination, OnBoard, ThroughStore
from lockstep.training.final_checkpoint import FinalCheckpoint
from lockstep.training.heartbeat import Heartbeat
from lockstep.training.loop import Loop
from lockstep.training.memory import Memory
from lockstep.training.resume import Search
from lockstep.training.state import State
from lockstep.world.meet import Meeting


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """What a run needs to find its state and to keep it.

    Attributes:
        meeting: with the other ranks.
        group: the process group; `None` on a single rank.
        memory: of the launcher, if there is one.
        record: of the run.
        state: what the run has been told of.
        loop: where the run stands.
        standing: where this rank stands.
        is_split: whether models are spread or sharded, so that ranks gather the state together.
    """

    meeting: Meeting
    group: dist.ProcessGroup | None
    memory: Memory | None
    record: Recorder
    state: State
    loop: Loop
    standing: Heartbeat
    is_split: bool

    def begin(
        self, settings: Settings, identity: Mapping[str, Any], *, is_new: bool
    ) -> Checkpointing:
        """Let the run begin, or go on from its newest state; return what keeps it.

        Args:
            settings: what the run is asked to do.
            identity: what the run is; JSON.
            is_new: whether there cannot be any state of it.

        Raises:
            RunDirectoryError: if the directory has a checkpoint of another run.
            CheckpointError: if the disk cannot be read.
        """
        disk = self._disk(settings, identity)
        # Of a model whose tensors are cut over all ranks each launcher has parts.
        apart = settings.strategy == "fsdp" and not self._is_aligned
        is_resumed = self._go_on(disk, is_new=is_new)
        return Checkpointing(
            self.state,
            self.loop,
            self._agreement(settings.staleness or 0),
            self._rhythm(apart=apart),
            disk,
            self._ending(settings, identity, is_resumed=is_resumed),
            self.standing,
            aligned=self._is_aligned,
            apart=apart,
            every=settings.checkpoint_every if self.meeting.world.is_main else 0.0,
            warn=self.record.warn,
            flush=self.record.flush,
        )

    def _rhythm(self, *, apart: bool) -> Schedule | None:
        if self.memory is None or self.memory.snapshots.is_spoken_for:
            return None
        # Launchers choose their moments by themselves, where no rank gathers another's part of the state.
        return self.memory.rhythm if self._is_aligned or apart or not self.is_split else None

    @property
    def _is_aligned(self) -> bool:
        """Whether all ranks are of one launcher, and so take snapshots at the same points."""
        memory = self.memory
        return memory is not None and memory.snapshots.parts == self.meeting.world.size

    def _disk(self, settings: Settings, identity: Mapping[str, Any]) -> Checkpoints:
        world = self.meeting.world
        return Checkpoints(
            self.record.directory / DIRECTORY,
            identity,
            rank=world.rank,
            size=world.size,
            store=self._store_of("checkpoints"),
            keep=settings.keep,
            warn=self.record.warn,
            written=self.record.checkpoint,
        )

    def _ending(
        self, settings: Settings, identity: Mapping[str, Any], *, is_resumed: bool
    ) -> FinalCheckpoint | None:
        if self.memory is None or not self.meeting.world.is_main:
            return None
        place, warn = self.record.directory / DIRECTORY, self.record.warn
        alone = Checkpoints(
            place, identity, rank=0, size=1, store=None, keep=settings.keep, warn=warn
        )
        every = settings.checkpoint_every
        return FinalCheckpoint(
            self.memory.snapshots, alone, every=every, is_resumed=is_resumed, warn=warn
        )

    def _go_on(self, disk: Checkpoints, *, is_new: bool) -> bool:
        """Let the run begin or go on; return whether it goes on."""
        snapshots = None if self.memory is None else self.memory.snapshots
        saved = None if is_new else Search(self.meeting, self.group, snapshots, disk).find()
        has_memory = snapshots is not None and snapshots.found is not None
        if snapshots is not None:
            snapshots.forget()
        if saved is None:
            self.record.begin(0, None)
            return False
        position = saved.position
        self.record.begin(position.steps, saved.source)
        if self.memory is not None and has_memory:
            self.memory.rhythm.go_on(position.steps)
        self.loop.resume(position, lambda whole: saved.restore(self.state, whole=whole))
        return True

    def _agreement(self, ahead: int) -> Coordination:
        memory, world = self.memory, self.meeting.world
        if memory is not None and self._is_aligned:
            return OnBoard(memory.board, leads=world.is_main, ahead=ahead)
        store = self._store_of("agreement")
        if store is None:
            return Alone()
        return ThroughStore(store, world.rank, world.size, ahead=ahead)

    def _store_of(self, purpose: str) -> dist.Store | None:
        """Return a client of the store for another thread; the main one's may be busy waiting."""
        if self.meeting.world.size == 1:
            return None
        own: dist.Store = self.meeting.store.clone()  # type: ignore[attr-defined]
        return dist.PrefixStore(purpose, own)
