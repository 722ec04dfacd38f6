"""Shared memory that outlives the workers: a status page, recent losses, and two snapshot buffers.

The launcher makes the memory before it forks the fork server; workers inherit its file descriptors. The
memory is anonymous (memfd): no other user sees it, limits on /dev/shm do not apply, and it is freed with
the last process that has it open. This module does not import torch, since the launcher uses it, too.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

#: Environment variable with the file descriptors of the status page, the losses and both buffers.
VARIABLE = "LOCKSTEP_MEMORY"
#: The largest number of ranks of one launcher.
SLOTS = 1024
#: Names of collective calls, indexed by `ProgressSlot.waiting`; 0 is no call, 1 any call not listed.
COLLECTIVES = (
    "",
    "a collective call",
    "the start of the run",
    "run.model",
    "run.backward",
    "optimizer.step",
    "the exchange of buffers",
    "run.mean",
    "run.sum",
    "run.gather",
    "run.barrier",
    "run.main_process_first",
    "run.save",
    "run.load",
    "a checkpoint",
    "the comparison of states",
    "the end of the run",
    "(after the run)",
)
AFTER_RUN = len(COLLECTIVES) - 1

_WORD = 8
_SLOT_WORDS = 8
_PAGE_BYTES = _WORD * _SLOT_WORDS * (SLOTS + 1)
#: Number of losses kept of each rank. Pages of the memory that no rank writes take no memory.
_LOSSES = 512
_LOSS_WORDS = 1 + 2 * _LOSSES
_LOSS_BYTES = _WORD * _LOSS_WORDS * SLOTS


@dataclass(frozen=True, slots=True)
class Descriptors:
    """File descriptors of the shared memory of a launcher and its workers."""

    page: int
    losses: int
    buffers: tuple[int, int]

    @staticmethod
    def create() -> Descriptors:
        """Create the shared memory, empty and private to this user; return its file descriptors."""
        names = ("status", "losses", "snapshot-a", "snapshot-b")
        made = [os.memfd_create(f"lockstep-{name}", os.MFD_CLOEXEC) for name in names]
        page, losses, first, second = made
        os.ftruncate(page, _PAGE_BYTES)
        os.ftruncate(losses, _LOSS_BYTES)
        return Descriptors(page, losses, (first, second))

    @staticmethod
    def find(environ: Mapping[str, str]) -> Descriptors | None:
        """Return the file descriptors in the variable `LOCKSTEP_MEMORY` of `environ`.

        Return `None` if there is no such variable, or if the descriptors are not those of the memory.
        """
        try:
            page, losses, first, second = map(int, environ[VARIABLE].split(","))
            if (os.fstat(page).st_size, os.fstat(losses).st_size) != (_PAGE_BYTES, _LOSS_BYTES):
                return None
        except (KeyError, ValueError, OSError):
            return None
        return Descriptors(page, losses, (first, second))

    @property
    def all(self) -> tuple[int, ...]:
        """All file descriptors, in the order of the environment variable `LOCKSTEP_MEMORY`."""
        return (self.page, self.losses, *self.buffers)

    def variable(self) -> str:
        """Return the descriptors as text, for the workers' environment variable `LOCKSTEP_MEMORY`."""
        return ",".join(map(str, self.all))

    def keep_through_exec(self) -> None:
        """Make the file descriptors inheritable by a program that this process executes."""
        for descriptor in self.all:
            os.set_inheritable(descriptor, True)

    def close(self) -> None:
        """Close the file descriptors in this process."""
        for descriptor in self.all:
            with contextlib.suppress(OSError):
                os.close(descriptor)


class ProgressSlot(ctypes.Structure):
    """One rank's progress (step, collective call, …) in shared memory, which the launcher reads.

    Counts only grow until ranks are restarted. Ranks that are in the same collective call have equal
    counts, except `beat`, which also counts progress outside of collective calls.
    """

    pid: int  # process id of the rank; 0 before it has opened a run since the last (re)start
    beat: int  # heartbeat: grows with every event on the rank
    entered: int  # number of collective calls that the rank has entered
    waiting: int  # index in `COLLECTIVES` of the call in which the rank is; 0 for none
    step: int  # steps that the run has done
    run: int  # number of the run in its process, from 0

    _fields_ = tuple(
        (name, ctypes.c_uint64) for name in ("pid", "beat", "entered", "waiting", "step", "run")
    )


