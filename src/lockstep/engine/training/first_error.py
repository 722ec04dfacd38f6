"""`FirstError`: the first error of a run, raised again by later calls even if the script catches it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from lockstep.engine.recovery.preemption import Preempted
from lockstep.errors import LockstepError, StepError


class FirstError:
    """Holds the first error of a run; later loops, and calls that all ranks make, raise it again.

    The run cannot continue, since other ranks may not have the error.
    """

    def __init__(self, replicas: int) -> None:
        self._replicas = replicas
        self._error: LockstepError | Preempted | None = None

    def check(self) -> None:
        """Raise the recorded first error of the run again, if there is one."""
        if self._error is not None:
            raise self._error

    def keep(self, error: BaseException) -> None:
        """Record `error`, raised by a loop or a method of the run, unless an earlier one is recorded.

        Errors from the script's code are recorded only with several replicas: other replicas may lack them.
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

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Return a context manager that passes an exception of its body to `keep`."""
        try:
            yield
        except BaseException as error:
            self.keep(error)
            raise
