"""Main function of a worker: run the target, report its exception, end the process."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

from lockstep.errors import LockstepError
from lockstep.launch.agent import processes, server_processes
from lockstep.launch.agent.forkserver import Job, Request
from lockstep.launch.plan import Launch, arguments, command, interpreter
from lockstep.launch.spec import LaunchSpec
from lockstep.launch.target import seeding, target
from lockstep.state.checkpoint.shared_memory import Descriptors
from lockstep.state.record import error_report, forwarding, stacks
from lockstep.state.record.error_report import Report
from lockstep.world import groups
from lockstep.world.environments.lockstep import SERVER

_PACKAGE = str(Path(__file__).parents[1])
#: How long a process may take to end that has left a logger behind.
_HURRY_SECONDS = 5.0


def job(launch: Launch) -> Job:
    """Return what each worker of `launch` does in its clean process."""
    if launch.spec.start == "fork":
        return lambda request: _run_forked(launch, request)
    return lambda request: execute(command(launch, request.local_rank), request.env)


def or_server(spec: LaunchSpec, job: Job) -> Job:
    """Return a job that is `job` for workers, and a server's for servers."""
    # A function's parent is the user's interpreter, which a server does not need.
    forks = spec.start == "fork" and spec.kind != "function"
    words = (*interpreter(), "-m", server_processes.MODULE)

    def either(request: Request) -> NoReturn:
        if SERVER not in request.env:
            job(request)
        _hear_the_launcher_alone(spec)
        if not forks:
            execute(words, request.env)
        _become(request)
        _end(run_target("module", server_processes.MODULE, []))

    return either


def _hear_the_launcher_alone(spec: LaunchSpec) -> None:
    """Ignore what asks a run to end: Slurm signals all processes of a step, and to save takes servers.

    That lasts through `exec`. Its launcher ends a server by another signal; if it dies, it is killed.
    """
    chosen = spec.fault_tolerance.preemption(os.environ)
    for signum in {signal.SIGTERM, signal.SIGINT, chosen or signal.SIGTERM}:
        signal.signal(signum, signal.SIG_IGN)


def run_guarded(body: Callable[[], object], environ: Mapping[str, str], home: str | None) -> int:
    """Run `body`; return the exit code an interpreter would end with.

    An exception is printed to standard error and described in the error file that `environ` names.

    Args:
        body: the user's code.
        environ: the worker's environment.
        home: directory of the user's code.
    """
    stacks.offer(environ)
    groups.keep_destroyed()
    try:
        body()
    except SystemExit as leave:
        return exit_code(leave)
    except KeyboardInterrupt as error:
        _tell(error, environ, home)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
        return 128 + signal.SIGINT
    except BaseException as error:
        return _tell(error, environ, home)
    return 0


def exit_code(leave: SystemExit) -> int:
    """Return the exit code of `SystemExit`, printing its message as the interpreter does."""
    if leave.code is None:
        return 0
    if isinstance(leave.code, int):
        return leave.code & 0xFF
    print(leave.code, file=sys.stderr)  # noqa: T201 - what the interpreter does with sys.exit("text")
    return 1


def adopt_threads() -> None:
    """Take over `OMP_NUM_THREADS`, which torch read in the parent, if it read it at all."""
    value = os.environ.get("OMP_NUM_THREADS", "")
    torch = sys.modules.get("torch")
    if torch is not None and value.isdecimal() and int(value) > 0:
        torch.set_num_threads(int(value))


def _tell(error: BaseException, environ: Mapping[str, str], home: str | None) -> int:
    error.__traceback__ = error_report.trim(error.__traceback__, _PACKAGE)
    told = error_report.describe(error, int(environ.get("RANK", "0")), home)
    file = environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        error_report.write(told, Path(file))
    in_verdict = told.consequence or isinstance(error, LockstepError)
    if in_verdict and SERVER not in environ and _note(told, environ):
        return told.exit_code
    sys.excepthook(type(error), error, error.__traceback__)
    return told.exit_code


def _note(told: Report, environ: Mapping[str, str]) -> bool:
    """Write a failure that the verdict tells in full to the log alone; return whether it is there.

    That is an error of Lockstep's own, or another rank's failure as this one has felt it.
    """
    log = Path(environ.get("LOCKSTEP_LOG_DIR", "")) / f"rank-{told.rank}.log"
    try:
        with log.open("a") as file:
            file.write(told.traceback)
    except OSError:
        return False
    return True


def _run_forked(launch: Launch, request: Request) -> NoReturn:
    _become(request)
    if launch.sources.uses_lockstep:
        seeding.seed_generators(os.environ)
    spec = launch.spec
    args = list(arguments(spec, request.local_rank))
    code = run_target(spec.kind, spec.target, args)
    _end(code)


def _become(request: Request) -> None:
    """Take on the streams, the environment and the threads of a process of one's own."""
    processes.renew_streams()
    os.environ.update(request.env)
    faulthandler.enable()
    adopt_threads()


def run_target(kind: str, name: str, args: list[str]) -> int:
    """Run a script or a module as `__main__`; return the exit code."""
    if kind == "module":
        return run_guarded(lambda: target.run_module(name, args), os.environ, str(Path.cwd()))
    home = str(Path(name).resolve().parent)
    return run_guarded(lambda: target.run_script(name, args), os.environ, home)


def hurry(code: int) -> None:
    """Let a logger that has not closed keep this process no longer, as W&B's would when Python ends."""
    if forwarding.are_closing():
        processes.end_within(_HURRY_SECONDS, code)


def _end(code: int) -> NoReturn:
    hurry(code)
    processes.finalize(code)
    os._exit(code)  # not reached: tells readers, and the type checker, that nothing follows


def execute(words: tuple[str, ...], env: Mapping[str, str]) -> NoReturn:
    """Become the program `words`, with `env` added to the environment."""
    memory = Descriptors.find(env)
    if memory is not None:
        memory.keep_through_exec()
    os.execvpe(words[0], words, {**os.environ, **env})  # noqa: S606 - that is what exec means