class StatusPage:
    """Shared memory of a launcher with each rank's progress, planned snapshots, and requests."""

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, _PAGE_BYTES)
        self._words = memoryview(self._memory).cast("Q")

    def slot(self, index: int) -> ProgressSlot:
        """Return the `ProgressSlot` with the progress of the launcher's rank number `index`, from 0."""
        return ProgressSlot.from_buffer(self._memory, _WORD * _SLOT_WORDS * (index + 1))

    @property
    def snapshots(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """The last two planned snapshots, each as (step after which it is due, number).

        The launcher's first rank writes both pairs, the others read them. Two are kept, since the first
        rank may plan the next snapshot before another rank has read the step of this one.
        """
        words = self._words
        return (words[4], words[5]), (words[6], words[7])

    def plan_snapshot(self, step: int, number: int) -> None:
        """Set the step after which snapshot `number` is due; keep the previous snapshot's step, too."""
        word = 4 + 2 * (number % 2)
        self._words[word] = 0
        self._words[word + 1] = number
        self._words[word] = step

    @property
    def asked(self) -> int:
        """Code of a request that a rank has made to all ranks, such as to save and exit; 0 for none.

        The codes are defined in `lockstep.engine.recovery.coordination`.
        """
        return self._words[1]

    @asked.setter
    def asked(self, what: int) -> None:
        self._words[1] = what

    @property
    def agreed(self) -> tuple[int, int]:
        """The step after which all ranks carry out a request, and the code of the request.

        Rank 0 sets both. The codes are those of `asked`.
        """
        return self._words[2], self._words[3]

    @agreed.setter
    def agreed(self, step_and_what: tuple[int, int]) -> None:
        step, what = step_and_what
        self._words[3] = what  # the step is written last, since the other ranks wait for it
        self._words[2] = step

    def begin_run(self) -> None:
        """Clear requests and planned snapshots, which an earlier run of these processes may have set."""
        for word in range(_SLOT_WORDS):
            self._words[word] = 0

    def clear(self) -> None:
        """Clear the whole page before workers are (re)started."""
        self._memory[:] = bytes(_PAGE_BYTES)


class LossRing:
    """Ring buffer in shared memory with the losses of a rank's latest microbatches.

    It outlives the rank. A loss is stored as the bits of a float64 number.

    Args:
        words: the shared memory with the losses of all ranks of this launcher, from `memory`.
        index: number of the rank among those of its launcher, from 0.
        run: number of the run in its script, from 0; losses of different runs have different keys.
    """

    def __init__(self, words: memoryview, index: int, run: int = 0) -> None:
        self._words, self._first, self._run = words, index * _LOSS_WORDS, run

    @staticmethod
    def memory(descriptor: int) -> memoryview:
        """Map the shared memory at `descriptor`, with the losses of all ranks of this launcher.

        Return it as a view of 64-bit integers.
        """
        return memoryview(mmap.mmap(descriptor, _LOSS_BYTES)).cast("q")

    def key(self, points: int, replica: int, nth: int) -> int:
        """Return a number other than 0 that identifies the `nth` loss of a replica in a batch of this run.

        `points` is the number of batches and epochs that were completed before the batch.
        """
        # Hashes of integers are equal in all processes.
        return hash((self._run, points, replica, nth)) or 1

    def add(self, key: int, bits: int) -> None:
        """Store a loss under `key`; in a full ring, overwrite the oldest loss.

        `bits`: bits of the loss, a float64 number, as an integer.
        """
        words, first = self._words, self._first
        place = first + 1 + 2 * (words[first] % _LOSSES)
        words[place] = 0
        words[place + 1] = bits
        words[place] = key
        words[first] += 1

    def clear(self) -> None:
        """Remove this rank's losses, also those of earlier runs of the script."""
        self._words[self._first] = 0
        for place in range(self._first + 1, self._first + _LOSS_WORDS, 2):
            self._words[place] = 0

    def read(self) -> dict[int, int]:
        """Return this rank's losses, as bits of float64 numbers, by their keys (see `key`)."""
        words = self._words[self._first + 1 : self._first + _LOSS_WORDS].tolist()
        return {key: bits for key, bits in zip(words[::2], words[1::2], strict=True) if key}

    @staticmethod
    def read_all(words: memoryview, ranks: int) -> dict[int, int]:
        """Return the losses of a launcher's `ranks` ranks, except losses that differ between two ranks.

        The shared memory `words` contains the losses. Keys are those of the method `key`; values are the
        bits of float64 numbers.
        """
        found: dict[int, int] = {}
        unclear = set()
        for index in range(ranks):
            for key, bits in LossRing(words, index).read().items():
                if found.setdefault(key, bits) != bits:
                    unclear.add(key)
        return {key: bits for key, bits in found.items() if key not in unclear}


#: Layout of a snapshot buffer: a header, one mark for each rank's part, the tensors' elements, a text.
_MAGIC = 0x6C6F636B73746570
_MARKS = 512  # word at which the marks begin
_ALIGNMENT = 4096
_MAGIC_WORD, _PARTS_WORD, _TEXT_WORD, _DATA_WORD = range(4)
_TAG = slice(64, 96)
#: Offset of the elements. It must be the same on all ranks, so nothing whose size may differ, such as a
#: text, comes before: ranks write at the same time, each at the offset that it computes for its part.
DATA = -(-_WORD * (_MARKS + SLOTS) // _ALIGNMENT) * _ALIGNMENT


class Buffer:
    """One of the two buffers for snapshots in shared memory, which are written in turn.

    Each rank of a launcher writes its part of the elements, and then a mark: the number of the snapshot.
    The snapshot is complete if the marks of all ranks are equal. Numbers grow from snapshot to snapshot;
    even numbers go to the first buffer, odd numbers to the second.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._memory: mmap.mmap | None = None
        self.refresh()

    def refresh(self) -> None:
        """Map the buffer's memory again if another process has made it larger."""
        size = os.fstat(self._descriptor).st_size
        if size and (self._memory is None or len(self._memory) < size):
            self._memory = mmap.mmap(self._descriptor, size)

    def reserve(self, text: int, data: int) -> None:
        """Make the buffer large enough for `text` bytes of text and `data` bytes of tensor elements.

        The memory only grows, so that every rank may call this method.
        """
        wanted = DATA + -(-(data + text) // _ALIGNMENT) * _ALIGNMENT
        if os.fstat(self._descriptor).st_size < wanted:
            # Unlike ftruncate this cannot shrink memory that a rank with a longer text has just enlarged.
            os.posix_fallocate(self._descriptor, wanted - 1, 1)
        self.refresh()

    @property
    def memory(self) -> mmap.mmap:
        """The whole mapped memory of the buffer."""
        assert self._memory is not None, "reserve() comes first"
        return self._memory

    @property
    def _words(self) -> memoryview:
        """The whole mapped memory as 64-bit numbers."""
        return memoryview(self.memory).cast("Q")

    @property
    def number(self) -> int:
        """Number of the snapshot in the buffer, or 0 if the snapshot is not complete."""
        if self._memory is None or self._words[_MAGIC_WORD] != _MAGIC:
            return 0
        words = self._words
        marks = words[_MARKS : _MARKS + words[_PARTS_WORD]].tolist()
        return marks[0] if marks and min(marks) == max(marks) else 0

    @property
    def highest(self) -> int:
        """The highest snapshot number that any rank has marked as written in the buffer."""
        return 0 if self._memory is None else max(self._words[_MARKS : _MARKS + SLOTS].tolist())

    @property
    def tag(self) -> bytes:
        """The tag (32 bytes, from `tag_of`) that identifies the run whose snapshot is in the buffer."""
        return bytes(self.memory[_TAG])

    @property
    def text(self) -> bytes:
        """The JSON text of the snapshot: state without tensors, and offsets and dtypes of the tensors."""
        words = self._words
        start = DATA + words[_DATA_WORD]
        return bytes(self.memory[start : start + words[_TEXT_WORD]])

    @property
    def data(self) -> memoryview:
        """The bytes of all elements of the snapshot's tensors."""
        return memoryview(self.memory)[DATA : DATA + self._words[_DATA_WORD]]

    def begin(self, part: int) -> None:
        """Mark the data of this launcher's rank number `part` as incomplete, before the rank writes."""
        self._words[_MARKS + part] = 0

    def describe(self, tag: bytes, text: bytes, data: int, parts: int) -> None:
        """Write the header and the text of a snapshot; only the first rank of the launcher does so.

        `tag` identifies the run, see `tag_of`. `data` is the number of bytes of all tensors, `parts` the
        number of ranks that write them.
        """
        words = self._words
        words[_MAGIC_WORD] = 0
        words[_PARTS_WORD] = parts
        words[_TEXT_WORD] = len(text)
        words[_DATA_WORD] = data
        self.memory[_TAG] = tag
        self.memory[DATA + data : DATA + data + len(text)] = text
        words[_MAGIC_WORD] = _MAGIC

    def discard(self) -> None:
        """Make the snapshot in the buffer incomplete, so that no rank reads it any more."""
        self._words[_MAGIC_WORD] = 0

    def commit(self, part: int, number: int) -> None:
        """Mark the data of this launcher's rank number `part` as complete, for snapshot `number`."""
        self._words[_MARKS + part] = number


def tag_of(identity: bytes, run: int) -> bytes:
    """Return 32 bytes that identify a run: its number `run` in the script, and a hash of `identity`."""
    return run.to_bytes(4, "big") + hashlib.sha256(identity).digest()[:28]


def run_of(tag: bytes) -> int:
    """Return the number of a run among the runs of its script, from 0; it is the first field of `tag`."""
    return int.from_bytes(tag[:4], "big")


def newest(buffers: Sequence[Buffer]) -> Buffer | None:
    """Return the buffer with the newest complete snapshot, or `None` if no buffer has one."""
    for buffer in buffers:
        buffer.refresh()
    whole = [buffer for buffer in buffers if buffer.number > 0]
    return max(whole, key=lambda buffer: buffer.number) if whole else None


def next_number(buffers: Sequence[Buffer]) -> int:
    """Return the next higher number for a snapshot that does not overwrite the newest complete one.

    The number determines the buffer: even numbers belong to the first, odd numbers to the second.
    """
    keep = newest(buffers)
    number = max(buffer.highest for buffer in buffers) + 1
    return number + (keep is not None and buffers[number % 2] is keep)


def progress(descriptors: Descriptors) -> tuple[bytes, int]:
    """Return the run tag and the number of the newest complete snapshot, or `b""` and 0 without one."""
    buffer = newest([Buffer(descriptor) for descriptor in descriptors.buffers])
    return (b"", 0) if buffer is None else (buffer.tag, buffer.number)
