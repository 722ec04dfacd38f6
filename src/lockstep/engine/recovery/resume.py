"""Resume: the state of a run directory, or the newest snapshot that any rank holds."""

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
from lockstep.state.checkpoint import catalog as checkpoints
from lockstep.state.checkpoint import dcp, state_codec
from lockstep.state.checkpoint.disk import Checkpoints
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
#: How a user asks for the newest unfinished run, and for one by its directory.
_VARIABLES = {"resume": "LOCKSTEP_RESUME=1", "run_dir": "LOCKSTEP_RUN_DIR="}


@dataclass(frozen=True, slots=True)
class ResumeInfo:
    """What a run has been until now.

    Attributes:
        generations: how many times its processes were started before.
        replicas: number of replicas that it began with; `None` for a new run.
        threads: intra-op threads that it began with.
        is_ours: whether this launch has recorded it, before its processes were restarted.
        directory: of the unfinished run that continues, where none was named; `None` for none.
        note: the line that names an unfinished run, where a new one begins.
    """

    generations: int = 0
    replicas: int | None = None
    threads: int | None = None
    is_ours: bool = False
    directory: str | None = None
    note: str | None = None

    @property
    def found(self) -> Path | None:
        """The directory of the unfinished run that continues, where none was named."""
        return None if self.directory is None else Path(self.directory)

    @property
    def is_new(self) -> bool:
        """Whether there was nothing before."""
        return self.generations == 0


def launch_of(world: World, environ: Mapping[str, str]) -> str | None:
    """Return the name of the launch that this process belongs to; `None` where none is given."""
    return environ.get("LOCKSTEP_LAUNCH") if world.environment == "lockstep" else None


