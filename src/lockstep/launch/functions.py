"""`lockstep.launch(main, n=2)`: run a function on several ranks from Python.

Each rank pickles its return value to a file in a temporary directory of the launch.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import multiprocessing.process
import multiprocessing.spawn
import multiprocessing.util
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

from lockstep import unknown_variables as variables
from lockstep.errors import PREEMPTED, RunError, UsageError
from lockstep.launch import earlier_runs
from lockstep.launch.agent import processes, worker
from lockstep.launch.agent.failure import Verdict
from lockstep.launch.agent.forkserver import ForkRequest, Job
from lockstep.launch.agent.interrupts import Interrupted, listening
from lockstep.launch.agent.supervise import supervise
from lockstep.launch.flag_settings import FlagSettings
from lockstep.launch.output import say
from lockstep.launch.plan import BOOTSTRAP, interpreter, resolve_here
from lockstep.launch.run_directory import RunDirectory, private_directory
from lockstep.launch.spec import LaunchSpec, Ranks, StartMethod
from lockstep.launch.target import seeding
from lockstep.launch.target.imports import Sources
from lockstep.world import detect

#: Keys of `multiprocessing`'s preparation data for a spawned interpreter: the main module and paths.
_MAIN_MODULE = ("init_main_from_name", "init_main_from_path")
_PREPARATION = (*_MAIN_MODULE, "sys_path", "sys_argv", "orig_dir", "dir")

#: `omp_pause_hard` of the OpenMP 5.0 specification, section 3.2.44: release all resources.
_PAUSE_HARD = 2


def launch(
    main: Callable[..., Any],
    n: Ranks = 2,
    *,
    args: Sequence[Any] = (),
    replicas: int | None = None,
    start: Literal["auto", "fork", "spawn"] = "auto",
    devices: str = "auto",
    max_restarts: int | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    timeout: float | None = None,
) -> list[Any]:
    """Run `main(*args)` on `n` ranks; return a list of its return values, by rank.

    Workers are forked if this process can be forked, so that `main` may be defined in a notebook.
    Otherwise they are spawned, and a message gives the reason.

    Args:
        main: the function that every rank runs; its return value must be picklable.
        n: number of ranks, or `cpu`, `gpu` or `auto`.
        args: arguments of `main`, the same on every rank.
        replicas: number of logical data-parallel workers, which the ranks share out among themselves; by
            default the argument of `lockstep.Run`, or the number of ranks.
        start: start method: `fork`, `spawn`, or `auto`, which forks if possible.
        devices: devices of the ranks: `auto`, `cpu`, `gpu`, or a list with one GPU for each rank.
        max_restarts: maximum number of restarts in a row without progress; by default 3, and 0 for
            exceptions that `main` raises and for a `main` without `lockstep.Run`.
        run_dir: directory of logs and records; by default a new one in `runs/`.
        timeout: seconds after which all ranks are ended; `None` for no limit.

    Raises:
        RunError: if a rank fails, or at the timeout; its message names the rank that failed first.
        UsageError: if an argument is invalid, or the caller is itself a worker.
    """
    if detect().environment == "lockstep":
        raise UsageError(
            "lockstep.launch was called in a worker, which would start workers of its own",
            hint="call it under `if __name__ == '__main__':`, or start the script with python",
        )
    spec = LaunchSpec(
        target=main.__qualname__ if hasattr(main, "__qualname__") else repr(main),
        kind="function",
        n=n,
        start=_start_method(start),
        settings=FlagSettings(
            devices=None if devices == "auto" else devices,
            replicas=replicas,
            run_dir=None if run_dir is None else Path(run_dir),
            max_restarts=max_restarts,
        ),
    )
    with private_directory() as private:
        job = _forked(main, args) if spec.start == "fork" else _spawned(main, args, private)
        ranks = range(_run(spec, job, private, _name(main), timeout))
        files = [_value_file(private, rank) for rank in ranks]
        return [pickle.loads(file.read_bytes()) for file in files]  # noqa: S301 - of our own workers


def run_spawned(payload: Path) -> int:
    """Run the pickled function in the file `payload`, in a spawned interpreter; return the exit code."""
    work = pickle.loads(payload.read_bytes())  # noqa: S301 - written by our parent, readable by this user alone

    def body() -> None:
        preparation, function = work
        multiprocessing.spawn.prepare(preparation)
        main, args = pickle.loads(function)  # noqa: S301 - as above
        _call(main, args, os.environ)

    return worker.run_guarded(body, os.environ, None)


def _run(spec: LaunchSpec, job: Job, private: Path, name: str, timeout: float | None) -> int:
    """Run a launch until it ends; return its number of ranks.

    `job` runs in each worker process, `private` is a temporary directory, `name` the run's name in `runs/`.
    """
    for line in variables.warnings(os.environ):
        say(line)
    spec = earlier_runs.resumed(spec, name)
    resolved = resolve_here(spec, Sources())
    place = RunDirectory(resolved, name)
    deadline = None if timeout is None else time.monotonic() + timeout
    try:
        with listening(spec.save_signals(os.environ)) as interrupts, place:
            verdict = supervise(resolved, job, place, private, interrupts, deadline)
    except Interrupted as stop:
        # All workers have ended: send the signal to this process again, with its default handler.
        os.kill(os.getpid(), stop.signum)
        raise KeyboardInterrupt from None
    except TimeoutError:
        raise RunError(
            f"{name} on {resolved.ranks} rank(s) did not end within {timeout} s{place.where}",
            hint="a rank may wait for a collective that another never enters",
        ) from None
    else:
        if verdict is not None and verdict.exit_code == PREEMPTED:
            say(verdict.text)
            raise SystemExit(PREEMPTED)
        if verdict is not None:
            raise failed(verdict)
    return resolved.ranks


def failed(verdict: Verdict) -> RunError:
    """Return the error for a failed launch, with the traceback of the failed rank as a note."""
    error = RunError(verdict.text)
    if verdict.traceback:
        error.add_note(f"\non {verdict.name}:\n{verdict.traceback}")
    return error


def _start_method(start: str) -> StartMethod:
    if start not in ("auto", "fork", "spawn"):
        raise UsageError(f"start is {start!r}; expected auto, fork or spawn")
    if start == "spawn":
        return "spawn"
    reason = _reason_against_fork()
    if reason is None:
        return "fork"
    if start == "fork":
        raise UsageError(f"workers cannot be forked: {reason}", hint="start='spawn'")
    say(f"lockstep: workers are spawned, not forked: {reason}")
    return "spawn"


def _reason_against_fork() -> str | None:
    """Return the reason why workers cannot be forked from this process; `None` if they can.

    A forked child has a single thread, and copies of every lock and thread pool. OpenBLAS handles this
    itself. Reasons against a fork are:

    - CUDA: a context does not survive a fork.
    - a process group: its threads and connections belong to the parent.
    - libgomp's thread pool, if `omp_pause_resource_all` cannot end it: the child would wait forever for
      threads that exist only in the parent.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    from lockstep.world import accelerator

    if accelerator.is_initialized():
        return f"{accelerator.kind()} is initialised in this process"
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return "a process group of torch.distributed exists in this process"
    mapped = Path("/proc/self/maps").read_text().splitlines()
    for library in {line.split(maxsplit=5)[-1] for line in mapped if "/libgomp" in line}:
        try:
            status = ctypes.CDLL(library).omp_pause_resource_all(_PAUSE_HARD)
        except (OSError, AttributeError):
            return f"{Path(library).name} may have threads that it cannot be told to end"
        if status != 0:
            return f"{Path(library).name} would not end its threads"
    return None


