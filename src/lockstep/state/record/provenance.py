"""Provenance of a run: its command, settings, source files and machine, for `lockstep replay`."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
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


def provenance(settings: Mapping[str, Any], device: torch.device, number: int) -> dict[str, Any]:
    """Return the provenance of run number `number` of the running script, as JSON values."""
    return {
        "command": command(number),
        "settings": dict(settings),
        "sources": {file: _checksum(file) for file in user_files()},
        "environment": {
            "processor": host.processor(),
            "instructions": torch.backends.cpu.get_cpu_capability(),
            "device": accelerator.name(device),
        },
    }


def command(number: int) -> dict[str, Any]:
    """Return the running script's path or module, arguments and working directory, as JSON values.

    Workers of Ray have no script.

    `number`: index of the run among the runs of this process.
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
    """Return the paths of the imported source files that are the user's."""
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    own = sorted(file for file in files if isinstance(file, str) and stacks.is_users(file))
    return [file for file in own if file.endswith(".py") and Path(file).is_file()][:_FILES]


def changed_files(sources: Mapping[str, str]) -> list[str]:
    """Return those of the recorded source files that are gone or have another checksum now."""
    return [file for file, checksum in sources.items() if _checksum(file) != checksum]


def _checksum(file: str) -> str:
    with contextlib.suppress(OSError):  # the file is gone
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()
    return ""
