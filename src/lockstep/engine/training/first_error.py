"""`FirstError`: the error that ends a run, also where the script catches it."""

from __future__ import annotations

from lockstep.engine.recovery.preemption import Preempted
from lockstep.errors import LockstepError, StepError


class FirstError:
    """The first error of a call that all layouts must make alike.

    Every later call raises it again: other ranks may have computed what this rank has not.
    """

    def __init__(self, replicas: int) -> None:
        self._replicas = replicas
        self._error: LockstepError | Preempted | None = None

    def check(self) -> None:
        """Raise the first error, if there is one."""
        if self._error is not None:
            raise self._error

    def keep(self, error: BaseException) -> None:
        """Keep an error that a loop, or a call, raises to the script.

        With several replicas errors of the data count, too: other replicas may not have them.
        """
        if self._error is not None:
            return
        if isinstance(error, LockstepError | Preempted):
            self._error = error
        elif self._replicas > 1 and isinstance(error, Exception):
            what = f"{type(error).__name__}: {error}".partition("\n")[0]
            self._error = StepError(
                f"a loop over a loader ended with {what}, and the script continued; expected the run to "
                "end, since other replicas may have no such error",
                hint="handle errors of samples in the dataset, which may return another sample",
            )
            self._error.__cause__ = error
