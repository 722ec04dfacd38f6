"""Write one checkpoint to disk, in a background thread on each rank.

each writer: its tensors ──> __K_0.distcp, part-K.json ─┐
main rank:   all parts there ──> .metadata, manifest.json ──> rename
other ranks: wait until the main rank is done
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
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lockstep.errors import CheckpointError, PeerError, causes
from lockstep.state.checkpoint import catalog, dcp
from lockstep.state.checkpoint.catalog import FileSpec, Key, Manifest
from lockstep.state.files.atomic_file import atomic_write, make_directory, sync_directory, sync_file
from lockstep.world import host
from lockstep.world.waiting import await_any

_INTERVAL = 0.01
#: Seconds that the main rank waits for the other ranks to confirm that a checkpoint is written.
_LINGER_SECONDS = 5.0


class StoppedError(Exception):
    """Raised by methods of `StoreChannel` that wait for messages, once its `stop` has been called."""


class StoreChannel:
    """Messages between the ranks' background threads through a store, which is polled without blocking.

    A message belongs to a piece of work, such as one checkpoint; a rank can declare the work as failed.

    Args:
        store: a store that only the background threads use; `None` for one rank.
        patience: seconds without a message after which a rank counts as missing.
    """

    def __init__(self, store: dist.Store | None, *, rank: int, size: int, patience: float) -> None:
        self.rank, self.size, self.patience = rank, size, patience
        self._stopped = threading.Event()
        # Another client of the store: that of the main thread may be blocked in a call that waits.
        self._store = None if store is None else store.clone()  # type: ignore[attr-defined]

    def stop(self) -> None:
        """Make every present and later call that waits for messages raise `StoppedError`."""
        self._stopped.set()

    def send(self, work: str, topic: str, value: Any = None) -> None:
        """Send a JSON `value` to the other ranks, as message `topic` of the piece of work `work`."""
        if self._store is not None:
            self._store.set(f"{work}/{topic}/{self.rank}", json.dumps(value))

    def receive(
        self, work: str, topic: str, ranks: Iterable[int], seconds: float = float("inf")
    ) -> list[Any]:
        """Wait for one message from each rank in `ranks`, and return the values in the order of `ranks`.

        `work` and `topic` name the message, as in `send`.

        Raises:
            CheckpointError: if a rank reports that `work` failed, or is missing after `seconds`.
            StoppedError: after `stop`.
        """
        keys, store = {f"{work}/{topic}/{rank}": rank for rank in ranks}, self._store
        if store is None or not keys:
            return []
        found = await_any(store, [[f"{work}/failed"], [*keys]], seconds, self._check_stopped)
        self.check(work)
        if found is None:
            missing = ", ".join(f"rank {rank}" for k, rank in keys.items() if not store.check([k]))
            raise CheckpointError(
                f"{missing} did not come within {seconds:g} s to write a checkpoint together",
                hint="all ranks have to save at the same step",
            )
        return [json.loads(store.get(key)) for key in keys]

    def fail(self, work: str, error: CheckpointError) -> None:
        """Report to all ranks that `work` failed on this rank with `error`; later reports are ignored."""
        if self._store is not None and not self._store.check([f"{work}/failed"]):
            numbers = [cause.errno for cause in causes(error) if isinstance(cause, OSError)]
            report = [self.rank, error.message, error.hint, *numbers[:1]]
            self._store.set(f"{work}/failed", json.dumps(report))

    def failure(self, work: str) -> CheckpointError | None:
        """Return the error that a rank reported for `work`, or `None` if no rank has reported one."""
        if self._store is None or not self._store.check([f"{work}/failed"]):
            return None
        rank, reason, hint, *numbers = json.loads(self._store.get(f"{work}/failed"))
        error = CheckpointError(f"rank {rank}: {reason}", hint=hint)
        error.__cause__ = OSError(*numbers, reason) if numbers else None
        return error

    def check(self, work: str) -> None:
        """Raise an error if a rank has reported that `work` failed.

        Raises:
            CheckpointError: naming the rank and its error.
            StoppedError: after `stop`.
        """
        self._check_stopped()
        if (failure := self.failure(work)) is not None:
            raise failure

    def _check_stopped(self) -> None:
        if self._stopped.is_set():
            raise StoppedError


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftDirectory:
    """The directory for unfinished checkpoints of one launch, from which complete ones are moved out."""

    directory: Path  # of the checkpoints
    path: Path  # below `directory`, with another name in each launch
    writers: list[int]  # ranks that see the main rank's directory; the main rank is the first

    @staticmethod
    def open(directory: Path, channel: StoreChannel, attempt: int) -> DraftDirectory:
        """Make a directory in `directory` for unfinished checkpoints of all ranks (collective).

        Unfinished checkpoints of ended launches are removed. `attempt` is the number of this call in the
        launch, equal on all ranks.

        Raises:
            CheckpointError: if the main rank cannot write the directory, or a rank does not answer.
        """
        work, patience, others = f"begin-{attempt}", channel.patience, range(1, channel.size)
        if channel.rank:
            (name,) = channel.receive(work, "name", [0], patience)
            channel.send(work, "sees", (directory / name).is_dir())
            (writers,) = channel.receive(work, "writers", [0], patience)
            return DraftDirectory(directory=directory, path=directory / name, writers=writers)
        try:
            make_directory(directory, catalog.DIRECTORY_MODE)
            path = directory / f"{catalog.DRAFT}{_machine()}-{secrets.token_hex(8)}"
            path.mkdir(mode=catalog.DIRECTORY_MODE)
            for left in directory.glob(f"{catalog.DRAFT}*"):
                # Times are those of the file system: the clocks of hosts may differ.
                if left != path and _is_abandoned(left, path.stat().st_mtime - patience):
                    shutil.rmtree(left, ignore_errors=True)
            channel.send(work, "name", path.name)
            sees = channel.receive(work, "sees", others, patience)
        except Exception as error:
            channel.fail(work, explained(error))
            raise
        writers = [0, *(rank for rank, can_see in zip(others, sees, strict=False) if can_see)]
        channel.send(work, "writers", writers)
        return DraftDirectory(directory=directory, path=path, writers=writers)


class CheckpointWriter:
    """Writes one checkpoint to disk, together with the `CheckpointWriter` of each other rank.

    Args:
        serial: number of the checkpoint in this launch, from 1.
        contents: the manifest, still without files.
        shares: the parts of tensors that each writer writes.
        tensors: this rank's parts, on the CPU; they do not change while they are written.
    """

    def __init__(
        self,
        channel: StoreChannel,
        drafts: DraftDirectory,
        serial: int,
        contents: Manifest,
        shares: dcp.Shares,
        tensors: Mapping[str, Tensor],
    ) -> None:
        self._channel, self._drafts, self._serial = channel, drafts, str(serial)
        self._contents, self._shares, self._tensors = contents, shares, tensors
        self._draft = drafts.path / self._serial
        self._reports = [self._draft / f"part-{part}.json" for part in range(len(drafts.writers))]
        self._before = self._of_step()
        #: Path of the checkpoint, valid on the main rank.
        self.path = catalog.place(drafts.directory, (contents.step, 0))

    def _of_step(self) -> dict[Key, Path]:
        """Return the paths of the checkpoints on disk that have this checkpoint's step, newest first.

        There are several if the state has changed between two saves at one step. The keys are step and
        number.
        """
        there = catalog.paths(self._drafts.directory)
        return {key: path for key, path in there.items() if key[0] == self._contents.step}

    def run(self) -> bool:
        """Write the checkpoint; return `True` when it is on disk, `False` after `StoreChannel.stop`.

        Raises:
            CheckpointError: if any rank cannot write the checkpoint.
        """
        channel, writers = self._channel, self._drafts.writers
        try:
            if channel.rank in writers:
                self._write_part(writers.index(channel.rank))
            if channel.rank == 0:
                self._commit(self._await_parts())
                self._announce()
            else:
                self._await_commit()
        except StoppedError:
            self._remove_draft()
            return False
        except PeerError:
            raise
        except dist.DistError as error:
            self._remove_draft()
            raise PeerError("the other ranks left while a checkpoint was written") from error
        except Exception as error:
            reason = own = explained(error)
            with contextlib.suppress(dist.DistError):
                # Once a rank has failed the draft is removed, which makes other ranks fail, too.
                reason = channel.failure(self._serial) or own
                channel.fail(self._serial, reason)
            self._remove_draft()
            raise not_written(self.path, reason) from (error if reason is own else reason)
        return True

    def _remove_draft(self) -> None:
        if self._channel.rank == 0:
            shutil.rmtree(self._draft, ignore_errors=True)

    def _write_part(self, part: int) -> None:
        self._draft.mkdir(mode=catalog.DIRECTORY_MODE, exist_ok=True)
        specs = self._contents.tensors
        results = dcp.write_part(self._draft, part, self._shares, specs, self._tensors)
        names = {result["storage_data"]["relative_path"] for result in results}
        files = {name: _describe(self._draft / name) for name in sorted(names)}
        report = json.dumps({"results": results, "files": files})
        atomic_write(self._reports[part], report, catalog.FILE_MODE, sync=False)

    def _await_parts(self) -> list[dict[str, Any]]:
        """Wait until all writers are done, and return the contents of their files `part-K.json`.

        Raises:
            CheckpointError: naming the ranks that have stopped writing.
        """
        missing, patience = dict(enumerate(self._drafts.writers)), self._channel.patience
        seen, since = -1, time.monotonic()
        while missing := {k: rank for k, rank in missing.items() if not self._reports[k].exists()}:
            self._channel.check(self._serial)
            written = _bytes_in(self._draft)
            if written != seen:
                seen, since = written, time.monotonic()
            if time.monotonic() - since > patience:
                ranks = ", ".join(str(rank) for rank in missing.values())
                raise CheckpointError(
                    f"rank {ranks} wrote nothing to {self._draft} for {patience:g} s",
                    hint="the output of that rank, and the disk, may say why",
                )
            time.sleep(_INTERVAL)
        return [json.loads(report.read_text(encoding="utf-8")) for report in self._reports]

    def _commit(self, parts: list[dict[str, Any]]) -> None:
        """Write `.metadata` and the manifest, then rename the draft to the checkpoint's name.

        `parts` are the contents of the files `part-K.json`, one per writer.
        """
        draft, specs = self._draft, self._contents.tensors
        dcp.finish(draft, self._shares, specs, [part["results"] for part in parts])
        files = {name: FileSpec(**spec) for part in parts for name, spec in part["files"].items()}
        files[dcp.METADATA] = FileSpec(**_describe(draft / dcp.METADATA))
        for report in self._reports:
            report.unlink()
        self._channel.check(self._serial)
        catalog.write_manifest(draft, replace(self._contents, files=files))
        try:
            self._rename()
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            self._rename()  # a file system shared by several hosts had not listed a checkpoint yet
        sync_directory(self._drafts.directory)

    def _rename(self) -> None:
        """Rename the draft directory to a name that makes it the newest checkpoint of its step.

        If a checkpoint of the same state exists, that one is renamed instead, and the draft is not used.
        """
        there = self._of_step()
        texts = {key: self._text_at(path) for key, path in there.items()}
        self.path = catalog.place(self._drafts.directory, self._newest_key(there, texts))
        same = next((there[key] for key in there if texts[key] == self._contents.text), None)
        if same is None:
            self._draft.rename(self.path)
            return
        same.rename(self.path)
        if self._contents.best is not None:
            catalog.note_best(self.path, self._contents.best)

    def _newest_key(self, there: Mapping[Key, Path], texts: Mapping[Key, str | None]) -> Key:
        """Return the key (step and number) under which this checkpoint is the newest of its step.

        `there`: the step's checkpoints on disk. `texts`: their states without tensors, `None` for a damaged
        checkpoint. If the newest one has the same state as this checkpoint, its key is returned. If it is
        damaged, it is removed, and its key is used again.
        """
        if not there:
            return self._contents.step, 0
        last = max(there)
        if texts[last] == self._contents.text:
            return last
        if texts[last] is None:
            catalog.remove(there[last])
            if not there[last].exists():
                return last
        return last[0], last[1] + 1

    def _text_at(self, path: Path) -> str | None:
        """Return the text of the checkpoint at `path`: its state without tensors.

        Return `None` if the checkpoint is damaged, or is of another run.
        """
        try:
            there = catalog.look(path).manifest
        except CheckpointError:
            return None
        return None if there.differences(self._contents.identity) else there.text

    def _announce(self) -> None:
        """Tell the other ranks that the checkpoint is on disk, and wait a few seconds for their answers.

        Files that other ranks have left in the directory for unfinished checkpoints are removed first.
        """
        # A rank may have written its part of a failed checkpoint after this rank had removed that draft. By
        # now no rank writes: none begins the next checkpoint before it gets this message.
        for left in self._drafts.path.glob("*"):
            shutil.rmtree(left, ignore_errors=True)
        # Without the store no rank could read the message; the checkpoint is on disk anyway.
        with contextlib.suppress(RuntimeError, CheckpointError):
            self._channel.send(self._serial, "done")
            others = range(1, self._channel.size)
            self._channel.receive(self._serial, "seen", others, _LINGER_SECONDS)

    def _await_commit(self) -> None:
        try:
            self._channel.receive(self._serial, "done", [0])
            self._channel.send(self._serial, "seen")
        except dist.DistError as error:  # the store is gone, and the main rank with it
            if not self._of_step().keys() - self._before.keys():
                raise PeerError("rank 0 left while it wrote a checkpoint") from error


def _machine() -> str:
    """Return a name of this host that changes when the host reboots."""
    return hashlib.sha256(host.identity().encode()).hexdigest()[:8]


def _is_abandoned(drafts: Path, since: float) -> bool:
    """Return whether the launch that made the directory `drafts` has ended.

    This is `True` for each launch on this host: one that still ran would hold the lock of the run
    directory. A launch on another host counts as ended if `drafts` has not changed since the time `since`.
    """
    if drafts.name.startswith((f"{catalog.DRAFT}{_machine()}-", catalog.REMOVED)):
        return True
    newest = 0.0
    for path in (drafts, *drafts.rglob("*")):
        with contextlib.suppress(OSError):
            newest = max(newest, path.stat().st_mtime)
    return newest < since


def explained(error: BaseException) -> CheckpointError:
    """Turn an error raised while writing a checkpoint into a `CheckpointError` with reason and hint."""
    if isinstance(error, CheckpointError):
        return error
    cause = next((cause for cause in causes(error) if isinstance(cause, OSError)), None)
    if cause is None:
        return CheckpointError(f"{type(error).__name__}: {error}")
    hint = "--run-dir names another place; earlier checkpoints are as they were"
    if cause.errno in (errno.ENOSPC, errno.EDQUOT):
        hint = "make room, or keep fewer (keep=, LOCKSTEP_KEEP); earlier ones are as they were"
    reason = CheckpointError(cause.strerror or str(cause), hint=hint)
    reason.__cause__ = cause  # its error number decides whether a restart may write the checkpoint
    return reason


def not_written(path: Path, reason: CheckpointError) -> CheckpointError:
    """Return the error that the checkpoint at `path` cannot be written, with the message of `reason`."""
    return CheckpointError(
        f"the checkpoint {path} cannot be written: {reason.message}", hint=reason.hint
    )


def _describe(path: Path) -> dict[str, Any]:
    """Flush a checkpoint's file to disk with `fsync`; return its size and SHA-256 as a dictionary."""
    path.chmod(catalog.FILE_MODE)
    sync_file(path)  # DCP of torch 2.15 does not call `fsync`
    return asdict(FileSpec.of(path))


def _bytes_in(directory: Path) -> int:
    size = 0
    for path in directory.iterdir():
        with contextlib.suppress(FileNotFoundError):
            size += path.stat().st_size
    return size
