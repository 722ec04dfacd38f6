"""What the run directory says of a run that is found there unfinished."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lockstep.record import run_file
from lockstep.world.meet import Meeting


@dataclass(frozen=True, slots=True)
class Earlier:
    """What a run has been until now.

    Attributes:
        generations: how many times its processes were started before.
        replicas: number of replicas that it began with; `None` for a new run.
        threads: intra-op threads that it began with.
    """

    generations: int = 0
    replicas: int | None = None
    threads: int | None = None

    @property
    def is_new(self) -> bool:
        """Whether there was nothing before."""
        return self.generations == 0


def recall(meeting: Meeting, run_dir: Path | None, *, fresh: bool) -> Earlier:
    """Return what the main rank finds in `run_dir`, the same on all ranks.

    Raises:
        RunDirectoryError: if the record there is damaged.
        PeerError: if the main rank cannot go on.
    """
    store = meeting.store
    if meeting.world.is_main:
        recorded = None if run_dir is None or fresh else run_file.read(run_dir)
        store.set("earlier", json.dumps(asdict(_earlier(recorded or {}))))
    meeting.wait(["earlier"], "begin")
    return Earlier(**json.loads(store.get("earlier")))


def _earlier(recorded: dict[str, Any]) -> Earlier:
    identity = recorded.get("identity", {})
    generations = recorded.get("generations", [])
    if not generations:
        return Earlier()
    return Earlier(len(generations), identity.get("replicas"), identity.get("threads"))
