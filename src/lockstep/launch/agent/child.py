"""Run a function in a child process with a timeout, so that a hang or crash is one finding.

A file server that does not answer, a driver that hangs and a processor that lacks an instruction end the
child and not its parent. Children are forked before the parent starts a thread, and before it touches CUDA.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from lockstep.launch.agent import processes

_CHUNK = 1 << 16


class LostError(Exception):
    """What was asked for did not come; the text says why."""


class Child:
    """A forked process that waits for an argument, calls a function with it, and tells the result.

    Args:
        work: takes and returns values of JSON's types.
    """

    def __init__(self, work: Callable[[Any], Any]) -> None:
        parent = os.getpid()
        self._line, end = socket.socketpair()
        self._ended: int | None = None
        self.pid = processes.fork()
        if self.pid == 0:
            self._line.close()
            _serve(parent, end, work)
        end.close()

    def give(self, argument: Any) -> Child:
        """Let it begin; return this child."""
        with contextlib.suppress(OSError):  # it has crashed: `result` says so
            self._line.sendall(json.dumps(argument).encode() + b"\n")
        return self

    def result(self, seconds: float) -> Any:
        """Return what the function returned; the process is gone afterwards.

        Raises:
            LostError: if it did not within `seconds`, raised, or crashed.
        """
        try:
            text = _read_line(self._line, seconds)
        except TimeoutError:
            raise LostError(f"no answer within {seconds:g} s") from None
        finally:
            self.close()
        if not text:
            raise LostError(f"the process that looked at it was ended by {self._how()}")
        told = json.loads(text)
        if "error" in told:
            raise LostError(told["error"])
        return told["value"]

    def close(self) -> None:
        """Kill it, and all that it has started."""
        self._line.close()
        if self._ended is None:
            self._ended = processes.end(self.pid)

    def _how(self) -> str:
        code = self._ended
        return signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"


def _serve(parent: int, line: socket.socket, work: Callable[[Any], Any]) -> NoReturn:
    try:
        nothing = os.open(os.devnull, os.O_RDWR)
        processes.make_clean(parent, (nothing, os.dup(nothing), os.dup(nothing)))
        text = _read_line(line, None)
        if text:
            try:
                told = {"value": work(json.loads(text))}
            except Exception as error:
                why = str(error).partition("\n")[0]
                told = {"error": f"{type(error).__name__}: {why}"}
            line.sendall(json.dumps(told).encode() + b"\n")
    finally:
        os._exit(0)


def _read_line(line: socket.socket, seconds: float | None) -> bytes:
    """Return what comes until the end of a line; nothing where the other end closes before."""
    deadline = None if seconds is None else time.monotonic() + seconds
    text = b""
    while not text.endswith(b"\n"):
        if deadline is not None:
            line.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            part = line.recv(_CHUNK)
        except ConnectionError:
            return b""
        if not part:
            return b""
        text += part
    return text


def bounded(work: Callable[[], Any], seconds: float) -> Any:
    """Return what `work` returns, called in a thread that is given up on after `seconds`.

    A store of torch whose host is out of reach keeps its caller for as long as TCP does.

    Raises:
        LostError: if it does not return in time.
    """
    done: list[tuple[Any, BaseException | None]] = []

    def run() -> None:
        try:
            done.append((work(), None))
        except BaseException as error:
            done.append((None, error))

    thread = threading.Thread(target=run, name="lockstep-bounded", daemon=True)
    thread.start()
    thread.join(seconds)
    if not done:
        raise LostError(f"no answer within {seconds:g} s")
    value, error = done[0]
    if error is not None:
        raise error
    return value
