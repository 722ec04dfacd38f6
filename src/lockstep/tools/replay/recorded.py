"""Read a run directory for a replay: the run's command, its checkpoints and its step record."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from lockstep.errors import CheckpointError, ScriptNotFoundError, UsageError
from lockstep.launch.command import RunCommand
from lockstep.settings import TABLE, write
from lockstep.state.checkpoint import catalog
from lockstep.state.files import run_file
from lockstep.state.files.atomic_file import make_directory
from lockstep.state.record import steps
from lockstep.state.record.provenance import changed_files
from lockstep.state.record.reading import RunRecords
from lockstep.state.record.steps import Entry, Key


@dataclass(frozen=True)
class RecordedRun:
    """The records of a run in its directory, from which the run can be started again."""

    directory: Path
    content: dict[str, Any]  # of `run.json`

    @staticmethod
    def of(directory: Path) -> RecordedRun:
        """Read the records in a run directory.

        Raises:
            UsageError: if the directory has no run, or its script cannot be started again.
            RunDirectoryError: if `run.json` is damaged.
        """
        run = RecordedRun(directory.absolute(), RunRecords.of(directory).run)
        command = run._command
        if not isinstance(command.get("script"), str):
            raise UsageError(
                f"{directory} does not record how its script was started; expected the path of a script",
                hint="runs of an older version, in notebooks, and by Ray cannot be replayed",
            )
        if command.get("run"):
            raise UsageError(
                f"{directory} is run number {command['run'] + 1} of its script; expected the first one",
                hint="make one lockstep.Run per script: then every run can be replayed",
            )
        for name in ("script", "directory"):
            if not Path(command[name]).exists():
                raise ScriptNotFoundError(
                    f"{command[name]}, the {name} of the recorded command, is gone; expected it to exist",
                    hint="put it back where it was when the run began",
                )
        return run

    def as_recorded(self, directory: Path) -> RecordedRun:
        """Return the run with its script taken from its git commit, if source files have changed since.

        The commit is unpacked to `directory`; the repository is only read. The run itself is returned if
        no file has changed, or if its commit is unknown or gone.
        """
        provenance = self.content["provenance"]
        command, sources = provenance["command"], provenance["sources"]
        commit = provenance.get("git", {}).get("commit")
        if not commit or not changed_files(sources):
            return self
        directory.mkdir(parents=True)
        place, archive = str(Path(command["script"]).parent), str(directory.with_suffix(".tar"))
        try:
            words = ["git", "-C", place, "rev-parse", "--show-toplevel"]
            top = subprocess.check_output(words, text=True).rstrip("\n")
            for words in (
                ["git", "-C", top, "archive", "-o", archive, commit],
                ["tar", "-xf", archive],
            ):
                subprocess.check_call(words, cwd=directory)
        except (OSError, subprocess.CalledProcessError):  # the command has said why
            return self

        def placed(file: str) -> str:
            path = Path(file).resolve()
            return str(directory / path.relative_to(top)) if path.is_relative_to(top) else file

        script = placed(command["script"])
        if not Path(script).is_file():
            return self  # it was never committed
        moved = {
            "command": {**command, "script": script},
            "sources": {placed(file): checksum for file, checksum in sources.items()},
        }
        if command.get("module"):  # modules are found in the working directory
            moved["command"]["directory"] = placed(command["directory"])
        return replace(self, content={**self.content, "provenance": {**provenance, **moved}})

    @property
    def _command(self) -> Mapping[str, Any]:
        return dict(self.content.get("provenance", {}).get("command", {}))

    @property
    def identity(self) -> Mapping[str, Any]:
        """The identity in `run.json`: values that the run's result depends on, such as script and seed."""
        return dict(self.content.get("identity", {}))

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings in `run.json` with which another start of the run computes the same results."""
        return dict(self.content["provenance"].get("settings", {}))

    @property
    def working_directory(self) -> Path:
        """The directory in which the script was started."""
        return Path(self._command["directory"])

    @cached_property
    def entries(self) -> dict[Key, Entry]:
        """The entries of the step record by key: bits of losses, hashes of gradients and parameters."""
        return steps.read(self.directory)

    @property
    def last(self) -> int:
        """Number of the last step that the run has recorded."""
        known = (self.content.get("steps", 0), self.content.get("step", 0))
        return int(max(*known, *(key.step for key in self.entries)))

    def command(self, options: list[str], arguments: list[str] | None = None) -> RunCommand:
        """Return the `lockstep run` command that starts the script of this run again.

        `options` are options of `lockstep run`. `arguments` replace the recorded arguments of the script.
        """
        module, given = self._command.get("module"), self._command["arguments"]
        script = [module or self._command["script"], *(given if arguments is None else arguments)]
        return RunCommand(script, [*(["-m"] if module else []), *options], [])

    def variables(self, *without: str) -> dict[str, str]:
        """Return environment variables that set the settings of this run for another launch.

        The setting `strategy` and those named in `without` are left out.
        """
        return {
            TABLE[name].variable: write(value)
            for name, value in self.settings.items()
            if name in TABLE and name not in (*without, "strategy")
        }

    @property
    def strategy(self) -> str | None:
        """Name of the recorded strategy; `None` for the default."""
        name = self.settings.get("strategy", "auto")
        return None if name == "auto" else str(name)

    def state_at(self, first: int, last: int) -> Path | None:
        """Return the path of the newest undamaged checkpoint of steps `first` to `last`, or `None`.

        A message on standard error names each damaged checkpoint.
        """
        for (step, _), path in catalog.paths(self.directory / catalog.DIRECTORY).items():
            if first <= step <= last:
                try:
                    return catalog.look(path).path
                except CheckpointError as error:
                    print(f"lockstep: {path} is skipped: {error.message}", file=sys.stderr)  # noqa: T201
        return None

    def begin(self, state: Path | None, directory: Path, *, stays: bool) -> None:
        """Make `directory` the directory of a new run that begins with the checkpoint `state`.

        `stays`: whether the new run is kept. For a run that is kept, the files of the checkpoint are
        copied. They are also copied while this run trains, since it may remove them. Otherwise they are
        linked. With `None` as `state` nothing is written, so that the new run begins at step 0.

        Raises:
            UsageError: if `state` is `None`, and this run itself began with the state of another
                run.
        """
        if state is None:
            if "parent" in self.content:
                raise UsageError(
                    f"{self.directory} began with the state of another run, which is gone; expected "
                    f"{self.content['parent'].get('checkpoint')} in its checkpoints",
                    hint="name a step after one of its checkpoints",
                )
            return
        own = directory / catalog.DIRECTORY / state.name
        make_directory(own)
        own.chmod(catalog.DIRECTORY_MODE)
        copies = stays or self.content.get("status") == "running"
        for file in state.iterdir():
            if copies:
                shutil.copy(file, own / file.name)
            else:
                (own / file.name).symlink_to(file)
        key = catalog.key_of(state)
        assert key is not None, "it is a checkpoint"
        parent = {"directory": str(self.directory), "step": key[0], "checkpoint": state.name}
        run_file.write(directory, {"format": run_file.FORMAT, "parent": parent})
