"""Main function of a worker process: run the user's script, report its exception, exit."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from lockstep.errors import LockstepError, ScriptNotFoundError
from lockstep.launch.agent import processes, server_processes
from lockstep.launch.agent.forkserver import ForkRequest, Job
from lockstep.launch.plan import Launch, arguments, command, interpreter
from lockstep.launch.spec import LaunchSpec
from lockstep.launch.target import seeding
from lockstep.state.checkpoint.shared_memory import Descriptors
from lockstep.state.record import error_report, forwarding, stacks
from lockstep.world import groups
from lockstep.world.environments.torchrun import SERVER

_PACKAGE = str(Path(__file__).parents[1])
#: Seconds that a process has to exit while a logger is still closing.
_LOGGER_SECONDS = 5.0


def job(launch: Launch) -> Job:
    """Return the function that the fork server runs in each worker process of `launch`."""

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
    """Return a function that runs `job` in a worker, and a parameter server in a server's process.

    The function's argument, a `ForkRequest`, says which kind of process it is.
    """
    # The launcher of a function is the user's interpreter: do not fork servers from it.
    forks = spec.start == "fork" and spec.kind != "function"
    words = (*interpreter(), "-m", server_processes.MODULE)

    def either(request: ForkRequest) -> NoReturn:
        if SERVER not in request.env:
            job(request)
        # Slurm signals all processes of a step, but a run needs its servers to save its state: ignore these
        # signals, also after `exec`. The launcher ends servers by another signal.
        for signum in {signal.SIGTERM, signal.SIGINT, *spec.save_signals(os.environ)}:
            signal.signal(signum, signal.SIG_IGN)
        if not forks:
            execute(words, request.env)
        _set_up_process(request)
        _end(run_target("module", server_processes.MODULE, []))

    return either


def run_guarded(body: Callable[[], object], environ: Mapping[str, str], home: str | None) -> int:
    """Call `body`, which runs the user's code; return the exit code that `python` would have.

    An exception is written to the error file named in `environ`; its traceback is printed or logged.
    Functions of `atexit` find the exception, also a `SystemExit`, in `sys.last_value`, as in `python`.
    `home` is the directory of the user's script, whose lines the report names.
    """
    stacks.offer(environ)
    groups.keep_destroyed()
    try:
        body()
    except SystemExit as leave:
        sys.last_value = leave
        return exit_code(leave)
    except KeyboardInterrupt as error:
        _report(error, environ, home)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
        return 128 + signal.SIGINT
    except BaseException as error:
        sys.last_value = error
        return _report(error, environ, home)
    return 0


def exit_code(leave: SystemExit) -> int:
    """Return the exit code that a process has after the `SystemExit` `leave`.

    A message instead of a code is printed to stderr, as Python does; the code is then 1.
    """
    if leave.code is None:
        return 0
    if isinstance(leave.code, int):
        return leave.code & 0xFF
    print(leave.code, file=sys.stderr)  # noqa: T201 - what the interpreter does with sys.exit("text")
    return 1


def adopt_threads() -> None:
    """Set torch's number of threads to `OMP_NUM_THREADS`, which torch itself reads only at import."""
    value = os.environ.get("OMP_NUM_THREADS", "")
    torch = sys.modules.get("torch")
    if torch is not None and value.isdecimal() and int(value) > 0:
        torch.set_num_threads(int(value))


def _report(error: BaseException, environ: Mapping[str, str], home: str | None) -> int:
    """Write an exception to the error file, print or log its traceback, and return the exit code.

    `home` is the directory of the user's script, whose lines the report names.
    """
    error.__traceback__ = error_report.trim(error.__traceback__, _PACKAGE)
    report = error_report.describe(error, int(environ.get("RANK", "0")), home)
    file = environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        error_report.write(report, Path(file))
    # The launcher prints errors of Lockstep, and failures that follow from another rank: only log these.
    in_verdict = report.consequence or isinstance(error, LockstepError)
    if in_verdict and SERVER not in environ:
        log = Path(environ.get("LOCKSTEP_LOG_DIR", "")) / f"rank-{report.rank}.log"
        with contextlib.suppress(OSError), log.open("a") as stream:
            stream.write(report.traceback)
            return report.exit_code
    sys.excepthook(type(error), error, error.__traceback__)
    return report.exit_code


