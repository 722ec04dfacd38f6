"""A process that has imported torch, from which commands are forked: most of a short launch is that import.

A forked command does what `python -m lockstep` or `python SCRIPT` would: the same modules, words, streams,
directory, environment and session. Tests of how a command itself comes to life start an interpreter for it.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import io
import json
import os
import runpy
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, ClassVar, NoReturn

from tests import namespaces

ROOT = Path(__file__).parents[1]
#: What launchers and their ranks import sooner or later.
_MODULES = (
    "torch._dynamo",
    "torch.distributed",
    "torch.nn.parallel",
    "torch.utils.data",
    "lockstep.cli",
    "lockstep.launch.api",
    "lockstep.engine.strategies.sharded.model",
    "lockstep.run",
)
_MOST = 1 << 20


class Template:
    """The process, and its place among all that a session has.

    Args:
        more: modules that it imports besides, those of them that are installed.
        environ: variables of its own, besides this process's.
    """

    pids: ClassVar[set[int]] = set()

    def __init__(self, *more: str, environ: Mapping[str, str] | None = None) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket = ours
        words = (sys.executable, "-m", "tests.template", str(theirs.fileno()), *more)
        self._process = subprocess.Popen(
            words, cwd=ROOT, pass_fds=[theirs.fileno()], env={**os.environ, **(environ or {})}
        )
        theirs.close()
        self.pids.add(self._process.pid)

    def close(self) -> None:
        """End it."""
        self.socket.close()
        assert self._process.wait(timeout=60) == 0, "the template has failed"
        self.pids.discard(self._process.pid)


class Forked(subprocess.Popen[str]):
    """A command that is forked from a template.

    Popen's own code does all but two things: making the process, and hearing of its end.

    Args:
        template: is its parent, too.
        words: after `python -m MODULE`, or after `python` where there is no module.
        cwd: its directory.
        env: its environment.
        stdout: where its output goes.
        stderr: and its errors.
        module: what it runs; where it is empty, the first word is a script.
        host: where it runs, as `namespaces.enter` takes it, if not on this host.
    """

    def __init__(
        self,
        template: Template,
        words: Sequence[str],
        cwd: Path,
        env: Mapping[str, str],
        *,
        stdout: int | IO[bytes] = subprocess.PIPE,
        stderr: int | IO[bytes] = subprocess.PIPE,
        module: str = "lockstep",
        host: Sequence[str] = (),
    ) -> None:
        self._template, self._ended, self._module, self._host = template, -1, module, host
        super().__init__(
            list(words),
            cwd=cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            text=True,
        )

    def _execute_child(self, *given: Any) -> None:
        words, _, _, _, _, cwd, env, *_ = given
        stdin, _, _, stdout, _, stderr = given[10:16]
        self._ended, ended = os.pipe()
        told = json.dumps([self._host, self._module, words, str(cwd), dict(env)]).encode()
        socket.send_fds(self._template.socket, [told], [stdin, stdout, stderr, ended])
        pipes = [stdout] * (self.stdout is not None) + [stderr] * (self.stderr is not None)
        for descriptor in (stdin, *pipes, ended):
            os.close(descriptor)
        self.pid = int(self._template.socket.recv(32))
        self._child_created = True
        self._closed_child_pipe_fds = True

    def _try_wait(self, flags: int) -> tuple[int, int]:
        if flags & os.WNOHANG and not select.select([self._ended], [], [], 0)[0]:
            return 0, 0
        status = int(os.read(self._ended, 32))
        os.close(self._ended)
        return self.pid, status

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None:
            pid, status = self._try_wait(os.WNOHANG)
            if pid:
                self._handle_exitstatus(status)  # type: ignore[attr-defined]
        return self.returncode


# --- in the template ----------------------------------------------------------------------------------


def _serve(asked: socket.socket) -> None:
    running: dict[int, tuple[int, int]] = {}  # by pidfd: pid, and who is told of its end
    poll = select.poll()
    poll.register(asked, select.POLLIN)
    while True:
        for ready, _ in poll.poll():
            if ready != asked.fileno():
                poll.unregister(ready)
                _bury(ready, *running.pop(ready))
                continue
            told, given, _, _ = socket.recv_fds(asked, _MOST, 4)
            if not told:
                return
            *streams, ended = given
            pid = os.fork()
            if pid == 0:
                asked.close()
                os.setsid()
                _become(streams, *json.loads(told))
            while os.getsid(pid) != pid:  # whoever has the number may signal the group
                time.sleep(0.0005)
            asked.send(str(pid).encode())
            for descriptor in streams:
                os.close(descriptor)
            watched = os.pidfd_open(pid)
            running[watched] = pid, ended
            poll.register(watched, select.POLLIN)


def _bury(watched: int, pid: int, ended: int) -> None:
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(BrokenPipeError):
        os.write(ended, str(status).encode())
    os.close(ended)
    os.close(watched)


class _Launch(subprocess.Popen[bytes]):
    """A launch of a forked `lockstep verify` or `bench`, which is forked once more."""

    def _execute_child(self, *given: Any) -> None:
        words, _, _, _, _, _, env, *_ = given
        stdin, _, _, stdout, _, stderr = given[10:16]
        self.pid = os.fork()
        if self.pid == 0:
            atexit._clear()  # what the parent does at its end
            _become([stdin, stdout, stderr], (), "lockstep", words[3:], str(Path.cwd()), env)
        self._child_created = True
        self._close_pipe_fds(*given[10:16])  # type: ignore[attr-defined]


def _become(
    streams: list[int],
    host: Sequence[str],
    module: str,
    words: list[str],
    cwd: str,
    env: Mapping[str, str],
) -> NoReturn:
    from lockstep.launch import command
    from lockstep.launch.agent import processes, worker

    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
    os.closerange(3, 1 << 10)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    processes.reset_signals()
    tempfile.tempdir = None  # the directory of the template's own environment
    processes.renew_streams()
    if threads := env.get("OMP_NUM_THREADS"):  # an interpreter of its own would have read it
        sys.modules["torch"].set_num_threads(int(threads))
    places = filter(None, env.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = [cwd, *places, *(place for place in sys.path[1:] if place != str(ROOT))]
    sys.argv[:] = ["", *words]
    command.subprocess = types.SimpleNamespace(Popen=_Launch, DEVNULL=subprocess.DEVNULL)  # type: ignore[assignment]
    processes.finalize = _end
    code = 0
    try:
        if host:
            namespaces.enter(*host)
        if module:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        else:
            worker.run_script(words[0], words[1:])
    except SystemExit as leave:
        code = leave.code if isinstance(leave.code, int) else 0 if leave.code is None else 1
    except BaseException as error:
        sys.last_value = error  # as the interpreter does
        sys.excepthook(*sys.exc_info())
        code = 1
    _end(code)


def _end(code: int) -> NoReturn:
    """End as an interpreter ends, but for the teardown of modules, which takes longer than a short launch.

    It stands for `processes.finalize`, which `test_interpreter_ends_properly` shows.
    """
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        for found in gc.get_objects():  # without what the template has frozen
            if issubclass(type(found), io.IOBase) and not found.closed:
                found.flush()
    finally:
        os._exit(code & 0xFF)


def main() -> None:
    for name in _MODULES:
        importlib.import_module(name)
    for name in sys.argv[2:]:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]
        finalizer.atexit = False  # torch's take apart its table of operators
    gc.collect()
    gc.freeze()
    _serve(socket.socket(fileno=int(sys.argv[1])))
    os._exit(0)


if __name__ == "__main__":
    main()
