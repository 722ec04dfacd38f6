"""Take a recorded run's script from its git commit, if source files have changed since."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

from lockstep.state.record.provenance import changed_files
from lockstep.tools.replay.recorded import RecordedRun


def as_recorded(run: RecordedRun, directory: Path) -> RecordedRun:
    """Return the run with its script taken from its git commit, if source files have changed since.

    The commit is unpacked to `directory`; the repository is only read. `run` is returned as it is if no
    file has changed, or if its commit is unknown or gone.
    """
    provenance = run.content["provenance"]
    command, sources = provenance["command"], provenance["sources"]
    commit = provenance.get("git", {}).get("commit")
    if not commit or not changed_files(sources):
        return run
    directory.mkdir(parents=True)
    place, archive = str(Path(command["script"]).parent), str(directory.with_suffix(".tar"))
    try:
        words = ["git", "-C", place, "rev-parse", "--show-toplevel"]
        top = subprocess.check_output(words, text=True).rstrip("\n")
        for words in ["git", "-C", top, "archive", "-o", archive, commit], ["tar", "-xf", archive]:
            subprocess.check_call(words, cwd=directory)
    except (OSError, subprocess.CalledProcessError):  # the command has said why
        return run

    def placed(file: str) -> str:
        path = Path(file).resolve()
        return str(directory / path.relative_to(top)) if path.is_relative_to(top) else file

    script = placed(command["script"])
    if not Path(script).is_file():
        return run  # it was never committed
    moved = {
        "command": {**command, "script": script},
        "sources": {placed(file): checksum for file, checksum in sources.items()},
    }
    if command.get("module"):  # modules are found in the working directory
        moved["command"]["directory"] = placed(command["directory"])
    return replace(run, content={**run.content, "provenance": {**provenance, **moved}})
