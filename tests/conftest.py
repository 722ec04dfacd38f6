"""Fixtures of all tests: a guard against leaks, and the command `lockstep` under a hard timeout."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import hypothesis
import pytest

from tests.template import Forked, Template

#: The command, as a program of the interpreter.
LOCKSTEP = ("-m", "lockstep")

# The same examples in every run; a search for new ones is `--hypothesis-profile=default`.
hypothesis.settings.register_profile("deterministic", derandomize=True, deadline=None)
hypothesis.settings.load_profile("deterministic")

#: torch's stores ask the resolver for the name of every peer. One that drops a packet now and then
#: would keep a test for as long as glibc waits: five seconds, twice.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# A shell lets what it starts in the background ignore these, and so would every launcher of a test.
for _signum, _default in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(_signum) is signal.SIG_IGN:
        signal.signal(_signum, _default)

#: Seconds that processes and threads of a test have to end by themselves.
_GRACE = 2.0
#: Processes of the standard library that live as long as the interpreter that first needs them.
_PERMANENT = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
#: Variables that are nobody's leak: pytest sets one in every test, torch one when dynamo is imported.
_OTHERS = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let the first cases of a test that is `wide(beyond=N)` be part of `make test`."""
    seen: Counter[str] = Counter()
    for item in items:
        mark = item.get_closest_marker("wide")
        test = item.nodeid.partition("[")[0]
        if mark is not None and seen[test] < mark.kwargs.get("beyond", 0):
            item.own_markers.remove(mark)
        seen[test] += 1


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> None:
    """Give each test the same random numbers in every order and selection of tests."""
    seed = zlib.crc32(request.node.nodeid.encode())
    random.seed(seed)
    for module, seeds in (("torch", "manual_seed"), ("numpy.random", "seed")):
        if module in sys.modules:
            getattr(sys.modules[module], seeds)(seed)


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Fail a test that leaves a process, an environment variable or a non-daemon thread behind."""
    children, environ, threads = _children(), _environ(), set(threading.enumerate())
    yield
    _wait_until(lambda: not _leaks(children, threads))
    leaks = _leaks(children, threads)
    after = _environ()
    leaks += [
        f"variable {name}" for name in {*environ, *after} if environ.get(name) != after.get(name)
    ]
    if leaks:
        pytest.fail(f"the test left behind: {', '.join(leaks)}", pytrace=False)


def _leaks(children: set[int], threads: set[threading.Thread]) -> list[str]:
    left = [f"process {pid} ({_command(pid)})" for pid in _children() - children if _counts(pid)]
    alive = [one for one in threading.enumerate() if one not in threads and not one.daemon]
    return left + [f"thread {one.name}" for one in alive]


def _children() -> set[int]:
    found: set[int] = set()
    for parent in ("self", *map(str, Template.pids)):
        for file in Path("/proc", parent, "task").glob("*/children"):
            with contextlib.suppress(FileNotFoundError):  # a thread may end between the two looks
                found.update(map(int, file.read_text().split()))
    return found - Template.pids


def _counts(pid: int) -> bool:
    return not any(name in _command(pid) for name in _PERMANENT)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except OSError:
        return ""


def _environ() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in _OTHERS}


def _wait_until(condition: Callable[[], bool], seconds: float = _GRACE) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    code: int
    out: str
    err: str


class Lockstep:
    """Runs `lockstep …` in a directory of its own, each in its own session, never longer than a timeout."""

    def __init__(
        self, directory: Path, template: Template | None = None, temporary: Path | None = None
    ) -> None:
        self.directory, self._template = directory, template
        self._own = {} if temporary is None else {"TMPDIR": str(temporary)}
        self._started: list[subprocess.Popen[str]] = []

    def script(self, text: str, name: str = "train.py") -> str:
        """Write a script; return its name."""
        path = self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return name

    def start(
        self,
        *words: str,
        env: dict[str, str] | None = None,
        program: tuple[str, ...] = LOCKSTEP,
        executable: str = sys.executable,
    ) -> subprocess.Popen[str]:
        """Start a command and return at once."""
        environ = {**os.environ, **self._own, **(env or {})}
        process: subprocess.Popen[str]
        asked = (*program, *words)
        if self._template is not None and executable == sys.executable and asked[0] != "-c":
            module, rest = (asked[1], asked[2:]) if asked[0] == "-m" else ("", asked)
            process = Forked(self._template, rest, self.directory, environ, module=module)
        else:
            process = subprocess.Popen(
                [executable, *program, *words],
                cwd=self.directory,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        self._started.append(process)
        return process

    def __call__(self, *words: str, env: dict[str, str] | None = None, timeout: float = 60) -> Done:
        """Run a command to its end."""
        return self.finish(self.start(*words, env=env), timeout)

    def python(self, *words: str, env: dict[str, str] | None = None, timeout: float = 60) -> Done:
        """Run `python words` to its end."""
        return self.finish(self.start(*words, env=env, program=()), timeout)

    def finish(self, process: subprocess.Popen[str], timeout: float = 60) -> Done:
        """Wait for a command's end."""
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate(timeout=10)
            pytest.fail(f"no end after {timeout} s\n--- out\n{out}\n--- err\n{err}")
        return Done(process.returncode, out, err)

    def wait_for(self, *names: str, seconds: float = 30) -> list[str]:
        """Wait until files exist and are not empty; return their text."""
        files = [self.directory / name for name in names]
        if not _wait_until(
            lambda: all(file.exists() and file.read_text() for file in files), seconds
        ):
            pytest.fail(
                f"not written after {seconds} s: {[file.name for file in files if not file.exists()]}"
            )
        return [file.read_text() for file in files]

    @staticmethod
    def gone(pid: int, seconds: float = 10) -> bool:
        """Return whether process `pid` ends within `seconds`."""
        return _wait_until(lambda: _state(pid) in ("", "Z"), seconds)

    def close(self) -> None:
        """Kill what is left."""
        for process in self._started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate(timeout=10)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


@pytest.fixture(scope="session")
def template() -> Iterator[Template]:
    """The process that commands are forked from."""
    process = Template()
    yield process
    process.close()


@pytest.fixture(scope="session")
def examples_template() -> Iterator[Template]:
    """The process that tests of the examples fork commands from: it has imported what examples import."""
    process = Template(
        "sklearn.datasets",
        "examples.cpu_torchvision",  # before torchvision
        *("torchvision.datasets", "torchvision.models", "torchvision.transforms.v2"),
        "transformers.models.gpt2.modeling_gpt2",
    )
    yield process
    process.close()


def template_of(request: pytest.FixtureRequest) -> Template | None:
    """Return the template of a test that is marked `forked`."""
    is_forked = request.node.get_closest_marker("forked") is not None
    found: Template | None = request.getfixturevalue("template") if is_forked else None
    return found


@pytest.fixture
def lockstep(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Lockstep]:
    """The command `lockstep`, run in a temporary directory; from a template for tests marked `forked`."""
    # Logs of plain scripts that fail stay; a short name, since sockets' paths may not be long.
    command = Lockstep(tmp_path, template_of(request), tmp_path_factory.mktemp("t"))
    yield command
    command.close()
