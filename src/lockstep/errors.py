"""Every error a user can meet, each with an exit code and a hint.

LockstepError
├── UsageError                 exit 2   a flag, an argument or a layout that cannot work
│   ├── ScriptNotFoundError             the script to run is not there
│   ├── WorldError                      the environment contradicts itself
│   │   └── UnreachableError            a node or rank that no packet reaches
│   └── DeviceError                     a device that this machine does not have
├── OutputError                exit 1   a file that was asked for cannot be written
├── CheckFailedError           exit 3   a check ran, and did not hold
└── RunError                   exit 1   a run that started and failed
    ├── ModelError                      a model that the run does not hold, or ranks that differ
    ├── LoaderError                     data that cannot be split as asked
    ├── StepError                       calls in an order that depends on the layout
    ├── NonFiniteLossError              a loss that is NaN or infinite
    ├── ExactnessError                  a setting that breaks the promise, with `exact=True`
    ├── MismatchError                   ranks are in different calls that all ranks make together
    ├── DivergenceError                 ranks that should hold the same bits do not
    ├── RunDirectoryError               the run directory cannot be used
    ├── CheckpointError                 a checkpoint or a file of weights cannot be written or read
    └── PeerError                       another rank left, died or fell behind
        └── EarlyExitError              another rank left a loop that this rank is still in

A message says what was seen and what was expected; the hint names the flag or the call that helps.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

#: Exit code of a run that was told to make room, and saved its state before: `EX_TEMPFAIL`.
PREEMPTED = 75


class LockstepError(Exception):
    """Base of all errors that Lockstep raises for users.

    Args:
        message: what was seen, and what was expected.
        hint: what to do about it, in one line.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message


class UsageError(LockstepError):
    """A flag, an argument or a layout that cannot work."""

    exit_code = 2


class ScriptNotFoundError(UsageError):
    """The script to run is not there, or is not a file."""


class WorldError(UsageError):
    """The environment variables that should say who this process is contradict each other."""


class UnreachableError(WorldError):
    """A node or a rank that another one cannot reach over the network."""


class DeviceError(UsageError):
    """A device was asked for that this machine does not have."""


class OutputError(LockstepError):
    """A file that was asked for cannot be written."""


class CheckFailedError(LockstepError):
    """A check ran to its end and did not hold."""

    exit_code = 3


class RunError(LockstepError):
    """A run that started and failed."""


class ModelError(RunError):
    """A model or an optimizer that the run does not hold, or that differs between ranks."""


class LoaderError(RunError):
    """Data that cannot be split over the replicas as asked."""


class StepError(RunError):
    """Calls in an order whose result would depend on the layout."""


class NonFiniteLossError(RunError):
    """A loss that is NaN or infinite."""


class ExactnessError(RunError):
    """A setting that would break the promise, while `exact=True`."""


class MismatchError(RunError):
    """Ranks are in different calls, each of which all ranks have to make together."""


class DivergenceError(RunError):
    """Ranks that should hold the same bits do not."""


class RunDirectoryError(RunError):
    """The run directory cannot be created, written or continued."""


class CheckpointError(RunError):
    """A checkpoint, or a file of weights, that cannot be written or read."""


class PeerError(RunError):
    """Another rank left, died or fell behind: a consequence, seldom the cause."""


class EarlyExitError(PeerError):
    """Another rank left a loop that this rank is still in."""


def did_you_mean(word: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return a hint with the known word that is nearest to `word`; `None` where none is near."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return f"did you mean {near[0]}?" if near else None
