"""Provenance of a run: its command, settings, source files and machine, for `lockstep replay`."""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lockstep.state.files import run_file
from lockstep.state.record import stacks
from lockstep.world import accelerator, host
from lockstep.world.environments import ray

#: Number of the user's source files that are hashed.
_FILES = 2000
#: Seconds to wait for git at the start of a run; its answer takes 10 ms where the repository is small.
_GIT_SECONDS = 1.0
_GIT_STATUS = ("--no-optional-locks", "status", "--porcelain=v2", "--branch", "-uno")


class Commit(threading.Thread):
    """Thread that finds the git commit of the script's repository while the run starts."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.found: dict[str, Any] = {}  # the commit, and whether tracked files differ from it
        self.start()

    def run(self) -> None:
        """Run `git status` with a timeout of a second; set `found` to commit and `dirty` flag.

        `found` stays empty if git fails, or if the script is in no repository.
        """
        file = getattr(sys.modules["__main__"], "__file__", None) or "."
        words = ("git", "-C", Path(file).absolute().parent, *_GIT_STATUS)
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(words, capture_output=True, check=True, timeout=_GIT_SECONDS)
            lines = done.stdout.decode(errors="replace").splitlines()
            dirty = any(not line.startswith("#") for line in lines)
            for line in lines:
                if line.startswith("# branch.oid "):
                    self.found = {"commit": line.split()[-1], "dirty": dirty}


def provenance(
    settings: Mapping[str, Any], device: torch.device, number: int, commit: Commit
) -> dict[str, Any]:
    """Return a run's provenance as JSON values: command, settings, commit, checksums, machine.

    `settings` are those with which the run can be started again. `number` is the index of the run in its
    script. `commit` is the thread that looks for the git commit; it is joined here.
    """
    commit.join()
    return {
        "command": command(number),
        "settings": dict(settings),
        "git": commit.found,
        "sources": {file: _checksum(file) for file in user_files()},
        "environment": {
            "processor": host.processor(),
            "instructions": torch.backends.cpu.get_cpu_capability(),
            "device": accelerator.name(device),
        },
    }


def command(number: int) -> dict[str, Any]:
    """Return the command that started this process, as JSON values.

    The fields are the path or module of the script (the path is `None` in a worker of Ray), its arguments,
    the working directory, and `number`, the index of the run in the script.
    """
    main = sys.modules["__main__"]
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if ray.is_worker(os.environ):
        file = None  # Ray's own
    return {
        "module": None if spec is None else spec.name.removesuffix(".__main__"),
        "script": None if file is None else str(Path(file).absolute()),
        "arguments": run_file.script_and_arguments()[1],
        "directory": str(Path.cwd()),
        "run": number,
    }


def user_files() -> list[str]:
    """Return the paths of imported Python files that belong neither to Lockstep nor to a library."""
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    own = sorted(file for file in files if isinstance(file, str) and stacks.is_users(file))
    return [file for file in own if file.endswith(".py") and Path(file).is_file()][:_FILES]


def changed_files(sources: Mapping[str, str]) -> list[str]:
    """Return the files in `sources` that are gone, or whose checksum differs from the recorded one.

    `sources` maps the path of each file to its recorded SHA-256.
    """
    return [file for file, checksum in sources.items() if _checksum(file) != checksum]


def _checksum(file: str) -> str:
    with contextlib.suppress(OSError):  # the file is gone
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()
    return ""
