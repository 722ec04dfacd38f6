"""Resume of a run: finding its directory, and loading its newest state from memory or disk."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lockstep.engine.recovery import branch_settings
from lockstep.engine.recovery.state import ANSWERS, State
from lockstep.errors import CheckpointError
from lockstep.settings import Settings
from lockstep.state.checkpoint import dcp, state_codec
from lockstep.state.checkpoint.catalog import Catalog, ValidCheckpoint, look
from lockstep.state.checkpoint.parts import StoredTensor
from lockstep.state.checkpoint.position import SavedPosition
from lockstep.state.checkpoint.snapshot import Snapshots
from lockstep.state.files import run_file
from lockstep.state.files.lock import LockOwner
from lockstep.state.record import unfinished
from lockstep.state.record.unfinished import BASE, FIXED
from lockstep.world.model import World
from lockstep.world.rendezvous.rank_rendezvous import RankRendezvous

_NO_RANK = "-1"
#: Variables by which a user continues the newest unfinished run, or the run in a given directory.
_VARIABLES = {"resume": "LOCKSTEP_RESUME=1", "run_dir": "LOCKSTEP_RUN_DIR="}


@dataclass(frozen=True, slots=True)
class ResumeInfo:
    """Facts about earlier starts of a run, which the main rank reads from the run's directory."""

    generations: int = 0  # number of times that the run's processes were started before
    replicas: int | None = None  # number of replicas that the run began with; `None` for a new run
    threads: int | None = None  # number of threads that the run began with; `None` for a new run
    is_ours: bool = False  # whether this launch began the run, and has now restarted its processes
    directory: str | None = None  # directory of an unfinished run that continues
    note: str | None = None  # line for the user about an unfinished run
    parent: str | None = None  # checkpoint of another run with whose state this run begins
    audits: dict[str, Any] = field(default_factory=dict)  # what `run.json` has of audits

    @property
    def is_new(self) -> bool:
        """Whether this is the first start of the run."""
        return self.generations == 0


def launch_of(world: World, environ: Mapping[str, str]) -> str | None:
    """Return the name that `lockstep run` gave this launch; `None` for a process of another launcher."""
    return environ.get("LOCKSTEP_LAUNCH") if world.environment == "lockstep" else None


def recall(
    rendezvous: RankRendezvous, run_dir: Path | None, launch: str | None, settings: Settings
) -> ResumeInfo:
    """Return facts about earlier starts of the run; rank 0 reads and broadcasts them.

    Args:
        rendezvous: connection of this rank to all others.
        run_dir: the run's directory; `None` continues an unfinished run or begins one in a new directory.
        launch: name that `lockstep run` gave this launch, or `None`.
        settings: the run's settings, such as `resume` and `fresh`.

    Raises:
        RunDirectoryError: if the directory's `run.json` is damaged.
        UsageError: if the user wants to continue an unfinished run, and none exists.
        PeerError: if another rank has failed.
    """

    def earlier() -> ResumeInfo:
        chosen, line = _choose(rendezvous, run_dir, launch, settings)
        found = None if chosen is None or chosen == run_dir else str(chosen)
        recorded = (None if chosen is None else run_file.read(chosen)) or {}
        # A restart continues the run that this launch began, also with --fresh.
        is_of_launch = launch is not None or rendezvous.world.generation > 0
        is_ours = recorded.get("launch") == launch and is_of_launch
        generations, identity = recorded.get("generations", []), recorded.get("identity", {})
        if not generations or (settings.fresh and not is_ours):
            parent = None if generations else _parent_of(recorded)
            return ResumeInfo(directory=found, note=line, parent=parent)
        replicas, threads = identity.get("replicas"), identity.get("threads")
        parent, count = _parent_of(recorded), len(generations)
        audits = recorded.get("audits", {})
        return ResumeInfo(count, replicas, threads, is_ours, found, line, parent, audits)

    text = rendezvous.broadcast("earlier", lambda: json.dumps(asdict(earlier())), "begin")
    return ResumeInfo(**json.loads(text))


def _parent_of(recorded: Mapping[str, Any]) -> str | None:
    name = recorded.get("parent", {}).get("checkpoint")
    return name if isinstance(name, str) else None


