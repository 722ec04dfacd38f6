"""`Memory`: memory that a rank shares with its launcher: a status page, snapshots of state, and losses."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from lockstep.state.checkpoint.shared_memory import (
    SLOTS,
    Descriptors,
    LossRing,
    Slot,
    StatusPage,
    tag_of,
)
from lockstep.state.checkpoint.snapshot import Snapshots
from lockstep.state.checkpoint.snapshot_schedule import SnapshotSchedule
from lockstep.state.files.run_file import Identity
from lockstep.world.model import World
from lockstep.world.rendezvous.rank_rendezvous import RankRendezvous

#: Environment variable with a rank's index among its launcher's ranks and their count: `index/count`.
SLOT_VARIABLE = "LOCKSTEP_SLOT"


@dataclass(frozen=True, slots=True)
class Memory:
    """The shared memory of this rank's launcher, which outlives the ranks, as this rank has opened it."""

    page: StatusPage  # status page, which all ranks of the launcher write
    slot: Slot  # this rank's part of the status page
    snapshots: Snapshots  # memory with copies of the run's state
    schedule: SnapshotSchedule  # schedule of snapshots
    losses: LossRing  # memory with this rank's latest losses
    losses_before: Mapping[int, int]  # losses of its ranks before a restart, by key

    @staticmethod
    def find(
        environ: Mapping[str, str], rendezvous: RankRendezvous, identity: Identity, ahead: int
    ) -> Memory | None:
        """Open the memory that the launcher shares; return `None` if there is none, as under `torchrun`.

        `ahead` is the number of steps by which another rank may be ahead of rank 0.
        """
        world, run = rendezvous.world, rendezvous.number  # 0 for this process's first run
        if (found := _descriptors(environ, world)) is None:
            return None
        descriptors, index, count = found
        page = StatusPage(descriptors.page)
        slot = page.slot(index)
        # An earlier run of this process has left its numbers on the page.
        if index == 0 and run > 0:
            page.begin_run()
        slot.run, slot.step = run, 0
        tag = tag_of(json.dumps(asdict(identity), sort_keys=True).encode(), run)
        first = world.rank - index
        snapshots = Snapshots(
            descriptors, tag=tag, part=index, parts=count, first=first, size=world.size
        )
        schedule = SnapshotSchedule(snapshots, page, leads=index == 0, ahead=ahead)
        words = LossRing.memory(descriptors.losses)
        losses, before = LossRing(words, index), LossRing.read_all(words, count)
        if run > 0:
            losses.clear()
            before = {}
        return Memory(page, slot, snapshots, schedule, losses, before)


def find_slot(environ: Mapping[str, str], world: World) -> Slot | None:
    """Return this rank's part of the status page in the launcher's memory; `None` without such memory."""
    found = _descriptors(environ, world)
    return None if found is None else StatusPage(found[0].page).slot(found[1])


def _descriptors(environ: Mapping[str, str], world: World) -> tuple[Descriptors, int, int] | None:
    """Return the launcher's memory, this rank's index in it, and its number of ranks; `None` without it."""
    descriptors = Descriptors.find(environ) if world.environment == "lockstep" else None
    text, _, number = environ.get(SLOT_VARIABLE, "").partition("/")
    is_given = text.isdecimal() and number.isdecimal()
    index, count = (int(text), int(number)) if is_given else (world.local_rank, world.local_size)
    return None if descriptors is None or index >= SLOTS else (descriptors, index, count)
