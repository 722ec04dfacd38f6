"""What the run directory says of a run that is found there unfinished."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lockstep.record import run_file
from lockstep.world.meet import Meeting
from lockstep.world.model import World


@dataclass(frozen=True, slots=True)
class ResumeInfo:
    """What a run has been until now.

    Attributes:
        generations: how many times its processes were started before.
        replicas: number of replicas that it began with; `None` for a new run.
        threads: intra-op threads that it began with.
        is_ours: whether this launch has recorded it, before its processes were restarted.
    """

    generations: int = 0
    replicas: int | None = None
    threads: int | None = None
    is_ours: bool = False

    @property
    def is_new(self) -> bool:
        """Whether there was nothing before."""
        return self.generations == 0


def launch_of(world: World, environ: Mapping[str, str]) -> str | None:
    """Return the name of the launch that this process belongs to; `None` where nobody gives one."""
    return environ.get("LOCKSTEP_LAUNCH") if world.environment == "lockstep" else None


def recall(
    meeting: Meeting, run_dir: Path | None, launch: str | None, *, fresh: bool
) -> ResumeInfo:
    """Return what the main rank finds in `run_dir`, the same on all ranks.

    Args:
        meeting: with the other ranks.
        run_dir: the directory; `None` for a new one.
        launch: name of this launch.
        fresh: whether a run of another launch is to be forgotten.

    Raises:
        RunDirectoryError: if the record there is damaged.
        PeerError: if the main rank cannot go on.
    """
    store = meeting.store
    if meeting.world.is_main:
        recorded = None if run_dir is None else run_file.read(run_dir)
        # A restart goes on with what this launch has begun, fresh or not.
        is_ours = (recorded or {}).get("launch") == launch and (
            launch is not None or meeting.world.generation > 0
        )
        earlier = (
            ResumeInfo() if fresh and not is_ours else _earlier(recorded or {}, is_ours=is_ours)
        )
        store.set("earlier", json.dumps(asdict(earlier)))
    meeting.wait(["earlier"], "begin")
    return ResumeInfo(**json.loads(store.get("earlier")))


def _earlier(recorded: dict[str, Any], *, is_ours: bool) -> ResumeInfo:
    identity = recorded.get("identity", {})
    generations = recorded.get("generations", [])
    if not generations:
        return ResumeInfo()
    replicas, threads = identity.get("replicas"), identity.get("threads")
    return ResumeInfo(len(generations), replicas, threads, is_ours)
