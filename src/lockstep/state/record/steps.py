"""Step record: bits of each loss and hashes of gradients and parameters, for `lockstep replay`.

Every rank writes entries of 24 bytes to `steps/rank-RANK.START-NUMBER.bin` in the run directory: one for
each backward pass, and two for each step whose gradients and parameters are hashed. A rank begins a new
file at each start of the run, and when a file has `_BYTES` bytes. It keeps its newest `_FILES` files: with
one replica on each rank, at least the latest 3.5 million steps.
"""

from __future__ import annotations

import re
import struct
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from lockstep.errors import RunDirectoryError
from lockstep.state.files.directory import owner_only
from lockstep.state.files.run_file import writing

#: Name of the directory in a run directory.
DIRECTORY = "steps"
#: Kinds of entries, in the order in which a step makes them.
KINDS = ("loss", "gradients", "parameters")
LOSS, GRADIENTS, PARAMETERS = range(len(KINDS))
#: Step, replica, kind, bytes of the value, number of the backward pass, checksum of samples, value.
_ENTRY = struct.Struct("<IIBBHI8s")
_NAME = re.compile(r"rank-(\d+)\.(\d+)-(\d+)\.bin")
#: Size of a file, and number of files that a rank keeps.
_BYTES, _FILES = 1 << 24, 16
_FLUSH_SECONDS = 1.0
#: Functions that return the bytes of a loss on the CPU from its number.
_PACK = {
    torch.float32: struct.Struct("<f").pack,
    torch.float64: struct.Struct("<d").pack,
    torch.float16: struct.Struct("<e").pack,
}
_NO_SAMPLES = np.zeros(0, dtype=np.int64)
#: A loss, or a function that returns the bytes of a hash: either may still be on a device.
Value = torch.Tensor | Callable[[], bytes]


class Key(NamedTuple):
    """Key of an entry of the step record: step, kind, replica, number of the backward pass.

    `kind` is an index in `KINDS`; `nth` counts the entries of this kind and replica in the step.
    """

    step: int
    kind: int
    replica: int = 0
    nth: int = 0


class Entry(NamedTuple):
    """Value of an entry of the step record: bytes of a loss, or a hash of gradients or parameters.

    `samples` is the checksum of the sample ids of the loss, 0 for a hash.
    """

    value: bytes
    samples: int = 0


class StepRecord:
    """Writes the step record (losses and hashes as bytes) of one rank, from one (re)start on.

    Raises:
        RunDirectoryError: if the files cannot be written.
    """

    def __init__(self, directory: Path, rank: int, start: int) -> None:
        self._directory, self._stem = directory / DIRECTORY, f"rank-{rank}."
        self._start, self._number, self._size = start, 0, _BYTES
        #: Step, kind, replica, samples and value of each entry. Python's garbage collector stops to follow
        #: tuples of numbers; with thousands of tensors it would make a full collection every few seconds.
        self._pending: list[tuple[int, int, int, NDArray[np.int64], Value | bytes]] = []
        self._step = 0
        self._passes: dict[tuple[int, int], int] = {}  # entries of the step, by kind and replica
        self._flushed = time.monotonic()

    def add(
        self,
        step: int,
        kind: int,
        value: Value,
        *,
        replica: int = 0,
        samples: NDArray[np.int64] = _NO_SAMPLES,
    ) -> None:
        """Add a loss or a hash to the pending entries, which are written about once a second.

        `kind` is an index in `KINDS`. `value` is a loss tensor, which the script may change later, or a
        function that returns the bytes of a hash; either is read from an accelerator only when the entry is
        written. `samples` are the sample ids of the microbatch, whose checksum is written.
        """
        own = _kept(value) if isinstance(value, torch.Tensor) else value
        self._pending.append((step, kind, replica, samples, own))
        if time.monotonic() - self._flushed > _FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write all pending entries, so that a kill cannot lose them."""
        self._flushed = time.monotonic()
        pending, self._pending = self._pending, []
        if not pending:
            return
        values = _bytes([entry[-1] for entry in pending])
        data = bytearray()
        for (step, kind, replica, samples, _), own in zip(pending, values, strict=True):
            if step != self._step:
                self._step, self._passes = step, {}
            nth = self._passes.get((kind, replica), 0)
            self._passes[kind, replica] = nth + 1
            checksum = zlib.crc32(samples.tobytes())
            data += _ENTRY.pack(step, replica, kind, len(own), nth, checksum, own)
        with writing(self._directory):
            if self._size + len(data) > _BYTES:
                self._begin_file()
            path = self._directory / f"{self._stem}{self._start}-{self._number}.bin"
            with open(path, "ab", opener=owner_only) as file:
                file.write(data)
        self._size += len(data)

    def _begin_file(self) -> None:
        self._directory.mkdir(mode=0o700, exist_ok=True)
        self._number, self._size = self._number + 1, 0
        own = [path for path in paths(self._directory) if path.name.startswith(self._stem)]
        for path in own[: max(0, len(own) - _FILES + 1)]:
            path.unlink(missing_ok=True)


def _kept(loss: torch.Tensor) -> torch.Tensor | bytes:
    """Return the bytes of a loss on the host; of any other loss a copy on its device."""
    pack = _PACK.get(loss.dtype) if loss.is_cpu else None
    return loss.detach().clone() if pack is None else pack(loss.item())


def _bytes(values: list[Value | bytes]) -> list[bytes]:
    """Return the bytes of each loss or hash in `values`, in the same order.

    Losses with the same device and dtype are copied to the host in one tensor.
    """
    found, losses = [], {}
    for n, value in enumerate(values):
        if isinstance(value, bytes):
            found.append(value)
        elif isinstance(value, torch.Tensor):
            losses[n] = value
            found.append(b"")
        else:
            found.append(value())
    for kind in {(loss.device, loss.dtype) for loss in losses.values()}:
        own = {n: loss for n, loss in losses.items() if (loss.device, loss.dtype) == kind}
        data = torch.stack([loss.reshape(()) for loss in own.values()]).cpu()
        size = kind[1].itemsize
        whole = data.view(torch.uint8).numpy().tobytes()
        for place, n in enumerate(own):
            found[n] = whole[place * size : (place + 1) * size]
    return found


def paths(directory: Path) -> list[Path]:
    """Return the paths of all ranks' step record files in `directory`, by start of the run."""
    found = {}
    for path in directory.glob("rank-*.bin"):
        if name := _NAME.fullmatch(path.name):
            rank, start, number = map(int, name.groups())
            found[start, number, rank] = path
    return [found[key] for key in sorted(found)]


def read(run_directory: Path, last: int | None = None) -> dict[Key, Entry]:
    """Return the entries of a run's step record up to step `last`, by default of all steps.

    Of a step that was computed again after a restart, the newest entries are returned.

    Raises:
        RunDirectoryError: if a file cannot be read.
    """
    entries: dict[Key, Entry] = {}
    for path in paths(run_directory / DIRECTORY):
        try:
            data = path.read_bytes()
        except OSError as error:
            raise RunDirectoryError(
                f"{path} cannot be read: {error.strerror or error}",
                hint="restore the file, or remove it",
            ) from error
        whole = len(data) - len(data) % _ENTRY.size  # the writer may have been killed
        for step, replica, kind, size, nth, samples, value in _ENTRY.iter_unpack(data[:whole]):
            if last is None or step <= last:
                entries[Key(step, kind, replica, nth)] = Entry(value[:size], samples)
    return entries
