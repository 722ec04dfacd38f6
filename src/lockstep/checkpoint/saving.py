"""One checkpoint on its way to the disk, in a thread of its own.

each writer: its tensors ──> __K_0.distcp, part-K.json ─┐
main rank:   all parts there ──> .metadata, manifest.json ──> fsync ──> rename ──> fsync
the others:  wait for the main rank's word
"""

from __future__ import annotations

import contextlib
import errno
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lockstep.checkpoint import catalog, dcp, manifest, retention, temporary_directory
from lockstep.checkpoint.catalog import Key
from lockstep.checkpoint.company import Company, DroppedError
from lockstep.checkpoint.disk_errors import explained, not_written
from lockstep.checkpoint.manifest import FileSpec, Manifest, TensorSpec
from lockstep.errors import CheckpointError, PeerError

_INTERVAL = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Where the ranks write, and who writes.

    Attributes:
        directory: where checkpoints are.
        token: what drafts of this launch are named after.
        writers: ranks that share the main rank's directory; the main rank is the first.
    """

    directory: Path
    token: str
    writers: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """What is saved.

    Attributes:
        identity: of the run.
        step: updates that the run has done.
        best: how good this state is.
        text: the rest of the state.
        specs: types and shapes of all tensors.
        shares: what each writer writes.
        tensors: this rank's parts, on the CPU; nothing changes them.
    """

    identity: Mapping[str, Any]
    step: int
    best: float | None
    text: str
    specs: Mapping[str, TensorSpec]
    shares: dcp.Shares
    tensors: Mapping[str, Tensor]


class Saving:
    """Writes one checkpoint.

    Args:
        company: the other ranks.
        table: where to write, and who writes.
        serial: which checkpoint of this launch it is, from 1.
        content: what is saved.

    Attributes:
        path: on the main rank, where it is.
    """

    def __init__(self, company: Company, table: Table, serial: int, content: Content) -> None:
        self._company = company
        self._table = table
        self._serial = serial
        self._content = content
        self._draft = temporary_directory.draft(table.directory, table.token, serial, content.step)
        self._there = self._of_step()
        self.path = catalog.place(table.directory, (content.step, 0))

    def _of_step(self) -> dict[Key, Path]:
        """Return where checkpoints of this step are."""
        there = catalog.paths(self._table.directory)
        return {key: path for key, path in there.items() if key[0] == self._content.step}

    def run(self) -> None:
        """Write it.

        Raises:
            CheckpointError: if it cannot be written, by whichever rank.
        """
        try:
            if self._company.rank in self._table.writers:
                self._write_part(self._table.writers.index(self._company.rank))
            if self._company.rank == 0:
                self._commit(self._gather())
                # Of a checkpoint that failed, a rank may have begun its part after this one had given up.
                # All of them have left that behind, and don't begin the next one before `done`.
                temporary_directory.remove_drafts(self._table.directory, self._table.token)
                self._company.done(self._serial)
            else:
                self._follow()
        except DroppedError:
            self._give_up()
        except PeerError:
            raise
        except dist.DistError as error:
            self._give_up()
            raise PeerError("the other ranks left while a checkpoint was written") from error
        except Exception as error:
            told = explained(error)
            with contextlib.suppress(dist.DistError):
                # Once somebody has failed the draft is removed, and the rest is a consequence.
                told = self._company.news(self._serial) or told
                self._company.fail(self._serial, told)
            self._give_up()
            raise not_written(self.path, told) from error

    def _give_up(self) -> None:
        if self._company.rank == 0:
            temporary_directory.remove(self._draft)

    def _write_part(self, part: int) -> None:
        self._draft.mkdir(mode=manifest.DIRECTORY_MODE, exist_ok=True)
        content = self._content
        results = dcp.write_part(self._draft, part, content.shares, content.specs, content.tensors)
        names = {result["file"] for result in results}
        files = {name: _describe(self._draft / name) for name in sorted(names)}
        told = {"results": results, "files": files}
        unfinished = self._draft / f".part-{part}"
        unfinished.write_text(json.dumps(told), encoding="utf-8")
        unfinished.rename(self._part(part))

    def _part(self, part: int) -> Path:
        return self._draft / f"part-{part}.json"

    def _gather(self) -> list[dict[str, Any]]:
        """Return what all writers say of their parts, once all are there.

        Raises:
            CheckpointError: naming the ranks that don't write any more.
        """
        missing = dict(enumerate(self._table.writers))
        seen, since = -1, time.monotonic()
        while missing := {k: rank for k, rank in missing.items() if not self._part(k).exists()}:
            self._company.look(self._serial)
            written = sum(_sizes(self._draft))
            if written != seen:
                seen, since = written, time.monotonic()
            if time.monotonic() - since > self._company.patience:
                ranks = ", ".join(str(rank) for rank in missing.values())
                raise CheckpointError(
                    f"rank {ranks} wrote nothing to {self._draft} for {self._company.patience:g} s",
                    hint="the output of that rank, and the disk, may say why",
                )
            time.sleep(_INTERVAL)
        count = len(self._table.writers)
        return [json.loads(self._part(part).read_text(encoding="utf-8")) for part in range(count)]

    def _commit(self, parts: list[dict[str, Any]]) -> None:
        content, draft = self._content, self._draft
        dcp.finish(draft, content.shares, content.specs, [part["results"] for part in parts])
        files = {name: FileSpec(**spec) for part in parts for name, spec in part["files"].items()}
        files[dcp.METADATA] = FileSpec(**_describe(draft / dcp.METADATA))
        for part in range(len(parts)):
            self._part(part).unlink()
        told = Manifest(
            identity=content.identity,
            step=content.step,
            best=content.best,
            text=content.text,
            tensors=content.specs,
            files=files,
        )
        self._company.look(self._serial)
        manifest.write(draft, told)
        self._rename()
        manifest.sync_directory(self._table.directory)

    def _rename(self) -> None:
        """Make this state the newest checkpoint of its step; one that is there already moves up."""
        while True:
            there = self._of_step()
            texts = {key: self._text_at(path) for key, path in there.items()}
            same = [path for key, path in there.items() if texts[key] == self._content.text]
            self.path = self._following(there, texts)
            try:
                (same or [self._draft])[0].rename(self.path)
                break
            except OSError as error:  # another launch may write here, too
                taken = error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT)
                if not taken or not self._draft.exists():
                    raise
        if same:
            temporary_directory.remove(self._draft)
            if self._content.best is not None:
                manifest.note_best(self.path, self._content.best)

    def _text_at(self, path: Path) -> str | None:
        """Return the text of a checkpoint; `None` for one that is damaged, or another run's."""
        try:
            there = catalog.look(path)
        except CheckpointError:
            return None
        return None if there.manifest.differences(self._content.identity) else there.text

    def _following(self, there: Mapping[Key, Path], texts: Mapping[Key, str | None]) -> Path:
        """Return the place above all that are `there`: their numbers say which is the newest."""
        last = max(there, default=None)
        if last is None:
            return catalog.place(self._table.directory, (self._content.step, 0))
        if texts[last] is None:
            retention.remove(there[last])
        # Another state of this step has the next number: weights may change without an update.
        is_free = texts[last] == self._content.text or not there[last].exists()
        return catalog.place(self._table.directory, (last[0], last[1] + (not is_free)))

    def _follow(self) -> None:
        shares_directory = self._company.rank in self._table.writers

        def alive() -> bool:
            return not shares_directory or temporary_directory.is_held(
                self._table.directory, self._table.token
            )

        try:
            self._company.follow(self._serial, alive)
        except (PeerError, dist.DistError) as error:  # the main rank, or the store, is not there
            if shares_directory and self._of_step().keys() - self._there.keys():
                return
            raise PeerError("rank 0 left while it wrote a checkpoint") from error


def _describe(path: Path) -> dict[str, Any]:
    path.chmod(manifest.FILE_MODE)
    spec = FileSpec.of(path)
    return {"bytes": spec.bytes, "sha256": spec.sha256}


def _sizes(directory: Path) -> Iterator[int]:
    for path in directory.iterdir():
        try:
            yield path.stat().st_size
        except FileNotFoundError:
            yield 0
