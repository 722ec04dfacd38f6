"""Import packages once, before workers are forked, so that all workers start with the packages loaded.

The launcher imports torch and modules of Lockstep. The fork server imports the packages at the top of
the script (`imports.py`). An import may make the server unsafe to fork: it starts a thread or child
process, opens a connection, makes a temporary directory, uses a device, prints, draws random numbers, or
reads an environment variable that differs between ranks. Then the server ends, and a new one skips that
package.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import os
import pickle
import signal
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from lockstep.launch.devices.openmp import loaded_unbound
from lockstep.launch.spec import LaunchSpec
from lockstep.launch.target.imports import Import, Sources
from lockstep.registry import STRATEGIES
from lockstep.world.device_types import HIDDEN
from lockstep.world.network import INTERFACES

#: Modules of torch that most workers import, and that start no threads and do not initialize CUDA.
MODULES = ("torch.distributed", "torch.nn.parallel", "torch.utils.data")
#: Modules that `lockstep.Run` imports, and the default exchange of ranks on one host.
_RUN = ("lockstep.run", "lockstep.engine.exchange.shared_memory")
#: Module that the first optimizer or DDP wrapper of a process imports, which takes a second.
_DYNAMO = "torch._dynamo"
#: Packages that are never imported before a fork: they connect to other processes or store variables.
_NEVER = ("mpi4py", "horovod", "ray", "tensorflow", "jax", "cupy")
#: Beginnings of the names of environment variables that the launcher sets for each worker.
_OF_WORKERS = (
    *("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "LOCKSTEP_"),
    *HIDDEN,
    *INTERFACES,
)


def likely(spec: LaunchSpec, sources: Sources, env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of modules that the workers will probably import, besides `MODULES`.

    They follow from the flags in `spec`, from facts about the script (`sources`), and from the environment
    variables `env`.
    """
    strategy = STRATEGIES.find(spec.settings.value("strategy", env) or "auto")
    dynamo = () if sources.sets_compiler else (_DYNAMO,)
    if strategy.slow_import and isinstance(strategy.wrap, str):
        return (*_RUN, *dynamo, *([strategy.wrap.partition(":")[0]] if dynamo else []))
    if sources.uses_lockstep:
        return (*_RUN, *dynamo)
    return dynamo if "optim" in sources.names else ()


def preload(more: Sequence[str] = ()) -> str | None:
    """Import torch, `MODULES` and `more`; return the reason why forks are unsafe now, or `None`."""
    if threading.active_count() > 1:
        return "Python threads run in the launcher already"
    with gc_off():
        with loaded_unbound():
            importlib.import_module("torch")
        # OpenBLAS starts threads at its import, and handles forks itself: these threads do not count.
        threads = _task_count()
        for name in MODULES:
            if importlib.util.find_spec(name) is not None:
                importlib.import_module(name)
        with contextlib.suppress(Exception):  # a worker that needs it raises the same error
            for name in more:
                importlib.import_module(name)
    if _task_count() > threads:
        return f"the import of {', '.join((*MODULES, *more))} started threads in the launcher"
    return None


@dataclass(frozen=True, slots=True)
class Footprint:
    """State of a process that makes a fork unsafe if an import changes it.

    Attributes:
        tasks: number of threads.
        children: process ids of child processes.
        files: open sockets, devices and other descriptors that are not plain files.
        pools: loaded OpenBLAS libraries, whose threads survive forks.
        unforkable: loaded packages that do not survive a fork, and `cuda` if a device is in use.
        handlers: signal handlers, which are reset in workers.
        finalizers: number of `weakref.finalize` objects, which every worker would run at exit.
        generators: states of random generators, which ranks seed after the fork.
    """

    tasks: int
    children: frozenset[str]
    files: frozenset[str]
    pools: frozenset[str]
    unforkable: frozenset[str]
    handlers: tuple[object, ...]
    finalizers: int
    generators: Mapping[str, object]

    @staticmethod
    def look() -> Footprint:
        """Return the current threads, child processes, open files and further state of this process."""
        maps = Path("/proc/self/maps").read_text().splitlines()
        children = (_read(file) for file in Path("/proc/self/task").glob("*/children"))
        return Footprint(
            tasks=_task_count(),
            children=frozenset(pid for text in children for pid in text.split()),
            files=frozenset(filter(_is_special, map(_target, os.listdir("/proc/self/fd")))),  # noqa: PTH208
            pools=frozenset(line.split()[-1] for line in maps if "openblas" in line),
            unforkable=frozenset(name for name in _NEVER if name in sys.modules) | _devices(),
            handlers=tuple(signal.getsignal(number) for number in signal.valid_signals()),
            finalizers=len(weakref.finalize._registry),  # type: ignore[attr-defined]
            generators=_generators(),
        )

    def allows(self, later: Footprint) -> bool:
        """Return whether a fork that was safe in this state is still safe in the state `later`."""
        threads = later.tasks > self.tasks and later.pools <= self.pools
        return (
            not threads
            and later.children <= self.children
            and later.files <= self.files
            and later.unforkable <= self.unforkable
            and later.handlers == self.handlers
            and later.finalizers <= self.finalizers
            and self.generators.items() <= later.generators.items()
        )


