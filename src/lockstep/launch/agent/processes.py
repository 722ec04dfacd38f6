"""Calls of Linux for processes: death signals, clean children, affinity, threads.

Everything here is for Linux. A child made by `fork` keeps its parent's signal handlers, random state
and streams; `make_clean` gives it those of a process of its own.
"""

from __future__ import annotations

import ctypes
import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Sequence

from lockstep.world.cores import parse_list

_PR_SET_PDEATHSIG = 1
#: How long a killed process may take to end before it is left, and how often that is looked at.
_END_SECONDS, _LOOK_SECONDS = 1.0, 0.002


def signal_session(pid: int, signum: int) -> None:
    """Send a signal to a child and to all that it has started in its session."""
    try:
        os.killpg(pid, signum)
    except ProcessLookupError:  # so young that it has no session of its own yet
        os.kill(pid, signum)


def reap(pid: int, seconds: float) -> int | None:
    """Wait for a child, `seconds` at most; return its exit code, or minus the signal that ended it.

    Raises:
        ChildProcessError: if it has been waited for.
    """
    deadline = time.monotonic() + seconds
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            return None
        time.sleep(_LOOK_SECONDS)


def end(pid: int) -> int | None:
    """Kill a child and all in its session; return how it ended, or `None` where it cannot end now.

    The kernel ends a process that is inside a driver, or waits for a file server, when that call returns.
    Nothing that is waited for here may depend on that.

    Raises:
        ChildProcessError: if it has been waited for.
    """
    signal_session(pid, signal.SIGKILL)
    return reap(pid, _END_SECONDS)


def run(words: Sequence[str], seconds: float) -> tuple[int, str, str]:
    """Run a program; return its exit code and what it has written to standard output and error.

    Raises:
        TimeoutError: if it has not ended within so many seconds.
        OSError: if it cannot be run.
    """
    with subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            # With an exit code the end of the block does not wait for it.
            process.returncode = end(process.pid) or -signal.SIGKILL
            raise TimeoutError from None
    return process.returncode, out, err


def die_with_parent(parent: int, signum: signal.Signals) -> None:
    """Let the kernel send `signum` to this process when its parent, which may be dead already, dies."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        os.kill(os.getpid(), signum)


def fork() -> int:
    """Fork without Python 3.12's warning about threads: callers have checked that there are none."""
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def make_clean(parent: int, streams: Sequence[int]) -> None:
    """Turn a freshly forked child of `parent` into a worker of its own session.

    The descriptors `streams` become standard input, output and error.
    """
    die_with_parent(parent, signal.SIGKILL)
    os.setsid()
    reset_signals()
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
    for descriptor in set(streams):
        os.close(descriptor)
    # A fresh interpreter seeds these from the system; children of one parent would all be equal.
    random.seed()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()  # not torch.seed(): that would reach for devices, too


def bind(cpus: str | None) -> None:
    """Keep this process, which has one thread, and all that it starts to the processors of a list."""
    if cpus is not None:
        os.sched_setaffinity(0, parse_list(cpus))


def reset_signals() -> None:
    """Reset the signal handlers and the mask of the parent."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def renew_streams() -> None:
    """Give Python's standard streams the buffers of this process; lines appear as they are written."""
    out, err = _encoding(sys.stdout), _encoding(sys.stderr)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - lives as long as the process
    sys.stdout = open(1, "w", buffering=1, encoding=out, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding=err, errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]


def _encoding(stream: object) -> str | None:
    encoding = getattr(stream, "encoding", None)
    return encoding if isinstance(encoding, str) else None


def end_within(seconds: float, code: int) -> None:
    """End this process after `seconds` at most, whatever threads and `atexit` functions wait for."""

    def end() -> None:
        time.sleep(seconds)
        os._exit(code & 0xFF)

    threading.Thread(target=end, name="lockstep-end", daemon=True).start()


def finalize(code: int) -> None:
    """End this forked process as an interpreter ends: threads, `atexit`, flushes, module teardown.

    The frames below belong to the launcher and must not be unwound here, so `sys.exit` will not do;
    `os._exit` would lose files that the script left open for the teardown to flush.
    """
    # nanobind, with which some extensions of torch are made from 2.15 on, reports each of its objects that
    # is left when Python has ended. Frozen ones are, although nothing has leaked. To collect them takes a
    # quarter of a second.
    if any(str(name).startswith("__nb_internals") for name in extensions_state()):
        gc.unfreeze()
    ctypes.pythonapi.Py_Exit(code & 0xFF)


def extensions_state() -> dict[object, object]:
    """Return the interpreter's dictionary of extensions' state."""
    interpreter = ctypes.pythonapi.PyInterpreterState_Get
    interpreter.restype = ctypes.c_void_p
    state = ctypes.pythonapi.PyInterpreterState_GetDict
    # Not `py_object`: the reference that is returned is the interpreter's own.
    state.argtypes, state.restype = [ctypes.c_void_p], ctypes.c_void_p
    found: dict[object, object] = ctypes.cast(state(interpreter()), ctypes.py_object).value
    return found


def freeze() -> None:
    """Keep the collector off the objects made so far: touching them would copy pages shared by fork."""
    gc.freeze()
