"""Checkpoints on disk: written atomically by all ranks while training continues.

training thread:   save() ── copies this rank's parts ──> continues
background thread:            └─ writes, checks, renames (writer.py), removes old ones
"""

from __future__ import annotations

import contextlib
import json
import queue
import shutil
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from math import isnan, prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lockstep.errors import CheckpointError
from lockstep.state.checkpoint import catalog, dcp, manifest
from lockstep.state.checkpoint.catalog import Found, Key, Warn
from lockstep.state.checkpoint.manifest import Manifest, TensorSpec
from lockstep.state.checkpoint.parts import Box, Cut, cut_of, local, whole
from lockstep.state.checkpoint.writer import (
    CheckpointWriter,
    DraftDirectory,
    StoreChannel,
    explained,
    not_written,
)
from lockstep.world import accelerator

if TYPE_CHECKING:
    import torch.distributed as dist

#: How long `close` waits for the disk.
_CLOSE_SECONDS = 5.0
#: Takes step, name, seconds and rating of a checkpoint that was written.
Written = Callable[[int, str, float, float | None], None]


def warn_on_stderr(message: str) -> None:
    """Write a warning to standard error."""
    sys.stderr.write(f"{message}\n")


class CheckpointManager:
    """Saves the checkpoints of a run, finds the newest one, and removes old ones.

    Args:
        directory: where they are; it is made with the first one.
        identity: of the run; JSON. A checkpoint of another run is not continued from.
        rank: this rank.
        size: number of ranks.
        store: a store that these objects of all ranks have for themselves (a `PrefixStore`); `None`
            for one rank.
        keep: how many of the latest checkpoints stay, besides the best one.
        warn: called with a message for each checkpoint that is skipped.
        patience: seconds without a message after which a rank is missing.
        written: called on the main rank, in a thread, for each checkpoint.
    """

    def __init__(
        self,
        directory: Path,
        identity: Mapping[str, Any],
        *,
        rank: int,
        size: int,
        store: dist.Store | None,
        keep: int,
        warn: Warn = warn_on_stderr,
        patience: float = 300.0,
        written: Written | None = None,
    ) -> None:
        assert keep >= 1, "the newest checkpoint stays"
        assert (store is None) == (size == 1), "several ranks need a store, one has none"
        self._directory = directory
        self._identity = json.loads(json.dumps(identity))
        self._rank, self._keep = rank, keep
        self._warn, self._written = warn, written
        self._channel = StoreChannel(store, rank=rank, size=size, patience=patience)
        self._background = Background("lockstep-checkpoint")
        self._buffers = Buffers()
        self._drafts: DraftDirectory | None = None
        self._attempts = 0
        self._plan: tuple[dict[str, TensorSpec], dict[str, Cut]] | None = None
        self._shares: list[dict[str, Box]] = []
        self._serial = 0
        self._last: tuple[int, str] | None = None  # step and text of what was saved last
        self._path: Path | None = None  # on the main rank, where it is
        self._bad: set[Key] = set()

    def prepare(self, tensors: Mapping[str, Tensor]) -> None:
        """Get ready for `save` of such tensors, in the background; all ranks call it, or none.

        The first `save` then takes no longer than later ones.
        """
        specs, cuts = _described(tensors)
        pinned = {name for name, tensor in tensors.items() if accelerator.holds(tensor)}

        def get_ready() -> None:
            own = self._own_share(specs, cuts)
            self._buffers.prepare(_specs_of(own, specs), pinned & own.keys())
            dcp.load_dcp()

        self._background.submit(get_ready)

    def save(
        self, step: int, tensors: Mapping[str, Tensor], text: str, *, best: float | None
    ) -> None:
        """Save the state after `step`: copy it, and let it be written while training continues.

        All ranks call it with the same state. An earlier checkpoint that is still being written is
        waited for. A state that was saved last is not saved again; but `best` is noted.

        Args:
            step: updates that the run has done.
            tensors: the whole state, on any device; of what is cut over ranks each has its part.
            text: the rest of the state.
            best: how good this state is, larger is better; the best one is kept.

        Raises:
            CheckpointError: if this or an earlier checkpoint could not be written.
        """
        # NaN is neither better nor worse than other values.
        best = None if best is None or isnan(best) else float(best)
        if (step, text) == self._last:
            if best is not None and self._rank == 0:
                self._background.submit(lambda: self._note(best))
            return
        self.wait()
        specs, parts = self._copy_own(tensors)
        assert self._drafts is not None
        self._serial, self._last = self._serial + 1, (step, text)
        contents = Manifest(
            identity=self._identity, step=step, best=best, text=text, tensors=specs, files={}
        )
        writer = CheckpointWriter(
            self._channel, self._drafts, self._serial, contents, self._shares, parts
        )

        def write() -> None:
            began = time.monotonic()
            if not writer.run():
                return
            self._path = writer.path
            if self._written is not None and self._rank == 0:
                self._written(step, writer.path.name, time.monotonic() - began, best)
            self._remove_old()

        self._background.submit(write)

    def wait(self) -> None:
        """Wait until all that was saved is on disk.

        Raises:
            CheckpointError: if something could not be written.
        """
        try:
            self._background.wait()
        except BaseException:
            self._last = None
            raise

    def close(self, patience: float = 0.0) -> None:
        """Drop what is not written within `patience` seconds; no other rank is waited for beyond that."""
        self._background.settle(patience)
        self._channel.stop()
        self._background.close(_CLOSE_SECONDS)
        if self._drafts is not None and self._rank == 0:
            shutil.rmtree(self._drafts.path, ignore_errors=True)

    def newest(self) -> Found | None:
        """Return the newest checkpoint that verifies, or `None` where there is none.

        Those that are damaged, half removed or of a newer format are skipped, with a warning.

        Raises:
            RunDirectoryError: if it is of another run.
            CheckpointError: if the directory cannot be read.
        """
        newest = catalog.newest(self._directory, self._identity, self._warn)
        last = None if newest is None else catalog.key_of(newest.path)
        self._bad = {key for key in catalog.paths(self._directory) if last is None or key > last}
        return newest

    def newest_text(self) -> str | None:
        """Return the text of the newest checkpoint whose manifest can be read, without a look at its files.

        Raises:
            CheckpointError: if the directory cannot be read.
        """
        for path in catalog.paths(self._directory).values():
            with contextlib.suppress(CheckpointError, OSError):
                return manifest.read(path).text
        return None

    def _own_share(self, specs: dict[str, TensorSpec], cuts: dict[str, Cut]) -> Mapping[str, Box]:
        """Return the parts of tensors that this rank writes; the first call agrees with the other ranks."""
        if self._drafts is None:
            self._attempts += 1
            try:
                self._drafts = DraftDirectory.open(self._directory, self._channel, self._attempts)
            except (CheckpointError, OSError) as error:
                raise not_written(self._directory, explained(error)) from error
        writers = self._drafts.writers
        if not self._writes_parts:
            cuts = {}
        if self._plan != (specs, cuts):
            self._plan = specs, cuts
            self._shares = dcp.share_out(specs, len(writers), cuts)
        return self._shares[writers.index(self._rank)] if self._rank in writers else {}

    @property
    def _writes_parts(self) -> bool:
        """Whether each rank can write its own part of a tensor."""
        assert self._drafts is not None
        return len(self._drafts.writers) == self._channel.size

    def _copy_own(
        self, tensors: Mapping[str, Tensor]
    ) -> tuple[dict[str, TensorSpec], dict[str, Tensor]]:
        """Return types and shapes of all tensors, and copies of what this rank writes of them."""
        specs, cuts = _described(tensors)
        own = self._own_share(specs, cuts)
        pinned = {name for name in own if accelerator.holds(tensors[name])}
        self._buffers.prepare(_specs_of(own, specs), pinned)
        return specs, self._buffers.copy(self._parts(tensors, own))

    def _parts(
        self, tensors: Mapping[str, Tensor], own: Mapping[str, Box]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors and parts of tensors that this rank writes.

        Where a rank does not see the directory, all ranks gather tensors that are cut, one after the other.
        """
        for name, tensor in tensors.items():
            is_gathered = not self._writes_parts and cut_of(tensor) is not None
            values = whole(tensor) if is_gathered else local(tensor.detach())
            if name in own:
                yield name, values.reshape(own[name].sizes)

    def _note(self, best: float) -> None:
        assert self._path is not None, "it was written before"
        try:
            manifest.note_best(self._path, best)
        except (CheckpointError, OSError) as error:
            raise not_written(self._path, explained(error)) from error
        self._remove_old()

    def _remove_old(self) -> None:
        key = None if self._path is None else catalog.key_of(self._path)
        if self._rank != 0 or key is None or not catalog.place(self._directory, key).exists():
            return
        self._bad.discard(key)
        try:
            catalog.remove_old(
                self._directory, self._identity, keep=self._keep, newest=key, bad=self._bad
            )
        except CheckpointError as error:
            self._warn(f"lockstep: warning: old checkpoints are not removed: {error.message}")


class Background:
    """A thread that runs jobs in order; an error is raised in the thread that waits.

    It starts with the first job, and ends with `close`, or with the process.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._open = 0
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def submit(self, job: Callable[[], None]) -> None:
        """Run `job` after those before it; after an error that is not raised yet it is left out."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        with self._changed:
            self._open += 1
        self._jobs.put(job)

    def wait(self) -> None:
        """Wait until all jobs are done; raise the error of the first that failed, once.

        Raises:
            Exception: whatever a job raised.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._open == 0)
            error, self._error = self._error, None
        if error is not None:
            raise error

    def settle(self, seconds: float) -> None:
        """Wait until all jobs are done, but not for longer than `seconds`; raise no error."""
        with self._changed:
            self._changed.wait_for(lambda: self._open == 0, seconds)

    def close(self, seconds: float) -> bool:
        """Run no more jobs; return whether the thread has ended within `seconds`."""
        if self._thread is None:
            return True
        self._jobs.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            error: BaseException | None = None
            try:
                if self._error is None:
                    job()
            except BaseException as raised:  # raised where a thread waits
                error = raised
            with self._changed:
                self._error = self._error or error
                self._open -= 1
                self._changed.notify_all()
            # A job may hold tensors: let go of it before the next one comes.
            del job, error


