"""One launch from its fork server to its verdict, leaving nothing behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

from lockstep.launch import failure
from lockstep.launch.failure import Verdict
from lockstep.launch.forkserver import ForkServer, Job
from lockstep.launch.interrupts import Interrupts
from lockstep.launch.machine import Machine
from lockstep.launch.output import Output
from lockstep.launch.plan import Meeting, Plan, count_ranks, make_plan
from lockstep.launch.spec import LaunchSpec


def supervise(
    spec: LaunchSpec,
    here: Machine,
    job: Job,
    run_dir: Path,
    private: Path,
    interrupts: Interrupts,
    deadline: float | None = None,
) -> Verdict | None:
    """Run the workers of `spec` to their end; return the verdict if they failed.

    Args:
        spec: the launch.
        here: facts about this machine.
        job: what each worker does.
        run_dir: the run's directory, made.
        private: a directory for this launch's own files.
        interrupts: signals to the launcher.
        deadline: moment of `time.monotonic` at which it must be over.

    Raises:
        Interrupted: if the launcher was told to stop.
        TimeoutError: if `deadline` passed.
    """
    kills = failure.oom_kills()
    environ = dict(os.environ)
    size = count_ranks(spec, here, environ)

    def planner(meeting: Meeting) -> Plan:
        return make_plan(spec, here, environ, meeting=meeting, run_dir=run_dir, error_dir=private)

    with _serving(job) as server, _showing(tee=spec.tee) as output:
        from lockstep.launch.agent import Agent

        agent = Agent(
            planner,
            size=size,
            run_id=uuid.uuid4().hex,
            server=server,
            output=output,
            interrupts=interrupts,
            deadline=deadline,
        )
        # The server ends before the output does: what is left of the workers cannot write after it.
        with contextlib.closing(server):
            agent.run()
    if not agent.failures:
        return None
    return failure.verdict(
        agent.failures, size, killed_for_memory=_grew(kills, failure.oom_kills())
    )


@contextlib.contextmanager
def private_directory() -> Iterator[Path]:
    """Make a directory that only this user can read, and remove it at the end."""
    path = Path(tempfile.mkdtemp(prefix="lockstep-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def say(text: str) -> None:
    """Tell the user something of the launcher's own."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)  # noqa: T201 - the launcher's own words


@contextlib.contextmanager
def _serving(job: Job) -> Iterator[ForkServer]:
    server = ForkServer(job)
    try:
        yield server
    finally:
        server.close()


@contextlib.contextmanager
def _showing(*, tee: bool) -> Iterator[Output]:
    output = Output(tee=tee)
    try:
        yield output
    finally:
        output.finish()


def _grew(before: int | None, after: int | None) -> bool | None:
    return None if before is None or after is None else after > before
