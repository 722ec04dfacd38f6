"""Run functions that may hang or crash, with a timeout, so that the calling process goes on.

`Child` runs a function in a forked process, `bounded` in a thread. Such a function may hang in a driver or
on a file server, or crash at an instruction that the CPU lacks. Children are forked before the parent
starts a thread or initializes CUDA.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from lockstep.launch.agent import processes


class LostError(Exception):
    """Raised for a function that timed out, or that raised or crashed in a `Child`; says why."""


class Child:
    """A forked process that waits for an argument, calls a function with it, and sends the result.

    Args:
        work: function of one argument; argument and result are JSON values.
    """

    def __init__(self, work: Callable[[Any], Any]) -> None:
        parent = os.getpid()
        self._line, end = Pipe()
        self._ended: int | None = None
        self.pid = processes.fork()
        if self.pid == 0:
            self._line.close()
            _serve(parent, end, work)
        end.close()

    def give(self, argument: Any) -> Child:
        """Send the function's argument to the child process; return this object."""
        with contextlib.suppress(OSError):  # it has crashed: `result` says so
            self._line.send_bytes(json.dumps(argument).encode())
        return self

    def result(self, seconds: float) -> Any:
        """Return the function's result, and end the child process.

        Raises:
            LostError: if the function took longer than `seconds`, raised or crashed.
        """
        text = b""
        try:
            if not self._line.poll(seconds):
                raise LostError(f"no answer within {seconds:g} s")
            text = self._line.recv_bytes()
        except (EOFError, ConnectionError):  # it has crashed
            pass
        finally:
            self.close()
        if not text:
            code = self._ended
            how = f"exit code {code}"
            if code is not None and code < 0:
                how = signal.Signals(-code).name
            raise LostError(f"the process that looked at it was ended by {how}")
        answer = json.loads(text)
        if "error" in answer:
            raise LostError(answer["error"])
        return answer["value"]

    def close(self) -> None:
        """Kill the child process, and every process that it started."""
        self._line.close()
        if self._ended is None:
            self._ended = processes.end(self.pid)


def _serve(parent: int, line: Connection, work: Callable[[Any], Any]) -> NoReturn:
    try:
        nothing = os.open(os.devnull, os.O_RDWR)
        processes.make_clean(parent, (nothing, os.dup(nothing), os.dup(nothing)))
        argument = json.loads(line.recv_bytes())
        try:
            answer = {"value": work(argument)}
        except Exception as error:
            why = str(error).partition("\n")[0]
            answer = {"error": f"{type(error).__name__}: {why}"}
        line.send_bytes(json.dumps(answer).encode())
    finally:
        os._exit(0)


def bounded(work: Callable[[], Any], seconds: float) -> Any:
    """Call `work` in a thread and return its result; abandon the thread after `seconds`.

    Use it for calls that have no timeout, such as those of a `TCPStore` whose host is unreachable. An
    exception that `work` raises is raised again.

    Raises:
        LostError: if `work` does not return in time.
    """
    result: Future[Any] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    thread = threading.Thread(target=run, name="lockstep-bounded", daemon=True)
    thread.start()
    thread.join(seconds)
    if not result.done():
        raise LostError(f"no answer within {seconds:g} s")
    return result.result()
