"""Write one checkpoint to disk, in a background thread.

each writer: its tensors ──> __K_0.distcp, part-K.json ─┐
main rank:   all parts there ──> .metadata, manifest.json ──> rename
the others:  wait for the main rank's word
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import secrets
import shutil
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lockstep.errors import CheckpointError, PeerError, causes
from lockstep.state.checkpoint import catalog, dcp, manifest
from lockstep.state.checkpoint.catalog import Key
from lockstep.state.checkpoint.manifest import FileSpec, Manifest
from lockstep.state.files.atomic_file import atomic_write, make_directory, sync_directory, sync_file
from lockstep.world import host
from lockstep.world.waiting import await_any

_INTERVAL = 0.01
#: How long the main rank waits for the others to hear that a checkpoint is there.
_LINGER_SECONDS = 5.0


class DroppedError(Exception):
    """Nothing waits for the checkpoint any more."""


class Peers:
    """The ranks of a run, as a thread of one of them hears them: through the store, never waiting in it.

    Args:
        store: a store that these ranks use for nothing else; `None` for one rank.
        rank: which rank this is.
        size: number of ranks.
        patience: seconds without any news after which a rank is missing.
    """

    def __init__(self, store: dist.Store | None, *, rank: int, size: int, patience: float) -> None:
        self.rank, self.size, self.patience = rank, size, patience
        self._dropped = threading.Event()
        # A client of its own: the main thread's may be busy waiting.
        self._store = None if store is None else store.clone()  # type: ignore[attr-defined]

    def drop(self) -> None:
        """End whatever waits."""
        self._dropped.set()

    def check(self) -> None:
        """Raise if nothing waits any more.

        Raises:
            DroppedError: if `drop` was called.
        """
        if self._dropped.is_set():
            raise DroppedError

    def say(self, key: str, value: Any = None) -> None:
        """Tell the others."""
        if self._store is not None:
            self._store.set(key, json.dumps(value))

    def hear(self, of: str, keys: Sequence[str], seconds: float = float("inf")) -> list[Any]:
        """Wait until all `keys` are told, each of which ends with the rank that tells it; return them.

        Args:
            of: what they belong to; a rank that fails in it says so.
            keys: what is waited for.
            seconds: how long.

        Raises:
            CheckpointError: if a rank failed, or is missing.
            DroppedError: if nothing waits any more.
        """
        store = self._store
        if store is None or not keys:
            return []
        found = await_any(store, [[f"{of}/failed"], keys], seconds, self.check)
        self.look(of)
        if found is None:
            missing = ", ".join(
                f"rank {k.rpartition('/')[2]}" for k in keys if not store.check([k])
            )
            raise CheckpointError(
                f"{missing} did not come within {seconds:g} s to write a checkpoint together",
                hint="all ranks have to save at the same step",
            )
        return [json.loads(store.get(key)) for key in keys]

    def fail(self, of: str, error: CheckpointError) -> None:
        """Tell the others why this cannot be done, unless they know."""
        if self._store is not None and not self._store.check([f"{of}/failed"]):
            numbers = [one.errno for one in causes(error) if isinstance(one, OSError)]
            self.say(f"{of}/failed", [self.rank, error.message, error.hint, *numbers[:1]])

    def failure(self, of: str) -> CheckpointError | None:
        """Return why a rank has failed, if one has."""
        if self._store is None or not self._store.check([f"{of}/failed"]):
            return None
        rank, reason, hint, *numbers = json.loads(self._store.get(f"{of}/failed"))
        error = CheckpointError(f"rank {rank}: {reason}", hint=hint)
        error.__cause__ = OSError(*numbers, reason) if numbers else None
        return error

    def look(self, of: str) -> None:
        """Look whether a rank has failed.

        Raises:
            CheckpointError: naming it, and why.
            DroppedError: if nothing waits any more.
        """
        self.check()
        if (failure := self.failure(of)) is not None:
            raise failure


@dataclass(frozen=True, slots=True, kw_only=True)
class Workplace:
    """Where the ranks write a checkpoint before it has its name.

    Attributes:
        directory: where checkpoints are.
        drafts: a directory there, with another name in each launch.
        writers: ranks that share the main rank's directory; the main rank is the first.
    """

    directory: Path
    drafts: Path
    writers: list[int]

    @staticmethod
    def open(directory: Path, peers: Peers, attempt: int) -> Workplace:
        """Agree with the other ranks on it; what earlier launches have left unfinished is removed.

        Args:
            directory: where checkpoints are.
            peers: the other ranks.
            attempt: counts calls, alike on all ranks: one that failed says nothing of the next.

        Raises:
            CheckpointError: if the main rank cannot write there, or a rank does not come.
        """
        others, begin = range(1, peers.size), f"begin-{attempt}"
        if peers.rank:
            (name,) = peers.hear(begin, [f"{begin}/name/0"], peers.patience)
            peers.say(f"{begin}/sees/{peers.rank}", (directory / name).is_dir())
            (writers,) = peers.hear(begin, [f"{begin}/writers/0"], peers.patience)
            return Workplace(directory=directory, drafts=directory / name, writers=writers)
        try:
            make_directory(directory, manifest.DIRECTORY_MODE)
            drafts = directory / f"{catalog.DRAFT}{_machine()}-{secrets.token_hex(8)}"
            drafts.mkdir(mode=manifest.DIRECTORY_MODE)
            for left in directory.glob(f"{catalog.DRAFT}*"):
                # By the clock of the file system: those of hosts may differ.
                if left != drafts and _is_dead(left, drafts.stat().st_mtime - peers.patience):
                    shutil.rmtree(left, ignore_errors=True)
            peers.say(f"{begin}/name/0", drafts.name)
            keys = [f"{begin}/sees/{rank}" for rank in others]
            sees = peers.hear(begin, keys, peers.patience)
        except Exception as error:
            peers.fail(begin, explained(error))
            raise
        writers = [0, *(rank for rank, one in zip(others, sees, strict=False) if one)]
        peers.say(f"{begin}/writers/0", writers)
        return Workplace(directory=directory, drafts=drafts, writers=writers)

    def close(self) -> None:
        """Remove what is not finished."""
        shutil.rmtree(self.drafts, ignore_errors=True)


class Saving:
    """Writes one checkpoint.

    Args:
        peers: the other ranks.
        place: where to write, and which ranks write.
        serial: which checkpoint of this launch it is, from 1.
        told: what it holds; its files are not known yet.
        shares: what each writer writes.
        tensors: this rank's parts, on the CPU; nothing changes them.

    Attributes:
        path: on the main rank, where it is.
    """

    def __init__(
        self,
        peers: Peers,
        place: Workplace,
        serial: int,
        told: Manifest,
        shares: dcp.Shares,
        tensors: Mapping[str, Tensor],
    ) -> None:
        self._peers, self._place = peers, place
        self._told, self._shares, self._tensors = told, shares, tensors
        self._serial = str(serial)
        self._draft = place.drafts / self._serial
        self._there = self._of_step()
        self.path = catalog.place(place.directory, (told.step, 0))

    def _of_step(self) -> dict[Key, Path]:
        """Return where checkpoints of this step are."""
        there = catalog.paths(self._place.directory)
        return {key: path for key, path in there.items() if key[0] == self._told.step}

    def run(self) -> bool:
        """Write it; return whether it is on disk: it is not where nothing waits for it any more.

        Raises:
            CheckpointError: if it cannot be written, by whichever rank.
        """
        try:
            if self._peers.rank in self._place.writers:
                self._write_part(self._place.writers.index(self._peers.rank))
            if self._peers.rank == 0:
                self._commit(self._gather())
                self._tell()
            else:
                self._follow()
        except DroppedError:
            self._give_up()
            return False
        except PeerError:
            raise
        except dist.DistError as error:
            self._give_up()
            raise PeerError("the other ranks left while a checkpoint was written") from error
        except Exception as error:
            told = explained(error)
            with contextlib.suppress(dist.DistError):
                # Once a rank has failed the draft is removed, and the rest is a consequence.
                told = self._peers.failure(self._serial) or told
                self._peers.fail(self._serial, told)
            self._give_up()
            raise not_written(self.path, told) from error
        return True

    def _give_up(self) -> None:
        if self._peers.rank == 0:
            shutil.rmtree(self._draft, ignore_errors=True)

    def _write_part(self, part: int) -> None:
        self._draft.mkdir(mode=manifest.DIRECTORY_MODE, exist_ok=True)
        specs = self._told.tensors
        results = dcp.write_part(self._draft, part, self._shares, specs, self._tensors)
        names = {result["file"] for result in results}
        files = {name: _describe(self._draft / name) for name in sorted(names)}
        told = json.dumps({"results": results, "files": files})
        atomic_write(self._part(part), told, manifest.FILE_MODE, sync=False)

    def _part(self, part: int) -> Path:
        return self._draft / f"part-{part}.json"

    def _gather(self) -> list[dict[str, Any]]:
        """Return what all writers say of their parts, once all are there.

        Raises:
            CheckpointError: naming the ranks that don't write any more.
        """
        missing, patience = dict(enumerate(self._place.writers)), self._peers.patience
        seen, since = -1, time.monotonic()
        while missing := {k: rank for k, rank in missing.items() if not self._part(k).exists()}:
            self._peers.look(self._serial)
            written = sum(_sizes(self._draft))
            if written != seen:
                seen, since = written, time.monotonic()
            if time.monotonic() - since > patience:
                ranks = ", ".join(str(rank) for rank in missing.values())
                raise CheckpointError(
                    f"rank {ranks} wrote nothing to {self._draft} for {patience:g} s",
                    hint="the output of that rank, and the disk, may say why",
                )
            time.sleep(_INTERVAL)
        count = len(self._place.writers)
        return [json.loads(self._part(part).read_text(encoding="utf-8")) for part in range(count)]

    def _commit(self, parts: list[dict[str, Any]]) -> None:
        draft, specs = self._draft, self._told.tensors
        dcp.finish(draft, self._shares, specs, [part["results"] for part in parts])
        files = {name: FileSpec(**spec) for part in parts for name, spec in part["files"].items()}
        files[dcp.METADATA] = FileSpec(**_describe(draft / dcp.METADATA))
        for part in range(len(parts)):
            self._part(part).unlink()
        self._peers.look(self._serial)
        manifest.write(draft, replace(self._told, files=files))
        try:
            self._rename()
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            self._rename()  # a file system that several hosts share has listed a checkpoint late
        sync_directory(self._place.directory)

    def _rename(self) -> None:
        """Make this state the newest checkpoint of its step; one that is there already moves up."""
        there = self._of_step()
        texts = {key: self._text_at(path) for key, path in there.items()}
        last = max(there, default=(self._told.step, -1))
        if last in there and texts[last] is None:
            catalog.remove(there[last])
        # Another state of this step has the next number: weights may change without an update.
        is_free = last not in there or not there[last].exists()
        is_next = not is_free and texts[last] != self._told.text
        self.path = catalog.place(self._place.directory, (last[0], max(last[1], 0) + is_next))
        same = next((there[key] for key in there if texts[key] == self._told.text), None)
        if same is None:
            self._draft.rename(self.path)
            return
        same.rename(self.path)
        if self._told.best is not None:
            manifest.note_best(self.path, self._told.best)

    def _text_at(self, path: Path) -> str | None:
        """Return the text of a checkpoint; `None` for one that is damaged, or another run's."""
        try:
            there = catalog.look(path)
        except CheckpointError:
            return None
        return None if there.manifest.differences(self._told.identity) else there.manifest.text

    def _tell(self) -> None:
        """Tell the other ranks that the checkpoint is there; return when they have heard."""
        # Of a checkpoint that failed, a rank may have begun its part after this one had given up. All
        # of them have left that behind, and don't begin the next one before they hear.
        for left in self._place.drafts.glob("*"):
            shutil.rmtree(left, ignore_errors=True)
        heard = [f"{self._serial}/heard/{rank}" for rank in range(1, self._peers.size)]
        # Without the store, no rank would read it; and the checkpoint is there.
        with contextlib.suppress(RuntimeError, CheckpointError):
            self._peers.say(f"{self._serial}/done/0")
            self._peers.hear(self._serial, heard, _LINGER_SECONDS)

    def _follow(self) -> None:
        try:
            self._peers.hear(self._serial, [f"{self._serial}/done/0"])
            self._peers.say(f"{self._serial}/heard/{self._peers.rank}")
        except dist.DistError as error:  # the store, and the main rank with it, is not there
            if not self._of_step().keys() - self._there.keys():
                raise PeerError("rank 0 left while it wrote a checkpoint") from error


