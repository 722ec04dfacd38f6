"""Functions for Linux processes: fork, signal, wait, and reset the state that a forked child inherits.

A child made by `fork` has its parent's signal handlers, random state and streams; `make_clean` resets
them to those of a new process.
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
#: Seconds to wait for the end of a killed process, and seconds between two polls.
_END_SECONDS, _LOOK_SECONDS = 1.0, 0.002


def signal_session(pid: int, signum: int) -> None:
    """Send a signal to the child process `pid` and to all processes of its session."""
    try:
        os.killpg(pid, signum)
    except ProcessLookupError:  # the child has not called setsid yet
        os.kill(pid, signum)


def reap(pid: int, seconds: float) -> int | None:
    """Wait until a child ends; return its exit code, or minus the signal that ended it.

    Returns `None` if the child still runs after `seconds`.

    Raises:
        ChildProcessError: if the child has been waited for before.
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
    """Kill a child and all processes of its session; return the child's exit code, or minus its signal.

    Returns `None` if the child does not end within a second: it is inside a system call of a driver or file
    server, and ends when the call returns.

    Raises:
        ChildProcessError: if the child has been waited for before.
    """
    signal_session(pid, signal.SIGKILL)
    return reap(pid, _END_SECONDS)


def run(words: Sequence[str], seconds: float) -> tuple[int, str, str]:
    """Run the command line `words`; return its exit code, standard output and standard error.

    Raises:
        TimeoutError: if the program runs longer than `seconds`.
        OSError: if the program cannot be started.
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
            # With an exit code, `Popen.__exit__` does not wait for the process.
            process.returncode = end(process.pid) or -signal.SIGKILL
            raise TimeoutError from None
    return process.returncode, out, err


def die_with_parent(parent: int, signum: signal.Signals) -> None:
    """Make the kernel send `signum` to this process when its parent dies, or now if the parent is dead."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        os.kill(os.getpid(), signum)


def fork() -> int:
    """Call `os.fork` without Python 3.12's warning about threads; the caller must have no other thread."""
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def make_clean(parent: int, streams: Sequence[int]) -> None:
    """Reset the state that a freshly forked child inherits from `parent`, and start a new session.

    The child dies with `parent`; the descriptors `streams` become standard input, output and error.
    """
    die_with_parent(parent, signal.SIGKILL)
    os.setsid()
    reset_signals()
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
    for descriptor in set(streams):
        os.close(descriptor)
    # Seed from the system as a new interpreter does: otherwise all children have the same state.
    random.seed()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()  # not torch.seed(), which also seeds devices


def bind(cpus: str | None) -> None:
    """Bind this process, and those that it starts later, to a list of CPUs such as `0-3,8`.

    With `None` nothing is changed.
    """
    if cpus is not None:
        os.sched_setaffinity(0, parse_list(cpus))


def reset_signals() -> None:
    """Undo the signal handlers and the signal mask that a forked child inherits from its parent.

    SIGINT raises `KeyboardInterrupt` again; other handled signals get the system's default action.
    """
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def renew_streams() -> None:
    """Open Python's standard streams anew on descriptors 0, 1 and 2; both outputs are line-buffered."""
    out, err = _encoding(sys.stdout), _encoding(sys.stderr)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - lives as long as the process
    sys.stdout = open(1, "w", buffering=1, encoding=out, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding=err, errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]


def _encoding(stream: object) -> str | None:
    encoding = getattr(stream, "encoding", None)
    return encoding if isinstance(encoding, str) else None


def end_within(seconds: float, code: int) -> None:
    """Start a thread that ends this process with exit code `code` after `seconds`.

    The process ends even if other threads still run.
    """

    def end() -> None:
        time.sleep(seconds)
        os._exit(code & 0xFF)

    threading.Thread(target=end, name="lockstep-end", daemon=True).start()


def finalize(code: int) -> None:
    """End this forked process with exit code `code`, as a Python interpreter ends.

    Threads are joined, `atexit` functions run, and files flushed. `sys.exit` cannot be used, since it would
    unwind the outer stack frames, which are the launcher's. `os._exit` would lose data in files that the
    script left open.
    """
    # nanobind (used by extensions of torch from 2.15 on) prints a warning for each object that is left at
    # exit, such as frozen ones. Unfreeze them then: their collection takes a quarter of a second.
    if any(str(name).startswith("__nb_internals") for name in extensions_state()):
        gc.unfreeze()
    ctypes.pythonapi.Py_Exit(code & 0xFF)


def extensions_state() -> dict[object, object]:
    """Return the dictionary in which CPython keeps per-interpreter state of extension modules.

    `finalize` looks in this dictionary for a sign that a module made with nanobind is loaded.
    """
    interpreter = ctypes.pythonapi.PyInterpreterState_Get
    interpreter.restype = ctypes.c_void_p
    state = ctypes.pythonapi.PyInterpreterState_GetDict
    # Not `py_object`: the reference that is returned is the interpreter's own.
    state.argtypes, state.restype = [ctypes.c_void_p], ctypes.c_void_p
    found: dict[object, object] = ctypes.cast(state(interpreter()), ctypes.py_object).value
    return found
