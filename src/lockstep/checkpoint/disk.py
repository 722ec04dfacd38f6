"""Checkpoints on disk: written by all ranks while training goes on, whole or not at all.

training thread: save() ── copies this rank's parts ──> goes on
own thread:                └─ writes, checks, renames (saving.py), removes old ones (retention.py)
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from math import isnan, prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lockstep.checkpoint import catalog, dcp, manifest, retention, temporary_directory
from lockstep.checkpoint.background import Background
from lockstep.checkpoint.catalog import Found, Key, Warn
from lockstep.checkpoint.company import Company
from lockstep.checkpoint.disk_errors import explained, not_written
from lockstep.checkpoint.manifest import TensorSpec
from lockstep.checkpoint.parts import Box, Cut, Stored, cut_of, local, whole
from lockstep.checkpoint.saving import Content, Saving, Table
from lockstep.checkpoint.staging import Buffers, share_out
from lockstep.errors import CheckpointError

if TYPE_CHECKING:
    import torch.distributed as dist

#: How long `close` waits for the disk.
_CLOSE_SECONDS = 5.0


#: Takes step, name, seconds and how good the state is of a checkpoint that was written.
Written = Callable[[int, str, float, float | None], None]


def warn_on_stderr(message: str) -> None:
    """Write a warning where users look for them."""
    sys.stderr.write(f"{message}\n")


class Checkpoints:
    """The checkpoints of a run, as one of its ranks sees them.

    Args:
        directory: where they are; it is made with the first one.
        identity: of the run; JSON. A checkpoint of another run is not continued from.
        rank: this rank.
        size: number of ranks.
        store: a store that these objects of all ranks have for themselves (a `PrefixStore`); `None`
            for one rank.
        keep: how many of the latest checkpoints stay, besides the best one.
        warn: told of checkpoints that are skipped.
        patience: seconds without news after which a rank is missing.
        written: told on the main rank, in a thread, of each checkpoint: step, name, seconds, how good.
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
        self._rank = rank
        self._keep = keep
        self._warn = warn
        self._written = written
        self._company = Company(store, rank=rank, size=size, patience=patience)
        self._background = Background("lockstep-checkpoint")
        self._buffers = Buffers()
        self._token: temporary_directory.Token | None = None
        self._table: Table | None = None
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
        pinned = {name for name, tensor in tensors.items() if tensor.is_cuda}

        def get_ready() -> None:
            own = self._own_share(specs, cuts)
            self._buffers.prepare(_specs_of(own, specs), pinned & own.keys())
            dcp.load_dcp()

        self._background.submit(get_ready)

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        text: str,
        *,
        best: float | None,
        steady: bool = False,
    ) -> None:
        """Save the state after `step`: copy it, and let it be written while training goes on.

        All ranks call it with the same state. An earlier checkpoint that is still being written is
        waited for. A state that was saved last is not saved again; but `best` is noted.

        Args:
            step: updates that the run has done.
            tensors: the whole state, on any device; of what is cut over ranks each has its part.
            text: the rest of the state.
            best: how good this state is, larger is better; the best one is kept.
            steady: whether nothing changes the tensors, on the CPU, until `wait` returns: no copy is made.

        Raises:
            CheckpointError: if this or an earlier checkpoint could not be written.
        """
        # Whatever is NaN is not the best of anything.
        best = None if best is None or isnan(best) else float(best)
        if (step, text) == self._last:
            if best is not None and self._rank == 0:
                self._background.submit(lambda: self._note(best))
            return
        self.wait()
        specs, parts = self._stage(tensors, steady=steady)
        assert self._table is not None
        self._serial, self._last = self._serial + 1, (step, text)
        content = Content(
            identity=self._identity,
            step=step,
            best=best,
            text=text,
            specs=specs,
            shares=self._shares,
            tensors=parts,
        )
        saving = Saving(self._company, self._table, self._serial, content)

        def write() -> None:
            began = time.monotonic()
            saving.run()
            self._path = saving.path
            if self._written is not None and self._rank == 0:
                self._written(step, saving.path.name, time.monotonic() - began, best)
            self._retain()

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
        self._company.drop()
        self._background.close(_CLOSE_SECONDS)
        if self._token is not None:
            self._token.close()
            self._token = None

    def newest(self) -> Found | None:
        """Return the newest checkpoint that is what was written, or `None` where there is none.

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
        """Return the text of the newest checkpoint whose manifest can be read; its files are not looked at.

        Raises:
            CheckpointError: if the directory cannot be read.
        """
        for path in catalog.paths(self._directory).values():
            with contextlib.suppress(CheckpointError, OSError):
                return manifest.read(path).text
        return None

    def clear(self) -> None:
        """Remove all checkpoints of the directory, of whatever run: the main rank, for a new beginning.

        Raises:
            CheckpointError: if the directory cannot be read.
        """
        for path in catalog.paths(self._directory).values():
            retention.remove(path)

    def _own_share(self, specs: dict[str, TensorSpec], cuts: dict[str, Cut]) -> Mapping[str, Box]:
        """Return what this rank writes of the tensors; agrees with the others before."""
        if self._table is None:
            self._table = self._meet()
        writers = self._table.writers
        if not self._writes_parts:
            cuts = {}
        if self._plan != (specs, cuts):
            self._plan = specs, cuts
            self._shares = share_out(specs, len(writers), cuts)
        return self._shares[writers.index(self._rank)] if self._rank in writers else {}

    @property
    def _writes_parts(self) -> bool:
        """Whether each rank can write its own part of a tensor."""
        assert self._table is not None
        return len(self._table.writers) == self._company.size

    def _meet(self) -> Table:
        def make() -> str:
            self._token = temporary_directory.Token(self._directory)
            temporary_directory.remove_dead(self._directory, self._token.name)
            return self._token.name

        def sees(token: str) -> bool:
            return temporary_directory.lock_file(self._directory, token).exists()

        try:
            token, writers = self._company.meet(make, sees)
        except (CheckpointError, OSError) as error:
            raise not_written(self._directory, explained(error)) from error
        return Table(directory=self._directory, token=token, writers=writers)

    def _stage(
        self, tensors: Mapping[str, Tensor], *, steady: bool
    ) -> tuple[dict[str, TensorSpec], dict[str, Tensor]]:
        """Return types and shapes of all tensors, and copies of what this rank writes of them."""
        specs, cuts = _described(tensors)
        own = self._own_share(specs, cuts)
        parts = self._parts(tensors, own)
        if steady:
            return specs, dict(parts)
        self._buffers.prepare(_specs_of(own, specs), {n for n in own if tensors[n].is_cuda})
        return specs, self._buffers.copy(parts)

    def _parts(
        self, tensors: Mapping[str, Tensor], own: Mapping[str, Box]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield what this rank writes.

        Where a rank does not see the directory, all ranks gather tensors that are cut, one after the other.
        """
        for name, tensor in tensors.items():
            is_gathered = not self._writes_parts and cut_of(tensor) is not None
            held = whole(tensor) if is_gathered else local(tensor.detach())
            if name in own:
                yield name, held.reshape(own[name].sizes)

    def _note(self, best: float) -> None:
        assert self._path is not None, "it was written before"
        try:
            manifest.note_best(self._path, best)
        except (CheckpointError, OSError) as error:
            raise not_written(self._path, explained(error)) from error
        self._retain()

    def _retain(self) -> None:
        key = None if self._path is None else catalog.key_of(self._path)
        if self._rank != 0 or key is None or not catalog.place(self._directory, key).exists():
            return
        self._bad.discard(key)
        try:
            retention.apply(
                self._directory, self._identity, keep=self._keep, newest=key, bad=self._bad
            )
        except CheckpointError as error:
            self._warn(f"lockstep: warning: old checkpoints are not removed: {error.message}")