def _choose(
    rendezvous: RankRendezvous, run_dir: Path | None, launch: str | None, settings: Settings
) -> tuple[Path | None, str | None]:
    """Choose the run directory; return it, or `None` for a new one, and a message or `None`.

    Under `lockstep run`, which has chosen it already, it is `run_dir`. Otherwise `settings.resume` chooses
    the directory of an unfinished run. Without `settings.resume`, the message tells of an unfinished run
    that could be resumed. `launch`: name that `lockstep run` gave this launch, or `None`.
    """
    world, is_first = rendezvous.world, rendezvous.number == 0
    if world.environment == "lockstep" or not (settings.resume or (run_dir is None and is_first)):
        return run_dir, None  # the launcher has chosen the directory
    if settings.resume and settings.fresh:
        raise unfinished.contradicting("LOCKSTEP_RESUME", "LOCKSTEP_FRESH")
    script, arguments = run_file.script_and_arguments()
    meant = {name: getattr(settings, name) for name in ("name", *FIXED)}
    found = unfinished.find(
        BASE.glob("*/*") if run_dir is None else [run_dir],
        {**meant, "script": script, "arguments": arguments},
        LockOwner.of(world.environment, os.environ, launch),
    )
    if settings.resume and (found or is_first):
        what, where = " ".join([script, *arguments]), run_dir or BASE
        return unfinished.require(found, what, where, **_VARIABLES), None
    return run_dir, unfinished.note(found, **_VARIABLES) if found and is_first else None


@dataclass(frozen=True, slots=True)
class SavedState:
    """A saved state of a run, read from memory or disk."""

    text: str  # JSON of the position and of all values that are not tensors
    tensors: Mapping[str, StoredTensor]  # tensors by name; each is read at its first use
    source: str  # path, `memory`, or the rank that sent the state, for messages
    is_part: bool = False  # whether it has only this rank's parts of sharded tensors
    say: Callable[[str], None] | None = None  # shows messages; only if the state is another run's

    @property
    def position(self) -> SavedPosition:
        """Position of the run in its script when the state was saved."""
        prefix = f"{ANSWERS}."
        own = {name: tensor for name, tensor in self.tensors.items() if name.startswith(prefix)}
        answers = {name.removeprefix(prefix): tensor.read() for name, tensor in own.items()}
        return SavedPosition.parse(_content(self.text, "position"), answers)

    @property
    def variables(self) -> str:
        """Fingerprints of the script's variables; empty if an old version of Lockstep saved the state."""
        text = json.loads(self.text).get("variables", "")
        return text if isinstance(text, str) else ""

    def restore(self, state: State, *, whole: bool) -> None:
        """Load this saved state into the models, optimizers and other objects of `state`.

        `whole`: whether the script must have made all saved objects; if not, missing objects are left out.
        """
        needed = state.needed_whole(self.tensors)

        def tensor(name: str) -> Any:
            stored = self.tensors[name]
            return stored.read() if name in needed else stored

        try:
            values = state_codec.rebuild(_content(self.text, "state"), tensor)
            del values[ANSWERS]  # results of metrics, which the position contains
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise _unreadable(f"its state cannot be read ({error!r})") from error
        state.load(values, whole=whole)
        if self.say is not None:
            parents = json.loads(self.text).get("initial", [])
            own = state.optimizers, state.schedulers
            for line in branch_settings.set_again(*own, parents, state.initial):
                if whole:
                    self.say(f"lockstep: {line}")


