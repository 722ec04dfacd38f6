"""Running a script on one layout, in a launch of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.record import run_file
from lockstep.verify.layouts import Layout
from lockstep.verify.traces import Traces, read


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a script on one layout.

    Attributes:
        layout: the layout.
        exit_code: of the launch.
        digest: of the weights at the end; `None` if it did not come to the end of a run.
        steps: how many updates.
        seconds: of the whole launch.
        traces: what every step saw and made.
        complaint: the last lines of the launch, where it failed.
    """

    layout: Layout
    exit_code: int
    digest: str | None
    steps: int
    seconds: float
    traces: Traces
    complaint: str


def run(
    layout: Layout, command: Sequence[str], options: Sequence[str], replicas: int, directory: Path
) -> Outcome:
    """Run a script on `layout`.

    Args:
        layout: the layout.
        command: the script and its arguments.
        options: further options of `lockstep run`.
        replicas: number of replicas for scripts that name none.
        directory: a new directory for the run and its trace.
    """
    directory.mkdir(parents=True)
    run_dir, trace = directory / "run", directory / "trace"
    words = ["-m", "lockstep", "run", "-n", str(layout.ranks), "--run-dir", str(run_dir)]
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, *words, *options, *command],
        env={
            **os.environ,
            "LOCKSTEP_TRACE": str(trace),
            "LOCKSTEP_PROGRESS": "0",
            "LOCKSTEP_DEFAULT_REPLICAS": str(replicas),
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    seconds = time.monotonic() - started
    recorded = run_file.read(run_dir) or {}
    return Outcome(
        layout=layout,
        exit_code=done.returncode,
        digest=recorded.get("digest"),
        steps=recorded.get("steps", 0),
        seconds=seconds,
        traces=read(trace),
        complaint=_complaint(done.stderr) if done.returncode else "",
    )


def _complaint(text: str) -> str:
    """The launcher's verdict is what its standard error ends with."""
    lines = text.rstrip().splitlines()
    marks = [i for i, line in enumerate(lines) if line.startswith("lockstep: ")]
    return "\n".join(lines[marks[-1] :] if marks else lines[-8:])
