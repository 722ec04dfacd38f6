"""Resume: the newest state of a run, from its directory or from snapshots in memory."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lockstep.engine.recovery.state import ANSWERS, State
from lockstep.errors import CheckpointError
from lockstep.settings import Settings
from lockstep.state.checkpoint import dcp, state_codec
from lockstep.state.checkpoint.catalog import Catalog, Found, look
from lockstep.state.checkpoint.parts import Stored
from lockstep.state.checkpoint.position import Position
from lockstep.state.checkpoint.snapshot import Snapshots
from lockstep.state.files import run_file
from lockstep.state.files.lock import Owner
from lockstep.state.record import unfinished
from lockstep.state.record.unfinished import BASE
from lockstep.world.model import World
from lockstep.world.rendezvous.rank_rendezvous import RankRendezvous

_NO_RANK = "-1"
#: Settings that ask for the newest unfinished run, and for one by its directory.
_VARIABLES = {"resume": "LOCKSTEP_RESUME=1", "run_dir": "LOCKSTEP_RUN_DIR="}


@dataclass(frozen=True, slots=True)
class ResumeInfo:
    """What a run's directory says of it.

    Attributes:
        generations: how often its processes were started before.
        is_ours: whether this launch has recorded it, before its processes were restarted.
        directory: of the unfinished run that continues, where none was named.
        note: the line that names an unfinished run, where a new one begins.
    """

    generations: int = 0
    replicas: int | None = None
    threads: int | None = None
    is_ours: bool = False
    directory: str | None = None
    note: str | None = None

    @property
    def is_new(self) -> bool:
        """Whether the run has not been started before."""
        return self.generations == 0


def launch_of(world: World, environ: Mapping[str, str]) -> str | None:
    """Return the name of this process's launch; `None` without one."""
    return environ.get("LOCKSTEP_LAUNCH") if world.environment == "lockstep" else None


def recall(
    rendezvous: RankRendezvous, run_dir: Path | None, launch: str | None, settings: Settings
) -> ResumeInfo:
    """Return what the main rank finds in the run's directory, the same on all ranks.

    Without `run_dir` the run continues in the directory of an unfinished run, or begins in a new one.

    Raises:
        RunDirectoryError: if the record there is damaged.
        UsageError: if an unfinished run is to continue, and there is none.
        PeerError: if the main rank cannot continue.
    """

    def earlier() -> ResumeInfo:
        chosen, line = _choose(rendezvous, run_dir, launch, settings)
        found = None if chosen is None or chosen == run_dir else str(chosen)
        recorded = (None if chosen is None else run_file.read(chosen)) or {}
        # A restart continues with what this launch has begun, fresh or not.
        is_of_launch = launch is not None or rendezvous.world.generation > 0
        is_ours = recorded.get("launch") == launch and is_of_launch
        generations, identity = recorded.get("generations", []), recorded.get("identity", {})
        if not generations or (settings.fresh and not is_ours):
            return ResumeInfo(directory=found, note=line)
        replicas, threads = identity.get("replicas"), identity.get("threads")
        return ResumeInfo(len(generations), replicas, threads, is_ours, found, line)

    text = rendezvous.broadcast("earlier", lambda: json.dumps(asdict(earlier())), "begin")
    return ResumeInfo(**json.loads(text))


def _choose(
    rendezvous: RankRendezvous, run_dir: Path | None, launch: str | None, settings: Settings
) -> tuple[Path | None, str | None]:
    """Return the run's directory, `None` for a new one, and the line that names an unfinished run."""
    world, is_first = rendezvous.world, rendezvous.number == 0
    if world.environment == "lockstep" or not (settings.resume or (run_dir is None and is_first)):
        return run_dir, None  # a launcher has chosen
    if settings.resume and settings.fresh:
        raise unfinished.contradicting("LOCKSTEP_RESUME", "LOCKSTEP_FRESH")
    names = ("name", "seed", "replicas", "threads", "precision")
    script, arguments = run_file.script_and_arguments()
    meant = {name: getattr(settings, name) for name in names}
    found = unfinished.find(
        BASE.glob("*/*") if run_dir is None else [run_dir],
        {**meant, "script": script, "arguments": arguments},
        Owner.of(world.environment, os.environ, launch),
    )
    if settings.resume and (found or is_first):
        what, where = " ".join([script, *arguments]), run_dir or BASE
        return unfinished.require(found, what, where, **_VARIABLES), None
    return run_dir, unfinished.note(found, **_VARIABLES) if found and is_first else None


@dataclass(frozen=True, slots=True)
class Saved:
    """A saved state.

    Attributes:
        text: its position and its numbers, JSON.
        tensors: by name, each read where it is needed.
        source: its place, for messages.
        is_part: whether it has this rank's parts, and not all, of tensors that are cut over ranks.
    """

    text: str
    tensors: Mapping[str, Stored]
    source: str
    is_part: bool = False

    @property
    def position(self) -> Position:
        """Position of the run."""
        prefix = f"{ANSWERS}."
        own = {name: tensor for name, tensor in self.tensors.items() if name.startswith(prefix)}
        answers = {name.removeprefix(prefix): tensor.read() for name, tensor in own.items()}
        return Position.parse(_content(self.text, "position"), answers)

    @property
    def variables(self) -> str:
        """Fingerprints of the script's variables; empty in a state of an earlier version."""
        text = json.loads(self.text).get("variables", "")
        return text if isinstance(text, str) else ""

    def restore(self, state: State, *, whole: bool) -> None:
        """Load the saved state into the objects of `state`."""
        needed = state.needed_whole(self.tensors)

        def tensor(name: str) -> Any:
            stored = self.tensors[name]
            return stored.read() if name in needed else stored

        try:
            values = state_codec.rebuild(_content(self.text, "state"), tensor)
            del values[ANSWERS]  # the position has them
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise _unreadable(f"its state cannot be read ({error!r})") from error
        state.load(values, whole=whole)


