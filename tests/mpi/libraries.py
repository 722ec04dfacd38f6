"""The two MPI libraries that `make mpi` installs, each with its own `mpiexec`."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import Done, Lockstep

_ROOT = Path(__file__).parents[2] / ".mpi"
_SHARED_MEMORY = Path("/dev/shm")
_PREFIXES = ("mpich_shm_", "sm_segment.")
_CROWDED = {"mpich": (), "openmpi": ("--oversubscribe",)}


@dataclass(frozen=True)
class Mpi:
    """One MPI library, and what is started by it."""

    name: str
    lockstep: Lockstep

    @property
    def root(self) -> Path:
        """Where it is installed."""
        return _ROOT / self.name

    @property
    def mpiexec(self) -> str:
        """The path of its launcher."""
        return str(self.root / "bin" / "mpiexec")

    @property
    def variables(self) -> dict[str, str]:
        """Let Python find this library's mpi4py, and Open MPI start as root."""
        python = f"python{sys.version_info.major}.{sys.version_info.minor}"
        return {
            "PYTHONPATH": str(self.root / "lib" / python / "site-packages"),
            "MPI4PY_LIBMPI": str(self.root / "lib"),
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "TMPDIR": str(self.lockstep.directory),
            "LOCKSTEP_REPLICAS": "4",
        }

    def missing(self) -> str | None:
        """Return why this library cannot be used, or `None`."""
        if not Path(self.mpiexec).exists() or not Path(self.variables["PYTHONPATH"]).is_dir():
            return f"needs {self.name}: `make mpi` installs it"
        return None

    def words(self, n: int, *words: str, crowded: bool = True) -> list[str]:
        """Return the arguments of mpiexec that start `n` ranks of `python words`.

        Args:
            n: how many.
            words: what Python is given.
            crowded: whether they may be more than the machine has cores.
        """
        options = _CROWDED[self.name] if crowded else ()
        return [*options, "-n", str(n), sys.executable, *words]

    def start(self, n: int, *words: str, **variables: str) -> subprocess.Popen[str]:
        """Start `n` ranks of `python words`, and return at once."""
        return self.start_any(self.words(n, *words), **variables)

    def start_any(self, words: list[str], **variables: str) -> subprocess.Popen[str]:
        """Start mpiexec with arguments of one's own."""
        env = {**self.variables, **variables}
        return self.lockstep.start(*words, env=env, program=(), executable=self.mpiexec)

    def __call__(self, n: int, *words: str, **variables: str) -> Done:
        """Run `n` ranks of `python words` to their end."""
        return self.lockstep.finish(self.start(n, *words, **variables))


def shared_files() -> set[Path]:
    """Return the files that MPI libraries have in shared memory."""
    return {file for file in _SHARED_MEMORY.glob("*") if file.name.startswith(_PREFIXES)}


def remove_leftovers(before: set[Path]) -> None:
    """Remove the shared memory of ranks that were killed: their libraries leave it behind."""
    for file in shared_files() - before:
        if file.stat().st_uid == os.getuid() and not _is_mapped(file):
            file.unlink(missing_ok=True)


def _is_mapped(file: Path) -> bool:
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            if str(file) in maps.read_text():
                return True
        except OSError:
            continue
    return False
