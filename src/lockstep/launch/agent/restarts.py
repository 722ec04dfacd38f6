"""Restart policy: kinds of failures that start a new generation, and how often. Pure.

A failure that came from outside the script (a signal, a lost node, a full disk) need not come again. An
exception of the script's own would: the run is a function of its script, so the same step fails the same
way. Failures are counted in a row, and begin at one again when the run has moved on meanwhile.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from enum import StrEnum

from lockstep import errors
from lockstep.state.record.error_report import Report

#: How many failures in a row without progress a run survives, unless the user says otherwise.
DEFAULT = 3


class Kind(StrEnum):
    """What a failure comes from."""

    SIGNAL = "signal"
    PEER = "peer"  # another rank's end, whose own cause is not known
    HANG = "hang"
    LOST = "lost"  # a node
    ENVIRONMENT = "environment"
    SCRIPT = "script"
    REFUSED = "refused"  # by Lockstep itself, which would refuse again


def _names(kind: type[BaseException]) -> Iterator[str]:
    yield kind.__name__
    for one in kind.__subclasses__():
        yield from _names(one)


#: What the system says of a disk, a file server, a network or a limit, and may not say a moment later. All
#: other errors of the system are about a path or a call, and would come again.
_TRANSIENT = frozenset(
    {
        # a device, or a file server that restarts or fails over
        *(errno.EIO, errno.EREMOTEIO, errno.ESTALE, errno.ENOLCK),
        # room that other processes use, and may give back
        *(errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOBUFS),
        *(errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.EADDRINUSE),
        # the way to another machine
        *(errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH),
        *(errno.ENETRESET, errno.ECONNRESET, errno.ECONNREFUSED, errno.ECONNABORTED, errno.EPIPE),
        *(errno.ENOTCONN, errno.ESHUTDOWN),
    }
)
#: Errors of the system, which may come without its number.
_SYSTEM = frozenset(_names(ConnectionError)) | {
    "BlockingIOError",
    "InterruptedError",
    "TimeoutError",
}
#: Of torch (memory, devices, stores and process groups) and of the standard library.
_ENVIRONMENT = {
    "MemoryError",
    "AcceleratorError",
    "DistBackendError",
    "DistNetworkError",
    "DistStoreError",
    "HTTPError",
    "IncompleteRead",
    "OutOfMemoryError",
    "SSLError",
    "URLError",
}
#: What torch says in a plain `RuntimeError`, when it is the machine that failed.
_PHRASES = re.compile(
    r"DataLoader worker .*(killed|exited)|can't allocate memory|cannot allocate memory"
    r"|too many open files|no space left on device|unable to (open|mmap|write).*shared memory"
    r"|CUDA error|HIP error|NCCL error|CUBLAS_STATUS|CUDNN_STATUS",
    re.IGNORECASE | re.DOTALL,
)


def kind(told: Report | None, code: int, *, consequence: bool) -> Kind:
    """Return what the failure of a rank comes from.

    Args:
        told: its exception, where it could describe it.
        code: how its process ended: an exit code, or minus a signal.
        consequence: whether another rank's failure explains it.
    """
    if told is not None and told.exception == errors.EarlyExitError.__name__:
        return Kind.REFUSED  # a consequence of what the script does, and would do again
    if consequence:
        return Kind.PEER
    if told is None:
        return Kind.SIGNAL if code < 0 else Kind.SCRIPT
    if _is_transient(told):
        return Kind.ENVIRONMENT
    is_own = told.exception in set(_names(errors.LockstepError))
    return Kind.REFUSED if is_own else Kind.SCRIPT


def _is_transient(told: Report) -> bool:
    """Return whether an exception comes from the machine, and need not come again."""
    if told.exception in set(_names(errors.UsageError)):
        return False
    if _TRANSIENT.intersection(told.errnos) or told.exception in _ENVIRONMENT:
        return True
    if told.exception in _SYSTEM:
        return not told.errnos
    # A plain OSError without a number is a library's, which read a damaged file, and would do so again.
    return told.exception == "RuntimeError" and bool(_PHRASES.search(told.message))


class Restarts:
    """How often workers have been started again, and whether they may be once more.

    Args:
        limit: failures in a row without progress after which workers are started again; `None` for the
            default of a run, and none for a script without one.
    """

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._in_a_row = 0
        self._last: object = None
        #: Generations after the first.
        self.count = 0

    @property
    def limit(self) -> int:
        """What scripts that ask for it are told: how many restarts there may be."""
        return self._limit or 0

    def again(self, cause: Kind, progress: object, *, is_run: bool) -> bool:
        """Return whether workers are to be started again after a failure; counts that they are.

        Args:
            cause: what the failure comes from.
            progress: how far the run is, in any form that can be compared.
            is_run: whether the script has a run of Lockstep's, whose state is kept.
        """
        self._fail(progress)
        if not self._survives(cause, is_run=is_run):
            return False
        self.count += 1
        return True

    def follow(self, progress: object) -> None:
        """Count a restart that another launcher has decided: this one may have to decide the next."""
        self._fail(progress)
        self.count += 1

    def _fail(self, progress: object) -> None:
        self._in_a_row = self._in_a_row + 1 if progress == self._last else 1
        self._last = progress

    def _survives(self, cause: Kind, *, is_run: bool) -> bool:
        if self._limit is None:
            limit = DEFAULT if is_run and cause is not Kind.SCRIPT else 0
        else:
            limit = self._limit
        return cause is not Kind.REFUSED and self._in_a_row <= limit