def _machine() -> str:
    """Return a name of this host, until it boots again."""
    return hashlib.sha256(host.identity().encode()).hexdigest()[:8]


def _is_dead(drafts: Path, since: float) -> bool:
    """Return whether the launch that writes to `drafts` is gone.

    The lock of the run directory says so of launches on this host. A file system without locks says nothing
    of other hosts: their drafts are dead if nothing has been written there `since`.
    """
    own = (f"{catalog.DRAFT}{_machine()}-", catalog.REMOVED)
    if drafts.name.startswith(own):
        return True
    newest = 0.0
    for path in (drafts, *drafts.rglob("*")):
        with contextlib.suppress(OSError):
            newest = max(newest, path.stat().st_mtime)
    return newest < since


def explained(error: BaseException) -> CheckpointError:
    """Return why something cannot be written, and what helps, as far as `error` says it."""
    if isinstance(error, CheckpointError):
        return error
    cause = next((one for one in causes(error) if isinstance(one, OSError)), None)
    if cause is None:
        return CheckpointError(f"{type(error).__name__}: {error}")
    hint = "--run-dir names another place; earlier checkpoints are as they were"
    if cause.errno in (errno.ENOSPC, errno.EDQUOT):
        hint = "make room, or keep fewer (keep=, LOCKSTEP_KEEP); earlier ones are as they were"
    reason = CheckpointError(cause.strerror or str(cause), hint=hint)
    reason.__cause__ = cause  # its number says whether the next generation may write it
    return reason


def not_written(path: Path, reason: CheckpointError) -> CheckpointError:
    """Return the error for a checkpoint that is not on disk."""
    return CheckpointError(
        f"the checkpoint {path} cannot be written: {reason.message}", hint=reason.hint
    )


def _describe(path: Path) -> dict[str, Any]:
    """Return what a file of the checkpoint looks like, which is on the disk then."""
    path.chmod(manifest.FILE_MODE)
    sync_file(path)  # DCP of torch 2.15 leaves it in the memory of the system
    return asdict(FileSpec.of(path))


def _sizes(directory: Path) -> Iterator[int]:
    for path in directory.iterdir():
        with contextlib.suppress(FileNotFoundError):
            yield path.stat().st_size