def recall(
    rendezvous: RankRendezvous, run_dir: Path | None, launch: str | None, settings: Settings
) -> ResumeInfo:
    """Return what the main rank finds in the run's directory, the same on all ranks.

    Args:
        rendezvous: rendezvous of the ranks.
        run_dir: the directory that is named; `None` for a new one, or an unfinished run's.
        launch: name of this launch.
        settings: whether an unfinished run is to continue, and one of another launch to be forgotten.

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

    told = rendezvous.broadcast("earlier", lambda: json.dumps(asdict(earlier())), "begin")
    return ResumeInfo(**json.loads(told))


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
    """A state that was saved.

    Attributes:
        text: its position and its numbers, JSON.
        tensors: by name, each read where it is needed.
        source: where it was, in words.
        is_part: whether it has this rank's parts, and not all, of tensors that are cut over ranks.
    """

    text: str
    tensors: Mapping[str, Stored]
    source: str
    is_part: bool = False

    @property
    def position(self) -> Position:
        """Where the run was."""
        names = len(ANSWERS) + 1
        own = (n for n in self.tensors if n.startswith(f"{ANSWERS}."))
        answers = {name[names:]: self.tensors[name].read() for name in own}
        return Position.parse(_content(self.text, "position"), answers)

    @property
    def variables(self) -> str:
        """Fingerprints of the script's variables; empty in a state of an earlier version."""
        told = json.loads(self.text).get("variables", "")
        return told if isinstance(told, str) else ""

    def restore(self, state: State, *, whole: bool) -> None:
        """Give everything in `state` what was saved of it."""
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
    """Looks for the state of a run in memory and on disk, together with the other ranks.

    Args:
        rendezvous: rendezvous of the ranks.
        group: the process group; `None` for a single rank.
        snapshots: the memory that this rank sees, if any.
        disk: the checkpoints of the run.
    """

    def __init__(
        self,
        rendezvous: RankRendezvous,
        group: dist.ProcessGroup | None,
        snapshots: Snapshots | None,
        disk: Checkpoints,
    ) -> None:
        self._rendezvous, self._group, self._disk = rendezvous, group, disk
        self._rank, self._size = rendezvous.world.rank, rendezvous.world.size
        self._memory = _in_memory(snapshots, self._rank, self._size)
        self._found: checkpoints.Found | None = None

    def find(self) -> Saved | None:
        """Return the newest state, the same on all ranks; `None` where the run begins.

        Raises:
            RunDirectoryError: if a checkpoint in the directory is of another run.
            CheckpointError: if the disk cannot be read.
        """
        if self._size == 1:
            disk = self._on_disk(beyond=_points(self._memory))
            return self._memory if disk is None else self._read(disk)
        own = [_points(self._memory), self._memory is not None and self._memory.is_part]
        newest, path = json.loads(self._conclude("newest", json.dumps(own), self._newest))
        if path:
            return self._spread(self._read_where_shared(path))
        return self._spread(self._memory if 0 <= newest == _points(self._memory) else None)

    def _on_disk(self, *, beyond: int) -> checkpoints.Found | None:
        """Return the newest checkpoint that is further than `beyond` points; it is read only then."""
        there = self._disk.newest_text()
        if there is not None and _points_of(there) <= beyond:
            return None
        found = self._disk.newest()  # where no text can be read, this says why
        return None if found is None or _points_of(found.manifest.text) <= beyond else found

    def _newest(self, told: list[str]) -> str:
        """Return, on the main rank, how far memory is and where something newer is on disk, if it is."""
        newest = _newest_whole([json.loads(one) for one in told])
        self._found = self._on_disk(beyond=newest)
        return json.dumps([newest, "" if self._found is None else str(self._found.path)])

    def _read_where_shared(self, path: str) -> Saved | None:
        """Return the checkpoint, or nothing where this node does not see the main rank's disk."""
        if self._found is not None:
            return self._read(self._found)
        with contextlib.suppress(CheckpointError):
            return self._read(checkpoints.look(Path(path)))
        return None

    def _read(self, found: checkpoints.Found) -> Saved:
        tensors = dcp.stored(found.path, found.manifest)
        return Saved(found.manifest.text, tensors, str(found.path))

    def _conclude(self, question: str, own: str, of: Callable[[list[str]], str]) -> str:
        return self._rendezvous.conclude(f"resume/{question}", own, of, "find their state")

    def _spread(self, own: Saved | None) -> Saved | None:
        """Let ranks that hold the state send it to those that don't."""
        source = self._conclude("source", "0" if own is None else "1", _first_of_some)
        return own if source == _NO_RANK else self._broadcast(own, int(source))

    def _broadcast(self, own: Saved | None, source: int) -> Saved:
        store, is_source = self._rendezvous.store, self._rank == source
        if is_source:
            assert own is not None
            shapes = [
                [name, str(one.dtype).removeprefix("torch."), list(one.shape)]
                for name, one in own.tensors.items()
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
            dist.broadcast(_bytes(tensor), src=source, group=self._group)
            if own is None:
                tensors[name] = Stored.of(tensor)
        return own or Saved(head["text"], tensors, f"rank {source}")


def _first_of_some(have: list[str]) -> str:
    """Return the first rank that has the state, where some lack it; else that none has to send it."""
    return str(have.index("1")) if {"0", "1"} == set(have) else _NO_RANK


def _newest_whole(states: list[Any]) -> int:
    """Return the points of the newest state that is in memory with all of its parts; -1 without one.

    Args:
        states: for each rank the points of what its memory has, and whether that is a part.
    """
    # Each rank has its part of it, or some of it is lost.
    has_all = all(one == states[0] for one in states)
    return max((points for points, is_part in states if has_all or not is_part), default=-1)


def _in_memory(snapshots: Snapshots | None, rank: int, size: int) -> Saved | None:
    found = None if snapshots is None else snapshots.found
    if found is None or not (found.is_whole or (found.size == size and rank in found.ranks)):
        return None
    return Saved(found.text, found.stored(), "memory", not found.is_whole)


def _points(saved: Saved | None) -> int:
    return -1 if saved is None else saved.position.points


def _points_of(text: str) -> int:
    return Position.parse(_content(text, "position")).points


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _content(text: str, part: str) -> Any:
    """Return a part of what was saved beside the tensors.

    Raises:
        CheckpointError: if it is not what a run saves.
    """
    try:
        return json.loads(text)[part]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _unreadable(f"it has no {part} ({error!r})") from error


def _unreadable(what: str) -> CheckpointError:
    return CheckpointError(
        f"what was saved is no state of a run: {what}", hint="--fresh begins anew"
    )
