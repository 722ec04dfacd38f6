"""Save checkpoints to disk: all ranks write them atomically, in the background, while training continues.

training thread:   save() ── copies this rank's parts ──> continues
background thread:            └─ writes, checks, renames (writer.py), removes old ones
"""

from __future__ import annotations

import queue
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from math import isnan, prod
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lockstep.errors import CheckpointError
from lockstep.state.checkpoint import dcp
from lockstep.state.checkpoint.catalog import (
    Catalog,
    Manifest,
    TensorSpec,
    key_of,
    note_best,
    place,
)
from lockstep.state.checkpoint.parts import Box, Sharding, cut_of, local, whole
from lockstep.state.checkpoint.retention import remove_old
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

#: Seconds that `close` waits for a write to end.
_CLOSE_SECONDS = 5.0
#: A function called with the step, name, seconds and rating of a checkpoint that was written.
Written = Callable[[int, str, float, float | None], None]


class CheckpointManager:
    """Saves the checkpoints of a run, and removes old ones.

    Args:
        catalog: the checkpoints in the run's directory.
        rank: this rank.
        size: number of ranks.
        store: a store that only the managers of all ranks use (a `PrefixStore`); `None` for one rank.
        keep: number of the latest checkpoints that stay, besides the best one.
        anchors: steps between two anchors (checkpoints that stay, too; 0 for none), and the greatest
            number of bytes of all anchors together.
        patience: seconds without a message after which a rank counts as missing.
        written: called on the main rank, in a background thread, after each checkpoint, with the step,
            the name, the seconds that it took, and the rating.
    """

    def __init__(
        self,
        catalog: Catalog,
        *,
        rank: int,
        size: int,
        store: dist.Store | None,
        keep: int,
        anchors: tuple[int, float] = (0, 0.0),
        patience: float = 300.0,
        written: Written | None = None,
    ) -> None:
        assert keep >= 1, "the newest checkpoint stays"
        assert (store is None) == (size == 1), "several ranks need a store, one has none"
        self.catalog = catalog
        self._rank, self._keep, self._anchors = rank, keep, anchors
        self._written = written
        self._channel = StoreChannel(store, rank=rank, size=size, patience=patience)
        self._background = Background("lockstep-checkpoint")
        self._buffers = Buffers()
        self._drafts: DraftDirectory | None = None
        self._attempts = 0
        self._plan: tuple[dict[str, TensorSpec], dict[str, Sharding]] | None = None
        self._shares: list[dict[str, Box]] = []
        self._serial = 0
        self._last: tuple[int, str] | None = None  # step and text of the last saved state
        self._path: Path | None = None  # on the main rank, where it is

    def prepare(self, tensors: Mapping[str, Tensor]) -> None:
        """Allocate host memory for copies of `tensors` and import DCP, in a background thread.

        All ranks call this method.
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
        """Copy the state after `step`, and write it to disk in the background while training continues.

        All ranks call this method with the same state. It waits for an earlier checkpoint that is still
        being written. The state that was saved last is not saved again; only its rating `best` is updated.

        Args:
            step: updates that the run has done.
            tensors: the whole state, on any device; a tensor that is sharded over ranks is a DTensor.
            text: the state besides the tensors.
            best: rating of this state, larger is better; the best checkpoint is kept.

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
            identity=self.catalog.identity, step=step, best=best, text=text, tensors=specs, files={}
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
        """Wait until all saved checkpoints are on disk.

        Raises:
            CheckpointError: if a checkpoint could not be written.
        """
        try:
            self._background.wait()
        except BaseException:
            self._last = None
            raise

    def close(self, patience: float = 0.0) -> None:
        """Wait at most `patience` seconds for unfinished checkpoints, then end the background thread.

        Checkpoints that are still unfinished are abandoned, and their files are removed.
        """
        self._background.settle(patience)
        self._channel.stop()
        self._background.close(_CLOSE_SECONDS)
        if self._drafts is not None and self._rank == 0:
            shutil.rmtree(self._drafts.path, ignore_errors=True)

    def _own_share(
        self, specs: dict[str, TensorSpec], cuts: dict[str, Sharding]
    ) -> Mapping[str, Box]:
        """Return the boxes of tensors that this rank writes, by tensor name.

        `specs` has all tensors of the checkpoint, `cuts` those that are sharded over ranks. At the first
        call, all ranks together make the directory for unfinished checkpoints.
        """
        if self._drafts is None:
            self._attempts += 1
            try:
                self._drafts = DraftDirectory.open(
                    self.catalog.directory, self._channel, self._attempts
                )
            except (CheckpointError, OSError) as error:
                raise not_written(self.catalog.directory, explained(error)) from error
        writers = self._drafts.writers
        if not self._writes_parts:
            cuts = {}
        if self._plan != (specs, cuts):
            self._plan = specs, cuts
            self._shares = dcp.share_out(specs, len(writers), cuts)
        return self._shares[writers.index(self._rank)] if self._rank in writers else {}

    @property
    def _writes_parts(self) -> bool:
        """Whether every rank writes its own parts of sharded tensors, not whole tensors.

        This is so if every rank can open the checkpoint directory of the main rank.
        """
        assert self._drafts is not None
        return len(self._drafts.writers) == self._channel.size

    def _copy_own(
        self, tensors: Mapping[str, Tensor]
    ) -> tuple[dict[str, TensorSpec], dict[str, Tensor]]:
        """Copy to host memory the values that this rank will save; return all specs, and the copies.

        Both are by tensor name. `tensors` is the whole state.
        """
        specs, cuts = _described(tensors)
        own = self._own_share(specs, cuts)
        pinned = {name for name in own if accelerator.holds(tensors[name])}
        self._buffers.prepare(_specs_of(own, specs), pinned)
        return specs, self._buffers.copy(self._parts(tensors, own))

    def _parts(
        self, tensors: Mapping[str, Tensor], own: Mapping[str, Box]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and the values of each tensor, or part of a tensor, that this rank writes.

        `own` has the boxes that this rank writes, by tensor name. If a rank cannot open the checkpoint
        directory, all ranks gather each sharded tensor, one after the other (collective).
        """
        for name, tensor in tensors.items():
            is_gathered = not self._writes_parts and cut_of(tensor) is not None
            values = whole(tensor) if is_gathered else local(tensor.detach())
            if name in own:
                yield name, values.reshape(own[name].sizes)

    def _note(self, best: float) -> None:
        assert self._path is not None, "it was written before"
        try:
            note_best(self._path, best)
        except (CheckpointError, OSError) as error:
            raise not_written(self._path, explained(error)) from error
        self._remove_old()

    def _remove_old(self) -> None:
        key = None if self._path is None else key_of(self._path)
        if self._rank != 0 or key is None or not place(self.catalog.directory, key).exists():
            return
        try:
            remove_old(self.catalog, self._keep, key, *self._anchors)
        except CheckpointError as error:
            self.catalog.warn(
                f"lockstep: warning: old checkpoints are not removed: {error.message}"
            )


class Background:
    """A background thread that runs jobs in order; `wait` raises the first error of a job.

    The thread starts with the first job, and ends with `close` or with the process.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._open = 0
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def submit(self, job: Callable[[], None]) -> None:
        """Queue `job`; it is skipped if an earlier job failed and `wait` has not raised that error yet."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        with self._changed:
            self._open += 1
        self._jobs.put(job)

    def wait(self) -> None:
        """Wait until all jobs are done; raise the error of the first job that failed, once.

        Raises:
            Exception: any error that a job raised.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._open == 0)
            error, self._error = self._error, None
        if error is not None:
            raise error

    def settle(self, seconds: float) -> None:
        """Wait until all jobs are done, but at most `seconds`; raise no error."""
        with self._changed:
            self._changed.wait_for(lambda: self._open == 0, seconds)

    def close(self, seconds: float) -> bool:
        """End the thread after the queued jobs; return whether it has ended within `seconds`."""
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
            # A job may refer to tensors: drop the reference before waiting for the next job.
            del job, error