def read(checkpoint: Found) -> dict[str, Stored]:
    """Return the tensors of a checkpoint, which are read when asked for.

    Raises:
        CheckpointError: if it cannot be read; so does reading.
    """
    with _readable(checkpoint):
        stored = dcp.stored(checkpoint.path, checkpoint.manifest)

    def fetch(of: Stored, box: Box) -> Tensor:
        with _readable(checkpoint):
            return of.fetch(box)

    return {n: Stored(one.shape, one.dtype, partial(fetch, one)) for n, one in stored.items()}


@contextlib.contextmanager
def _readable(checkpoint: Found) -> Iterator[None]:
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(
            f"the checkpoint {checkpoint.path} cannot be read: {error.message}", hint=error.hint
        ) from error


def _described(tensors: Mapping[str, Tensor]) -> tuple[dict[str, TensorSpec], dict[str, Cut]]:
    """Return types and shapes of tensors, and how those are cut that ranks have parts of."""
    specs = {name: dcp.spec_of(tensor) for name, tensor in tensors.items()}
    cuts = {name: cut for name, tensor in tensors.items() if (cut := cut_of(tensor)) is not None}
    return specs, {name: cut for name, cut in cuts.items() if prod(specs[name].shape)}


def _specs_of(share: Mapping[str, Box], specs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    return {name: TensorSpec(specs[name].dtype, box.sizes) for name, box in share.items()}