class Buffers:
    """Host memory that every checkpoint uses again: new pages cost far more than to fill them."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def prepare(self, specs: Mapping[str, TensorSpec], pinned: Collection[str] = ()) -> None:
        """Get memory for `specs`, and touch every page of it; `pinned` are those that come from a GPU."""
        for name in [name for name in self._kept if name not in specs]:
            del self._kept[name]
        for name, spec in specs.items():
            kept = self._kept.get(name)
            if kept is None or dcp.spec_of(kept) != spec:
                count = dcp.bytes_of(spec)
                memory = torch.empty(count, dtype=torch.uint8, pin_memory=name in pinned)
                # By numpy, not by torch: a thread that computes with torch would start a team of threads.
                memory.numpy().fill(0)
                self._kept[name] = memory.view(dcp.dtype_of(spec)).view(spec.shape)

    def copy(self, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Copy tensors into the memory that `prepare` has got; the copies are valid until the next call."""
        devices = set()
        with torch.no_grad():
            for name, tensor in tensors:
                self._kept[name].copy_(tensor, non_blocking=accelerator.holds(tensor))
                if accelerator.holds(tensor):
                    devices.add(tensor.device)
        for device in devices:
            accelerator.module().synchronize(device)
        return dict(self._kept)


def _described(tensors: Mapping[str, Tensor]) -> tuple[dict[str, TensorSpec], dict[str, Cut]]:
    """Return types and shapes of tensors, and the cuts of those that are cut over ranks."""
    specs = {name: dcp.spec_of(tensor) for name, tensor in tensors.items()}
    cuts = {name: cut for name, tensor in tensors.items() if (cut := cut_of(tensor)) is not None}
    return specs, {name: cut for name, cut in cuts.items() if prod(specs[name].shape)}


def _specs_of(share: Mapping[str, Box], specs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    return {name: TensorSpec(specs[name].dtype, box.sizes) for name, box in share.items()}
