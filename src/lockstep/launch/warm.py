"""A fork server that has imported what the workers have: workers of later generations need not again.

    worker ── names of modules ──> server ── fork ──> heir: imports them, looks at itself
                                   server <── "clean" ── heir, which serves from the next generation on

The first rank of a launcher tells its fork server which modules it has imported, of the standard library
and of installed packages, never of the user's own. The server forks an heir that imports them, in a
thread of low priority, while the server goes on serving. An heir that finds a thread, a process, a
connection or a device in itself that an import has left there ends, and another one does without that
import. Nothing of it can slow down or spoil the server at work.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import signal
import socket
import sys
import sysconfig
import threading
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from lockstep.checkpoint.memory import Board, Descriptors
from lockstep.launch.openmp import untied

#: Packages whose import reaches out of the process, or that keep what they find in the environment.
_NEVER = ("mpi4py", "horovod", "ray", "tensorflow", "jax", "cupy")
#: Niceness of the thread that imports, before any failure: half a rank's share where they compete.
_NICENESS = 3
#: Seconds between two looks of a worker at its own progress.
_GLANCE = 0.1
#: Seconds after the first step, after those, and so on: runs that are soon over need no heir.
_PAUSES = (2.0, 8.0, 50.0)
_PATHS = ("stdlib", "platstdlib", "purelib", "platlib")

#: Name of a module, and where it came from.
Module = tuple[str, str]


def report(channel: socket.socket, env: Mapping[str, str]) -> bool:
    """Tell the fork server, from a thread of this worker, what the worker has imported.

    After the first step, that is all that the loop needs.

    Args:
        channel: where the server listens.
        env: the worker's environment.

    Returns:
        whether it will: the first rank of a launcher tells.
    """
    memory = Descriptors.find(env)
    if memory is None or not env.get("LOCKSTEP_SLOT", "").startswith("0/"):
        return False
    slot = Board(memory.board).slot(0)
    known = set(sys.modules)

    def watch() -> None:
        while slot.step == 0:
            time.sleep(_GLANCE)
        for seconds in (0.0, *_PAUSES[1:]) if hurries(env) else _PAUSES:
            time.sleep(seconds)
            found = imported(known)
            known.update(name for name, _ in found)
            if found:
                with contextlib.suppress(OSError):  # more than a message takes, or nobody listens
                    channel.send(message(found), socket.MSG_DONTWAIT)

    threading.Thread(target=watch, name="lockstep-modules", daemon=True).start()
    return True


def message(modules: Sequence[Module]) -> bytes:
    """Return what tells of `modules`: thousands of them, where one message takes 200 kB."""
    return zlib.compress(json.dumps(modules).encode())


def parse(message: bytes) -> list[Module]:
    """Return what a worker has told; nothing where it cannot be read."""
    try:
        return [(str(name), str(origin)) for name, origin in json.loads(zlib.decompress(message))]
    except (ValueError, TypeError, zlib.error):
        return []


def hurries(env: Mapping[str, str]) -> bool:
    """Return whether workers with this environment come after a failure: there may be more of them."""
    return env.get("TORCHELASTIC_RESTART_COUNT") != "0"


def imported(known: set[str]) -> list[Module]:
    """Return the installed modules of this process that are not `known`, in the order of their imports."""
    found = []
    for name, module in list(sys.modules.items()):
        origin = _origin(module) if name not in known and name != "__main__" else None
        if origin is not None:
            found.append((name, origin))
    return found


def _origin(module: object) -> str | None:
    spec = vars(module).get("__spec__") if isinstance(module, ModuleType) else None
    origin = getattr(spec, "origin", None)
    if not isinstance(origin, str):
        return None
    if origin in ("built-in", "frozen"):
        return origin
    return origin if origin.startswith(_installed()) else None


def _installed() -> tuple[str, ...]:
    """Return the directories of what is installed, and of this package."""
    own = Path(__file__).resolve().parents[1]
    return (*(sysconfig.get_path(name) + os.sep for name in _PATHS), f"{own}{os.sep}")


def wanted(modules: Sequence[Module], skipped: set[str]) -> list[Module]:
    """Return the modules that an heir imports: none at all beside packages that reach out."""
    if any(_package(name) in _NEVER for name, _ in modules):
        return []
    return [(name, origin) for name, origin in modules if _package(name) not in skipped]


def _package(name: str) -> str:
    return name.partition(".")[0]


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a process has that a fork of it would miss, or share with it.

    Attributes:
        tasks: number of its threads.
        children: process ids of its children.
        files: what it has open besides plain files.
        pools: libraries of OpenBLAS, which starts threads and takes them through forks by itself.
    """

    tasks: int
    children: frozenset[str]
    files: frozenset[str]
    pools: frozenset[str]

    @staticmethod
    def look() -> Footprint:
        """Look at this process."""
        tasks = list(Path("/proc/self/task").iterdir())
        maps = Path("/proc/self/maps").read_text().splitlines()
        return Footprint(
            tasks=len(tasks),
            children=frozenset(pid for task in tasks for pid in _read(task / "children").split()),
            files=frozenset(filter(_is_special, map(_target, os.listdir("/proc/self/fd")))),  # noqa: PTH208
            pools=frozenset(line.split()[-1] for line in maps if "openblas" in line),
        )

    def allows(self, later: Footprint) -> bool:
        """Return whether nothing has come since that forks don't go with."""
        threads = later.tasks > self.tasks and later.pools <= self.pools
        return not threads and later.children <= self.children and later.files <= self.files


def end_children() -> None:
    """End the processes that imports have started here."""
    for pid in Footprint.look().children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


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


def import_all(modules: Sequence[Module], *, hurry: bool = False) -> str | None:
    """Import `modules`; return a package after whose import this process should not be forked, if any.

    What cannot be imported here is left to the workers.

    Args:
        modules: what to import, in this order.
        hurry: whether it may take as much of the processor as a rank.
    """
    problem: list[str] = []
    niceness = 0 if hurry else _NICENESS
    thread = threading.Thread(target=lambda: problem.extend(_import(modules, niceness)))
    with untied(), _silence():
        thread.start()
        thread.join()
    return _package(problem[0]) if problem else None


def _import(modules: Sequence[Module], niceness: int) -> list[str]:
    # The kernel has a niceness for each thread: the one that forks keeps its own.
    own = os.getpriority(os.PRIO_PROCESS, 0)
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), min(own + niceness, 19))
    before = Footprint.look()
    for name, origin in modules:
        if name in sys.modules or not _is_the_same(name, origin):
            continue
        with contextlib.suppress(Exception):
            importlib.import_module(name)
        now = Footprint.look()
        if not before.allows(now) or _uses_cuda():
            return [name]
        before = now
    return []


def _is_the_same(name: str, origin: str) -> bool:
    """Return whether `name` means here what it meant in the worker, whose search path may differ."""
    package = _package(name)
    if package != name:
        return package in sys.modules
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin == origin


def _uses_cuda() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized()


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Send nowhere what modules print: the first generation has shown it."""
    kept = [(os.dup(number), number) for number in (1, 2)]
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        for _, number in kept:
            os.dup2(null, number)
        yield
    finally:
        for copy, number in kept:
            os.dup2(copy, number)
            os.close(copy)
        os.close(null)