def import_shared(
    imports: Sequence[Import], threads: str | None, skipped: Collection[str]
) -> str | None:
    """Import the packages at the top of a script; return a package that made forks unsafe, or `None`.

    Imports that fail are left to the workers. `threads` is the workers' `OMP_NUM_THREADS`, which some
    packages read at import; `skipped` packages are not imported.
    """
    without = {*skipped, *_NEVER}
    with (
        gc_off(),
        loaded_unbound(threads),
        _output_captured() as has_printed,
        _accesses_recorded() as accesses,
    ):
        before = Footprint.look()
        for one in imports:
            if one.package in without or not _is_the_same(one.package, one.origin):
                continue
            with contextlib.suppress(Exception, SystemExit):
                importlib.import_module(one.module)
                if one.names:  # some names are submodules, which some packages import lazily
                    __import__(one.module, fromlist=one.names)
                for name in one.names:
                    getattr(sys.modules[one.module], name, None)
            now = Footprint.look()
            if not before.allows(now) or has_printed() or accesses:
                for pid in now.children - before.children:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
                for directory in filter(os.path.isabs, accesses):
                    with contextlib.suppress(OSError):  # not empty: keep the files in it
                        Path(directory).rmdir()
                return one.package
            before = now
    return None


@contextlib.contextmanager
def gc_off() -> Iterator[None]:
    """Context manager: disable the garbage collector, which would slow down large imports."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _is_the_same(package: str, origin: str) -> bool:
    """Whether this process would import `package` from the file `origin`, as the script does."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin == origin


@contextlib.contextmanager
def _output_captured() -> Iterator[Callable[[], bool]]:
    """Context manager: redirect standard output and standard error to a temporary file.

    It yields a function that returns whether anything was printed.
    """
    kept = [(os.dup(number), number) for number in (1, 2)]
    with tempfile.TemporaryFile() as file:

        def has_printed() -> bool:
            _flush()
            return os.lseek(file.fileno(), 0, os.SEEK_CUR) > 0

        try:
            for _, number in kept:
                os.dup2(file.fileno(), number)
            yield has_printed
        finally:
            _flush()
            for copy, number in kept:
                os.dup2(copy, number)
                os.close(copy)


@contextlib.contextmanager
def _accesses_recorded() -> Iterator[list[str]]:
    """Context manager: record actions of an import that would be wrong before a fork.

    It yields a list. The list receives the names of worker-specific environment variables that are read,
    and the paths of temporary directories that are made.
    """
    accesses: list[str] = []
    kind, make = type(os.environ), tempfile.mkdtemp

    class Recording(kind):  # type: ignore[misc, valid-type]
        def __getitem__(self, name: str) -> str:
            if name.startswith(_OF_WORKERS):
                accesses.append(name)
            return cast("str", super().__getitem__(name))

        def __iter__(self) -> Iterator[str]:
            accesses.append("all")
            return cast("Iterator[str]", super().__iter__())

    def mkdtemp(*args: Any, **kwargs: Any) -> Any:
        directory = make(*args, **kwargs)
        accesses.append(directory)
        return directory

    os.environ.__class__, tempfile.mkdtemp = Recording, mkdtemp
    try:
        yield accesses
    finally:
        os.environ.__class__, tempfile.mkdtemp = kind, make


def _task_count() -> int:
    return len(os.listdir("/proc/self/task"))  # noqa: PTH208


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _target(descriptor: str) -> str:
    try:
        return str(Path(f"/proc/self/fd/{descriptor}").readlink())
    except OSError:
        return ""


def _is_special(target: str) -> bool:
    harmless = ("/dev/null", "/dev/urandom", "/dev/random", "/dev/zero")
    devices = target.startswith("/dev/") and target not in harmless
    return devices or target.startswith(("socket:", "anon_inode:"))


def _generators() -> dict[str, object]:
    # Without Python's own generator: many imports draw from it, such as scikit-learn's data sets.
    states: dict[str, object] = {}
    if (numpy := sys.modules.get("numpy")) is not None:
        states["numpy"] = pickle.dumps(numpy.random.get_state())
    if (torch := sys.modules.get("torch")) is not None:
        states["torch"] = bytes(torch.get_rng_state().tolist())
    return states


def _devices() -> frozenset[str]:
    if "torch" not in sys.modules:
        return frozenset()
    from lockstep.world import accelerator

    return frozenset({str(accelerator.kind())} if accelerator.is_initialized() else ())
