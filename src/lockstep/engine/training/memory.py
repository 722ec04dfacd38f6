"""Shared memory of this rank: its slot on the launcher's status page, and its snapshots."""

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

#: Number of a worker among its launcher's ranks, and their number: `index/count`.
SLOT_VARIABLE = "LOCKSTEP_SLOT"


@dataclass(frozen=True, slots=True)
class Memory:
    """The launcher's memory, as one of its ranks sees it.

    Attributes:
        page: shared by the ranks of the launcher.
        slot: this rank's part of the page.
        losses_before: losses of this launcher's ranks in earlier generations of the run, by key.
    """

    page: StatusPage
    slot: Slot
    snapshots: Snapshots
    schedule: SnapshotSchedule
    losses: LossRing
    losses_before: Mapping[int, int]

    @staticmethod
    def find(
        environ: Mapping[str, str], rendezvous: RankRendezvous, identity: Identity, ahead: int
    ) -> Memory | None:
        """Return the launcher's memory; `None` without one, as under `torchrun`.

        `ahead` is by how many steps ranks may be ahead of rank 0.
        """
        world, run = rendezvous.world, rendezvous.number  # of the runs that this process makes
        if (found := _descriptors(environ, world)) is None:
            return None
        descriptors, index, count = found
        page = StatusPage(descriptors.page)
        slot = page.slot(index)
        # An earlier run of this process has left its own numbers here.
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
    """Return this rank's slot on the status page; `None` without a launcher's memory."""
    found = _descriptors(environ, world)
    return None if found is None else StatusPage(found[0].page).slot(found[1])


def _descriptors(environ: Mapping[str, str], world: World) -> tuple[Descriptors, int, int] | None:
    """Return the launcher's memory, the number of this rank in it, and the number of ranks."""
    descriptors = Descriptors.find(environ) if world.environment == "lockstep" else None
    text, _, number = environ.get(SLOT_VARIABLE, "").partition("/")
    is_given = text.isdecimal() and number.isdecimal()
    index, count = (int(text), int(number)) if is_given else (world.local_rank, world.local_size)
    return None if descriptors is None or index >= SLOTS else (descriptors, index, count)
