"""Intra-op threads: as many on every rank, since a run's bits depend on their number."""

from __future__ import annotations

import os

import torch

from lockstep.world.cores import shared_cores
from lockstep.world.devices import default_threads
from lockstep.world.devices_asked import CORES
from lockstep.world.meet import Meeting


def set_threads(asked: int | None, meeting: Meeting, replicas: int) -> int:
    """Let torch use as many threads as the run is to have, and return their number.

    Args:
        asked: how many; `None` for a default that all ranks agree on.
        meeting: with the other ranks.
        replicas: number of replicas in all.
    """
    threads = asked or _agree(meeting, replicas)
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    return threads


def _agree(meeting: Meeting, replicas: int) -> int:
    """Return one default for all ranks: cores may differ, but a run computes with as many threads."""
    # A launcher that binds its ranks to cores has told what they share.
    alone = meeting.world.size == 1 or CORES in os.environ
    cores = None if alone else shared_cores(meeting)
    if meeting.world.is_main:
        meeting.store.set("threads", str(default_threads(replicas, cores)))
    meeting.wait(["threads"], "begin")
    return int(meeting.store.get("threads"))
