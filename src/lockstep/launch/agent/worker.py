"""Main function of a worker: run the target, report its exception, end the process."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

from lockstep.errors import LockstepError
from lockstep.launch.agent import processes, server_processes
from lockstep.launch.agent.forkserver import ForkRequest, Job
from lockstep.launch.plan import Launch, arguments, command, interpreter
from lockstep.launch.spec import LaunchSpec
from lockstep.launch.target import seeding, target
from lockstep.state.checkpoint.shared_memory import Descriptors
from lockstep.state.record import error_report, forwarding, stacks
from lockstep.world import groups
from lockstep.world.environments.lockstep import SERVER

_PACKAGE = str(Path(__file__).parents[1])
#: How long a process may take to end that has left a logger behind.
_LOGGER_SECONDS = 5.0


def job(launch: Launch) -> Job:
    """Return the function that runs in each worker of `launch`, in its clean process."""

    def run(request: ForkRequest) -> NoReturn:
        if launch.spec.start != "fork":
            execute(command(launch, request.local_rank), request.env)
        _set_up_process(request)
        if launch.sources.uses_lockstep:
            seeding.seed_generators(os.environ)
        spec = launch.spec
        _end(run_target(spec.kind, spec.target, list(arguments(spec, request.local_rank))))

    return run


def or_server(spec: LaunchSpec, job: Job) -> Job:
    """Return a job that is `job` for workers, and a server's for servers."""
    # A function's parent is the user's interpreter, which a server does not need.
    forks = spec.start == "fork" and spec.kind != "function"
    words = (*interpreter(), "-m", server_processes.MODULE)

    def either(request: ForkRequest) -> NoReturn:
        if SERVER not in request.env:
            job(request)
        # Slurm signals all processes of a step, and a run needs its servers to save. The launcher ends a
        # server by another signal. That lasts through `exec`; where the launcher dies, it is killed.
        for signum in {signal.SIGTERM, signal.SIGINT, *spec.save_signals(os.environ)}:
            signal.signal(signum, signal.SIG_IGN)
        if not forks:
            execute(words, request.env)
        _set_up_process(request)
        _end(run_target("module", server_processes.MODULE, []))

    return either


def run_guarded(body: Callable[[], object], environ: Mapping[str, str], home: str | None) -> int:
    """Run `body`, the user's code in directory `home`; return the exit code an interpreter would end with.

    An exception is printed to standard error and described in the error file that `environ` names.
    """
    stacks.offer(environ)
    groups.keep_destroyed()
    try:
        body()
    except SystemExit as leave:
        return exit_code(leave)
    except KeyboardInterrupt as error:
        _report(error, environ, home)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
        return 128 + signal.SIGINT
    except BaseException as error:
        return _report(error, environ, home)
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
    """Set torch's threads to `OMP_NUM_THREADS`: torch has read its value in the parent, if any."""
    value = os.environ.get("OMP_NUM_THREADS", "")
    torch = sys.modules.get("torch")
    if torch is not None and value.isdecimal() and int(value) > 0:
        torch.set_num_threads(int(value))


def _report(error: BaseException, environ: Mapping[str, str], home: str | None) -> int:
    """Describe an exception in the error file, print its traceback and return the exit code."""
    error.__traceback__ = error_report.trim(error.__traceback__, _PACKAGE)
    report = error_report.describe(error, int(environ.get("RANK", "0")), home)
    file = environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        error_report.write(report, Path(file))
    # The verdict has all of an error of Lockstep's own, and of another rank's failure: the log is enough.
    in_verdict = report.consequence or isinstance(error, LockstepError)
    if in_verdict and SERVER not in environ:
        log = Path(environ.get("LOCKSTEP_LOG_DIR", "")) / f"rank-{report.rank}.log"
        with contextlib.suppress(OSError), log.open("a") as stream:
            stream.write(report.traceback)
            return report.exit_code
    sys.excepthook(type(error), error, error.__traceback__)
    return report.exit_code


def _set_up_process(request: ForkRequest) -> None:
    """Renew the streams, the environment and the threads after the fork."""
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


def limit_end(code: int) -> None:
    """End this process in seconds if a logger is still closing, as W&B's may be when Python ends."""
    if forwarding.are_closing():
        processes.end_within(_LOGGER_SECONDS, code)


def _end(code: int) -> NoReturn:
    limit_end(code)
    processes.finalize(code)
    os._exit(code)  # not reached: tells readers, and the type checker, that nothing follows


def execute(words: tuple[str, ...], env: Mapping[str, str]) -> NoReturn:
    """Replace this process by the program `words`, with `env` added to the environment."""
    memory = Descriptors.find(env)
    if memory is not None:
        memory.keep_through_exec()
    os.execvpe(words[0], words, {**os.environ, **env})  # noqa: S606 - that is what exec means
