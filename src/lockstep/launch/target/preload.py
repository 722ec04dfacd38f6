"""Imports that the launcher and the fork server do once, before workers are forked.

The launcher imports torch, and what Lockstep itself needs. The fork server imports what the script has
at its top (`imports.py`): it is a process that can be thrown away. If an import leaves a thread, a child, a
connection, a temporary directory or a device in it, prints something, draws random numbers or reads a
variable that differs between ranks, it ends, and another one leaves that package out.
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

#: Modules that workers are likely to import and that start neither threads nor CUDA.
MODULES = ("torch.distributed", "torch.nn.parallel", "torch.utils.data")
#: What `lockstep.Run` brings in, and the exchange that ranks of one host choose by themselves.
_RUN = ("lockstep.run", "lockstep.engine.exchange.shared_memory")
#: A second of imports, which the first optimizer of a process brings in, and the first DDP wrapper.
_DYNAMO = "torch._dynamo"
#: Packages whose import reaches out of the process, or that keep what they find in the environment.
_NEVER = ("mpi4py", "horovod", "ray", "tensorflow", "jax", "cupy")
#: Variables that workers get from the launcher, which has none or those of an outer launch.
_OF_WORKERS = (
    *("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "LOCKSTEP_"),
    *HIDDEN,
    *INTERFACES,
)


def likely(spec: LaunchSpec, sources: Sources, env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the modules that the workers of `spec` will import besides, from its sources and flags."""
    strategy = STRATEGIES.find(spec.settings.value("strategy", env) or "auto")
    dynamo = () if sources.sets_compiler else (_DYNAMO,)
    if strategy.slow_import and isinstance(strategy.wrap, str):
        return (*_RUN, *dynamo, *([strategy.wrap.partition(":")[0]] if dynamo else []))
    if sources.uses_lockstep:
        return (*_RUN, *dynamo)
    return dynamo if "optim" in sources.names else ()


def preload(more: Sequence[str] = ()) -> str | None:
    """Import torch, `MODULES` and `more`; return why forks are not safe afterwards, if they are not."""
    if threading.active_count() > 1:
        return "Python threads run in the launcher already"
    with gc_off():
        with loaded_unbound():
            importlib.import_module("torch")
        # OpenBLAS starts its threads when it is loaded, and takes them through forks by itself.
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
    """State of a process that a fork of it would miss, or share with it.

    Attributes:
        tasks: number of its threads.
        children: process ids of its children.
        files: what it has open besides plain files.
        pools: libraries of OpenBLAS, which starts threads and takes them through forks by itself.
        unforkable: packages that are never shared, and `cuda` where a device is in use.
        handlers: of signals; a worker starts without those of its parent.
        finalizers: number of `weakref.finalize`: the first worker to end would do what they do for all.
        generators: states of the generators that are loaded: each rank draws after it has seeded its own.
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
        """Return the state of this process."""
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
        """Return whether this process can still be forked: nothing has come that forks don't go with."""
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
    """Import what a script has at its top; return a package after which this process is not to be forked.

    What cannot be imported here is left to the workers, and so is what prints: it prints there. `threads`
    is the workers' `OMP_NUM_THREADS`, which some packages read when they are imported.
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
                if one.names:  # some are modules, and some packages import them only now
                    __import__(one.module, fromlist=one.names)
                for name in one.names:
                    getattr(sys.modules[one.module], name, None)
            now = Footprint.look()
            if not before.allows(now) or has_printed() or accesses:
                for pid in now.children - before.children:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
                for directory in filter(os.path.isabs, accesses):
                    with contextlib.suppress(OSError):  # what lies in it may be the user's
                        Path(directory).rmdir()
                return one.package
            before = now
    return None


@contextlib.contextmanager
def gc_off() -> Iterator[None]:
    """Keep the collector from walking the growing heap again and again: it would find nothing to free."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _is_the_same(package: str, origin: str) -> bool:
    """Whether `package` comes from the file that the script would import, whose search path may differ."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin == origin


@contextlib.contextmanager
def _output_captured() -> Iterator[Callable[[], bool]]:
    """Redirect standard output and error to a file; yield a function that returns whether it has any."""
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
    """Yield a list of the variables of workers that are read, and of the temporary directories made."""
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
    # Not Python's own: imports that scripts of all kinds have (scikit-learn's data sets) draw from it.
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