def _name(main: Callable[..., Any]) -> str:
    name = getattr(main, "__name__", "function")
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    in_script = getattr(main, "__module__", None) == "__main__" and file
    return Path(str(file)).stem if in_script and name == "main" else name.strip("<>")


def _forked(main: Callable[..., Any], args: Sequence[Any]) -> Job:
    def job(request: ForkRequest) -> NoReturn:
        _drop_parent_state()
        os.environ.update(request.env)
        faulthandler.enable(sys.stderr)
        worker.adopt_threads()
        _end(worker.run_guarded(lambda: _call(main, args, os.environ), os.environ, None))

    return job


def _spawned(main: Callable[..., Any], args: Sequence[Any], private: Path) -> Job:
    try:
        function = pickle.dumps((main, tuple(args)))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UsageError(
            f"{main!r} and its arguments cannot be sent to a fresh interpreter: {error}",
            hint="define the function at the top level of a module",
        ) from None
    payload = private / "function.pickle"
    payload.write_bytes(pickle.dumps((_preparation(main), function)))
    words = (*interpreter(), "-m", BOOTSTRAP, "function", str(payload))
    return lambda request: worker.execute(words, request.env)


def _preparation(main: Callable[..., Any]) -> dict[str, Any]:
    data = multiprocessing.spawn.get_preparation_data("lockstep")
    known = {name: data[name] for name in _PREPARATION if name in data}
    if main.__module__ == "__main__" and not known.keys() & set(_MAIN_MODULE):
        raise UsageError(
            f"{main.__qualname__} is defined where no fresh interpreter can import it from",
            hint="put it into a file and import it, or launch before anything that rules out forks",
        )
    return known


def _call(main: Callable[..., Any], args: Sequence[Any], environ: Mapping[str, str]) -> None:
    if seeding.names_run(main):
        seeding.seed_generators(environ)
    value = main(*args)
    try:
        data = pickle.dumps(value)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise RunError(
            f"the value that {main.__qualname__} returned cannot be pickled: {error}",
            hint="return numbers, strings, tensors, or containers of them",
        ) from None
    private = Path(environ["TORCHELASTIC_ERROR_FILE"]).parent
    _value_file(private, int(environ["RANK"])).write_bytes(data)


def _value_file(private: Path, rank: int) -> Path:
    return private / f"rank-{rank}.value"


def _drop_parent_state() -> None:
    """Reset Python state inherited from the forked parent, as `multiprocessing` does in its children."""
    processes.renew_streams()
    sys.excepthook = sys.__excepthook__
    atexit._clear()
    atexit.register(multiprocessing.util._exit_function)  # type: ignore[attr-defined]
    multiprocessing.process._children = set()  # type: ignore[attr-defined]
    multiprocessing.util._finalizer_registry.clear()  # type: ignore[attr-defined]
    multiprocessing.util._run_after_forkers()  # type: ignore[attr-defined]


def _end(code: int) -> NoReturn:
    """Exit this forked process with exit code `code`, after joining threads and running `atexit`.

    The modules are not torn down, since they are copies of the parent's.
    """
    worker.limit_end(code)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