def _set_up_process(request: ForkRequest) -> None:
    """Set standard streams, environment variables and torch threads in a freshly forked process.

    `request` contains the environment variables of the process.
    """
    processes.renew_streams()
    os.environ.update(request.env)
    faulthandler.enable()
    adopt_threads()


def run_target(kind: str, name: str, args: list[str]) -> int:
    """Run a script or module as `__main__`, and return the exit code.

    `kind` is `script` or `module`, and `name` the script's path or the module's name. An exception is
    written to the error file.
    """
    if kind == "module":
        return run_guarded(lambda: run_module(name, args), os.environ, str(Path.cwd()))
    home = str(Path(name).resolve().parent)
    return run_guarded(lambda: run_script(name, args), os.environ, home)


def limit_end(code: int) -> None:
    """If a logger such as W&B's is still closing, force this process to exit with `code` after 5 s."""
    if forwarding.are_closing():
        processes.end_within(_LOGGER_SECONDS, code)


def _end(code: int) -> NoReturn:
    limit_end(code)
    processes.finalize(code)
    os._exit(code)  # not reached: for the type checker


def execute(words: tuple[str, ...], env: Mapping[str, str]) -> NoReturn:
    """Replace this process by the program `words` (`os.exec`), with `env` added to the environment."""
    memory = Descriptors.find(env)
    if memory is not None:
        memory.keep_through_exec()
    os.execvpe(words[0], words, {**os.environ, **env})  # noqa: S606 - that is what exec means


# --- the script as `__main__` --------------------------------------------------------------------


def run_script(path: str, args: list[str]) -> None:
    """Run the file `path` as `python path args` would.

    Raises:
        ScriptNotFoundError: if the file cannot be read.
    """
    _set_path(str(Path(path).resolve().parent))
    sys.argv[:] = [path, *args]
    absolute = str(Path(path).absolute())
    module = _fresh_main()
    module.__file__ = absolute
    module.__loader__ = SourceFileLoader("__main__", absolute)
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise ScriptNotFoundError(f"{path} cannot be read: {error.strerror}") from None
    code = compile(text, absolute, "exec", dont_inherit=True)
    exec(code, module.__dict__)  # noqa: S102 - running the user's code is what a launcher is for


def run_module(name: str, args: list[str]) -> None:
    """Run the module `name` as `python -m name args` would.

    Raises:
        ScriptNotFoundError: if there is no module `name`, or it has no source.
    """
    _set_path(str(Path.cwd()))
    sys.argv[:] = ["-m", *args]
    spec = _find(name)
    if spec.submodule_search_locations is not None:
        spec = _find(f"{name}.__main__")
    code = spec.loader.get_code(spec.name) if isinstance(spec.loader, SourceFileLoader) else None
    if code is None:
        raise ScriptNotFoundError(f"module {name!r} has no source that could be run")
    module = _fresh_main()
    module.__file__ = spec.origin
    module.__spec__ = spec
    module.__loader__ = spec.loader
    module.__package__ = spec.parent
    sys.argv[0] = spec.origin or name
    exec(code, module.__dict__)  # noqa: S102 - the same


def _set_path(directory: str) -> None:
    # With `python -P` or PYTHONSAFEPATH, sys.path[0] is no script directory that could be replaced.
    if sys.flags.safe_path:
        return
    sys.path[:1] = [directory]


def _fresh_main() -> ModuleType:
    """Replace `sys.modules["__main__"]` by a new module, which is returned; keep the old one alive."""
    module = ModuleType("__main__")
    module.__dict__["__builtins__"] = sys.modules["builtins"]
    module.__annotations__ = {}
    sys.modules["__lockstep_main__"] = sys.modules["__main__"]
    sys.modules["__main__"] = module
    return module


def _find(name: str) -> ModuleSpec:
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        # An import that fails inside the user's own package is the user's error, not a missing target.
        if error.name is None or not name.startswith(error.name):
            raise
        spec = None
    if spec is None:
        raise ScriptNotFoundError(
            f"there is no module {name!r}",
            hint="-m takes a module's name, without -m a file is run",
        )
    return spec