class StateSearch:
    """Search of all ranks for the newest saved state of a run, in shared memory and on disk.

    The newest state is the one that was saved after the largest number of batches and epochs.
    """

    def __init__(
        self,
        rendezvous: RankRendezvous,
        group: dist.ProcessGroup | None,
        snapshots: Snapshots | None,
        disk: Catalog,
    ) -> None:
        self._rendezvous, self._group, self._disk = rendezvous, group, disk
        self._rank, self._size = rendezvous.world.rank, rendezvous.world.size
        self._memory: SavedState | None = None
        found = None if snapshots is None else snapshots.found
        is_usable = found is not None and (
            found.is_whole or (found.size == self._size and self._rank in found.ranks)
        )
        if found is not None and is_usable:
            self._memory = SavedState(found.text, found.stored(), "memory", not found.is_whole)
        self._found: ValidCheckpoint | None = None

    def find(self) -> SavedState | None:
        """Return the newest saved state, the same on all ranks; `None` if no state was saved.

        Raises:
            RunDirectoryError: if a checkpoint in the directory belongs to another run.
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
            if own is None:  # a node may not see the main rank's disk
                with contextlib.suppress(CheckpointError):
                    own = _read(look(Path(path)))
        return self._spread(own)

    def _on_disk(self, *, beyond: int) -> ValidCheckpoint | None:
        """Return the newest checkpoint if it was saved after more than `beyond` batches and epochs.

        Otherwise, and if there is none, return `None`.
        """
        there = self._disk.newest_text()
        if there is not None and _points_of(there) <= beyond:
            return None
        found = self._disk.newest()  # raises an error if the checkpoint cannot be read
        return None if found is None or _points_of(found.manifest.text) <= beyond else found

    def _newest(self, answers: list[str]) -> str:
        """Return as JSON which saved state is the newest, in the memory of a rank or on disk.

        Args:
            answers: for each rank, JSON of the number of batches and epochs before the state in its memory
                (-1 without one), and of whether the state lacks other ranks' shards.

        Returns:
            JSON of this number for the newest complete state in memory, and of the path of a newer
            checkpoint, or an empty text.
        """
        newest = _newest_whole([json.loads(answer) for answer in answers])
        self._found = self._on_disk(beyond=newest)
        return json.dumps([newest, "" if self._found is None else str(self._found.path)])

    def _conclude(self, question: str, own: str, of: Callable[[list[str]], str]) -> str:
        return self._rendezvous.conclude(f"resume/{question}", own, of, "find their state")

    def _spread(self, own: SavedState | None) -> SavedState | None:
        """Return `own`, the newest saved state, or if it is `None` the state that another rank broadcasts.

        If no rank has a state, return `None`.
        """

        def first_with_state(have: list[str]) -> str:
            return str(have.index("1")) if {"0", "1"} == set(have) else _NO_RANK

        source = self._conclude("source", "0" if own is None else "1", first_with_state)
        return own if source == _NO_RANK else self._broadcast(own, int(source))

    def _broadcast(self, own: SavedState | None, source: int) -> SavedState:
        """Broadcast the state `own` of rank `source` to ranks whose `own` is `None`; return the state."""
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
        tensors: dict[str, StoredTensor] = {}
        for name, dtype, shape in head["tensors"]:
            if own is not None and is_source:
                tensor = own.tensors[name].read()
            else:
                tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            # As bytes, since not all dtypes can be broadcast.
            dist.broadcast(tensor.reshape(-1).view(torch.uint8), src=source, group=self._group)
            if own is None:
                tensors[name] = StoredTensor.of(tensor)
        return own or SavedState(head["text"], tensors, f"rank {source}")


def _newest_whole(states: list[Any]) -> int:
    """Return the number of batches and epochs before the newest complete state in memory; -1 without one.

    `states`: for each rank, this number for the state in its memory, and whether that lacks other ranks'
    shards.
    """
    # Parts make a complete state only if every rank has its part of the same state.
    has_all = all(state == states[0] for state in states)
    return max((points for points, is_part in states if has_all or not is_part), default=-1)


def _read(found: ValidCheckpoint) -> SavedState:
    tensors = dcp.stored(found.path, found.manifest)
    return SavedState(found.manifest.text, tensors, str(found.path))


def _points(saved: SavedState | None) -> int:
    return -1 if saved is None else saved.position.points


def _points_of(text: str) -> int:
    return SavedPosition.parse(_content(text, "position")).points


def _content(text: str, part: str) -> Any:
    """Return the value of the key `part` in the JSON `text` of a saved state.

    Raises:
        CheckpointError: if the JSON is damaged or lacks the key.
    """
    try:
        return json.loads(text)[part]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _unreadable(f"it has no {part} ({error!r})") from error


def _unreadable(what: str) -> CheckpointError:
    return CheckpointError(
        f"what was saved is no state of a run: {what}", hint="--fresh begins anew"
    )
