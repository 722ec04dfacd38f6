"""Several parties of one rendezvous as threads of the test, with a hard timeout."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any


class Party:
    """A call in a thread: what it returned, or raised."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._outcome: Any = TimeoutError("the call has not ended")
        # A daemon, so that a call that hangs fails its test only.
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._outcome = self._call()
        except BaseException as error:
            self._outcome = error

    def end(self, seconds: float = 10) -> Any:
        """Wait for the end; return the value, or the exception that was raised."""
        self._thread.join(seconds)
        return self._outcome


def together(*calls: Callable[[], Any], seconds: float = 10) -> list[Any]:
    """Make calls at the same time; return what each returned, or the exception that it raised."""
    parties = [Party(call) for call in calls]
    deadline = time.monotonic() + seconds
    return [one.end(max(0.01, deadline - time.monotonic())) for one in parties]
