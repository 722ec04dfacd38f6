"""A background thread that runs jobs in order; its error is raised in the thread that waits."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class Background:
    """A thread that starts with the first job, and ends with `close`, or with the process.

    Args:
        name: its name.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._open = 0
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def submit(self, job: Callable[[], None]) -> None:
        """Do `job` after those before it; after an error that is not raised yet it is left out."""
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
        """Wait until all jobs are done, but not for longer than `seconds`; tell no error."""
        with self._changed:
            self._changed.wait_for(lambda: self._open == 0, seconds)

    def close(self, seconds: float) -> bool:
        """Do no more jobs; return whether the thread has ended within `seconds`."""
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
