"""Run all launches of `lockstep bench`, and make the content of its JSON results file."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from lockstep.errors import UsageError
from lockstep.launch.command import RunCommand
from lockstep.tools.bench.combinations import Combination, check_gpus, visible_gpus
from lockstep.tools.bench.comparing import FORMAT, RESULT, check_scripts, compare, load
from lockstep.tools.bench.launches import Launches, Listener, Runner, choose_threads
from lockstep.tools.bench.projecting import project
from lockstep.tools.bench.projection import Link
from lockstep.tools.bench.traffic import Layout
from lockstep.version import __version__
from lockstep.world.cores import usable_cores
from lockstep.world.host import processor


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """Options of one call of `lockstep bench`; `run` launches the script and returns the results."""

    command: RunCommand
    combinations: Sequence[Combination]
    repeat: int  # number of launches of each combination
    restarts: bool  # whether to measure a restart of each combination
    wanted: Sequence[Layout]  # layouts to project to
    link: Link
    other: str | None  # name of the results to compare with

    def __post_init__(self) -> None:
        if self.repeat < 1:
            raise UsageError(f"--repeat is {self.repeat}; expected at least 1")
        check_gpus(self.combinations, visible_gpus())
        if self.other is not None:  # before anything runs
            check_scripts(self._script(), load(self.other), self.other)

    def _script(self) -> dict[str, Any]:
        path, *arguments = self.command.script
        return {
            "name": Path(path).name,
            "arguments": arguments,
            "sha256": hashlib.sha256(Path(path).read_bytes()).hexdigest(),
        }

    def run(self, directory: Path, say: Listener, *, keep: bool) -> dict[str, Any]:
        """Launch the script with each of `combinations`; return the content of the JSON results file.

        Each launch writes its output and its run directory below `directory`; both are removed unless
        `keep`. `say` is called with one line of progress after each launch.
        """
        machine = describe_machine()
        ranks = [one.ranks for one in self.combinations]
        work = Runner(self.command, choose_threads(machine["cores"], ranks), visible_gpus())
        launches = Launches(work, self.combinations, directory, keep, say)
        launches.run(self.repeat, restarts=self.restarts)
        rows = launches.rows(machine["cores"])
        content: dict[str, Any] = {
            "format": FORMAT,
            "kind": RESULT,
            "script": self._script(),
            "machine": machine,
            "options": [*self.command.options, *self.command.of_servers],
            "results": rows,
        }
        if self.wanted:
            projection = project(rows, self.wanted, self.link)
            content |= {"projection": projection.rows, "model": projection.model}
        return content

    def compare(self, content: dict[str, Any]) -> UsageError | None:
        """Add the comparison with the results that `--compare` names to the results `content`.

        Return the error if the two results cannot be compared, else `None`.
        """
        if self.other is None:
            return None
        try:
            content["comparison"] = compare(content, load(self.other), self.other)
        except UsageError as error:
            return error
        return None


def describe_machine() -> dict[str, Any]:
    """Return this machine's processor, cores and memory, and the versions of Python, torch and Lockstep."""
    return {
        "processor": processor(),
        "cores": usable_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "versions": {
            "python": platform.python_version(),
            "torch": metadata.version("torch"),
            "lockstep": __version__,
        },
    }