class Search:
    """Looks for the state of a run in memory and on disk, together with the other ranks."""

    def __init__(
        self,
        rendezvous: RankRendezvous,
        group: dist.ProcessGroup | None,
        snapshots: Snapshots | None,
        disk: Catalog,
    ) -> None:
        self._rendezvous, self._group, self._disk = rendezvous, group, disk
        self._rank, self._size = rendezvous.world.rank, rendezvous.world.size
        self._memory: Saved | None = None
        found = None if snapshots is None else snapshots.found
        is_usable = found is not None and (
            found.is_whole or (found.size == self._size and self._rank in found.ranks)
        )
        if found is not None and is_usable:
            self._memory = Saved(found.text, found.stored(), "memory", not found.is_whole)
        self._found: Found | None = None

    def find(self) -> Saved | None:
        """Return the newest state, the same on all ranks; `None` where the run begins.

        Raises:
            RunDirectoryError: if a checkpoint in the directory is of another run.
            CheckpointError: if the disk cannot be read.
        """
        if self._size == 1:
            disk = self._on_disk(beyond=_points(self._memory))
            return self._memory if disk is None else _read(disk)
        mine = [_points(self._memory), self._memory is not None and self._memory.is_part]
        newest, path = json.loads(self._conclude("newest", json.dumps(mine), self._newest))
        own = self._memory if 0 <= newest == _points(self._memory) else None
        if path:
            own = None if self._found is None else _read(self._found)
            if own is None:  # on a node that does not see the main rank's disk there is nothing
                with contextlib.suppress(CheckpointError):
                    own = _read(look(Path(path)))
        return self._spread(own)

    def _on_disk(self, *, beyond: int) -> Found | None:
        """Return the newest checkpoint, if its position is beyond so many points."""
        there = self._disk.newest_text()
        if there is not None and _points_of(there) <= beyond:
            return None
        found = self._disk.newest()  # where no text can be read, this says why
        return None if found is None or _points_of(found.manifest.text) <= beyond else found

    def _newest(self, answers: list[str]) -> str:
        """Return the points of the newest state in memory, and the path of a newer checkpoint."""
        newest = _newest_whole([json.loads(answer) for answer in answers])
        self._found = self._on_disk(beyond=newest)
        return json.dumps([newest, "" if self._found is None else str(self._found.path)])

    def _conclude(self, question: str, own: str, of: Callable[[list[str]], str]) -> str:
        return self._rendezvous.conclude(f"resume/{question}", own, of, "find their state")

    def _spread(self, own: Saved | None) -> Saved | None:
        """Let ranks that have the state send it to those that lack it."""
        source = self._conclude("source", "0" if own is None else "1", _first_with_state)
        return own if source == _NO_RANK else self._broadcast(own, int(source))

    def _broadcast(self, own: Saved | None, source: int) -> Saved:
        """Return the state that rank `source` sends to ranks without one."""
        store, is_source = self._rendezvous.store, self._rank == source
        if is_source:
            assert own is not None
            shapes = [
                [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
                for name, tensor in own.tensors.items()
            ]
            store.set("resume/head", json.dumps({"text": own.text, "tensors": shapes}))
        self._rendezvous.wait(["resume/head"], "find their state")
        head: dict[str, Any] = json.loads(store.get("resume/head"))
        tensors: dict[str, Stored] = {}
        for name, dtype, shape in head["tensors"]:
            if own is not None and is_source:
                tensor = own.tensors[name].read()
            else:
                tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            # As bytes: not all types can be broadcast.
            dist.broadcast(tensor.reshape(-1).view(torch.uint8), src=source, group=self._group)
            if own is None:
                tensors[name] = Stored.of(tensor)
        return own or Saved(head["text"], tensors, f"rank {source}")


def _newest_whole(states: list[Any]) -> int:
    """Return the points of the newest state that is in memory with all of its parts; -1 without one.

    `states` has for each rank the points of what its memory has, and whether that is a part.
    """
    # Each rank has its part of it, or some of it is lost.
    has_all = all(state == states[0] for state in states)
    return max((points for points, is_part in states if has_all or not is_part), default=-1)


def _first_with_state(have: list[str]) -> str:
    """Return the first rank that has the state, where some lack it; else `_NO_RANK`."""
    return str(have.index("1")) if {"0", "1"} == set(have) else _NO_RANK


def _read(found: Found) -> Saved:
    tensors = dcp.stored(found.path, found.manifest)
    return Saved(found.manifest.text, tensors, str(found.path))


def _points(saved: Saved | None) -> int:
    return -1 if saved is None else saved.position.points


def _points_of(text: str) -> int:
    return Position.parse(_content(text, "position")).points


def _content(text: str, part: str) -> Any:
    """Return a part of a saved state's text.

    Raises:
        CheckpointError: if the text has no such part.
    """
    try:
        return json.loads(text)[part]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _unreadable(f"it has no {part} ({error!r})") from error


def _unreadable(what: str) -> CheckpointError:
    return CheckpointError(
        f"what was saved is no state of a run: {what}", hint="--fresh begins anew"
    )