class Buffers:
    """Buffers in host memory for copies of tensors, one per name, which every checkpoint uses again."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def prepare(self, specs: Mapping[str, TensorSpec], pinned: Collection[str] = ()) -> None:
        """Allocate a buffer in host memory for each tensor in `specs`, and free all other buffers.

        Buffers of the same dtype and shape are kept. `pinned` has the names of the tensors whose buffers
        are page-locked.
        """
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
        """Copy named `tensors` into the buffers that `prepare` allocated; return the buffers by name.

        The next call overwrites the copies.
        """
        devices = set()
        with torch.no_grad():
            for name, tensor in tensors:
                self._kept[name].copy_(tensor, non_blocking=accelerator.holds(tensor))
                if accelerator.holds(tensor):
                    devices.add(tensor.device)
        # DCP waits for the first device only, and with some accelerators for none.
        for device in devices:
            accelerator.module().synchronize(device)
        return dict(self._kept)


def _described(tensors: Mapping[str, Tensor]) -> tuple[dict[str, TensorSpec], dict[str, Sharding]]:
    """Return the spec of each tensor, and the `Sharding` of each that is sharded over ranks, by name."""
    specs = {name: dcp.spec_of(tensor) for name, tensor in tensors.items()}
    cuts = {name: cut for name, tensor in tensors.items() if (cut := cut_of(tensor)) is not None}
    return specs, {name: cut for name, cut in cuts.items() if prod(specs[name].shape)}


def _specs_of(share: Mapping[str, Box], specs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    return {name: TensorSpec(specs[name].dtype, box.sizes) for name, box in share.items()}
