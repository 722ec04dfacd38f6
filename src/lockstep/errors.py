"""Exceptions that Lockstep raises for users, each with an exit code and a hint.

LockstepError
├── UsageError                 exit 2   invalid flag, argument or layout
│   ├── ScriptNotFoundError             the script does not exist
│   ├── WorldError                      variables of the environment contradict each other
│   │   └── UnreachableError            a node or rank cannot be reached over the network
│   └── DeviceError                     this machine lacks the device
├── OutputError                exit 1   an output file cannot be written
├── CheckFailedError           exit 3   a check failed
└── RunError                   exit 1   a run failed
    ├── ModelError                      a model is not one of the run's, or differs between ranks
    ├── VariableError                   a script uses a variable that it did not give to `run.state`
    ├── LoaderError                     data that cannot be split over the replicas
    ├── StepError                       the order of calls would make the result depend on the layout
    ├── AuditError                      a microbatch that is computed twice gives different bits
    │   └── WrongRankError              one rank computes something else than all others
    ├── NonFiniteLossError              a loss that is NaN or infinite
    ├── ExactnessError                  a setting makes the result depend on the layout, with `exact=True`
    ├── MismatchError                   ranks are in different collective calls
    ├── DivergenceError                 ranks that should have the same bits differ
    ├── RunDirectoryError               the run directory cannot be used
    ├── CheckpointError                 a checkpoint or a file of weights cannot be written or read
    └── PeerError                       another rank ended or is stuck
        └── EarlyExitError              another rank left a loop early

A message says what was seen and what was expected; the hint names the flag or the call to change.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence

#: Exit code of a preempted run, which has saved its state: `EX_TEMPFAIL`.
PREEMPTED = 75


class LockstepError(Exception):
    """Base class of all errors that Lockstep raises for users.

    Args:
        message: the observed and the expected value or event.
        hint: one line that names a flag or a call which avoids the error.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message


class UsageError(LockstepError):
    """A flag, an argument or a layout is invalid."""

    exit_code = 2


class ScriptNotFoundError(UsageError):
    """The script does not exist, or is not a file."""


class WorldError(UsageError):
    """The environment variables for rank, world size and rendezvous contradict each other."""


class UnreachableError(WorldError):
    """A node or a rank cannot be reached over the network."""


class DeviceError(UsageError):
    """A requested device does not exist on this machine, or cannot be used."""


class OutputError(LockstepError):
    """A file that a command writes as its output cannot be written."""


class CheckFailedError(LockstepError):
    """A check, such as `lockstep verify`, ran to its end and failed."""

    exit_code = 3


class RunError(LockstepError):
    """A run that had started failed."""


class ModelError(RunError):
    """A model or an optimizer does not belong to the run, cannot be used, or differs between ranks."""


class VariableError(RunError, AttributeError):
    """A script uses a variable of `run.state` that was not created there."""


class LoaderError(RunError):
    """Data cannot be split over the replicas (logical data-parallel workers)."""


class StepError(RunError):
    """The script's order of calls would make the result depend on the layout."""


class AuditError(RunError):
    """A microbatch that was computed twice gave different bits, or changed state that only a step may."""


class WrongRankError(AuditError):
    """One rank, number `rank`, computes something else than all others, which agree."""

    def __init__(self, message: str, *, hint: str, rank: int) -> None:
        super().__init__(message, hint=hint)
        self.rank = rank


class NonFiniteLossError(RunError):
    """A loss is NaN or infinite."""


class ExactnessError(RunError):
    """A setting would make the result depend on the layout, with `exact=True`."""


class MismatchError(RunError):
    """Ranks have called different collective operations; expected the same call on all ranks."""


class DivergenceError(RunError):
    """Values that must have the same bits on all ranks, such as parameters, differ."""


class RunDirectoryError(RunError):
    """The run directory cannot be created, written or continued."""


class CheckpointError(RunError):
    """A checkpoint, or a file of weights, cannot be written or read."""


class PeerError(RunError):
    """Another rank ended or is stuck; mostly this error is a consequence of that rank's own error."""


class EarlyExitError(PeerError):
    """Another rank left a loop over a loader before its end, while this rank continued."""


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield `error`, then the exception that caused it, then that one's cause, and so on."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        yield error
        seen.add(id(error))
        context = None if error.__suppress_context__ else error.__context__
        error = error.__cause__ or context


def listed(names: Sequence[str], most: int, *, between: str = ", ") -> str:
    """Return up to `most` names as one text, with the number of further names at its end."""
    more = len(names) - most
    return between.join(names[:most]) + (f" and {more} more" if more > 0 else "")


def shortened(text: str, limit: int = 8192) -> str:
    """Return `text`, without its middle part if it has more than `limit` characters."""
    left_out = len(text) - limit
    if left_out <= 0:
        return text
    half = limit // 2
    return f"{text[:half]}\n… ({left_out} characters left out) …\n{text[-half:]}"


def did_you_mean(word: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return "did you mean …?" with the known word that is most similar to `word`; `None` without such."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return f"did you mean {near[0]}?" if near else None
