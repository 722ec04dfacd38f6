"""One launch from its fork server to its verdict, leaving nothing behind."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.errors import LockstepError
from lockstep.launch import failure
from lockstep.launch.dry_run import placement
from lockstep.launch.failure import Failure, Verdict
from lockstep.launch.forkserver import ForkServer, Job
from lockstep.launch.gpus import visible
from lockstep.launch.interrupts import Interrupts
from lockstep.launch.machine import Machine
from lockstep.launch.nodes import Party
from lockstep.launch.nodes import party as find_party
from lockstep.launch.old_scripts import kept_port
from lockstep.launch.output import Output
from lockstep.launch.plan import Meeting, Plan, count_ranks, make_plan
from lockstep.launch.roster import Launcher
from lockstep.launch.spec import LaunchSpec
from lockstep.record import directory

#: How long a launcher waits for others before it says that it does.
_SILENCE_SECONDS = 3.0

if TYPE_CHECKING:
    from lockstep.launch.gathering import Gathering


class RunPlace:
    """The run's directory, made when the launchers have met.

    Args:
        run_dir: the directory asked for; `None` makes a new one.
        name: name of the run.
    """

    def __init__(self, run_dir: Path | None, name: str) -> None:
        self._run_dir = run_dir
        self._name = name
        self.path: Path | None = None

    def make(self, stamp: str | None) -> Path:
        """Make the directory; `stamp` is what launcher 0 has called it, on the others.

        Raises:
            RunDirectoryError: if it cannot be made or written.
        """
        self.path = directory.create(self._run_dir, self._name, stamp=stamp)
        return self.path


#: See `RunPlace.make`.
Place = Callable[[str | None], Path]


def supervise(
    spec: LaunchSpec,
    here: Machine,
    job: Job,
    place: Place,
    private: Path,
    interrupts: Interrupts,
    deadline: float | None = None,
) -> Verdict | None:
    """Run the workers of `spec` to their end; return the verdict if they failed.

    Args:
        spec: the launch.
        here: facts about this machine.
        job: what each worker does.
        place: gives the run's directory, once the launchers of all nodes have met.
        private: a directory for this launch's own files.
        interrupts: signals to the launcher.
        deadline: moment of `time.monotonic` at which it must be over.

    Raises:
        Interrupted: if the launcher was told to stop.
        TimeoutError: if `deadline` passed.
        WorldError: if the launchers of other nodes cannot be met.
    """
    environ = dict(os.environ)
    ranks = count_ranks(spec, here, environ)
    with (
        _serving(job) as server,
        _showing(tee=spec.tee) as output,
        _gathered(spec, here, environ, interrupts) as gathering,
        kept_port() as port,  # after the server is forked, so that no worker inherits what keeps it
    ):
        from lockstep.launch.agent import Agent
        from lockstep.launch.rendezvous import Rendezvous

        rendezvous = Rendezvous(uuid.uuid4().hex, ranks, gathering)
        run_dir = _agree_on_directory(gathering, place)

        agent = Agent(
            _planner(spec, here, environ, run_dir, private, port),
            _judge(rendezvous.roster.size),
            rendezvous,
            server=server,
            output=output,
            interrupts=interrupts,
            deadline=deadline,
        )
        # The server ends before the output does: what is left of the workers cannot write after it.
        with contextlib.closing(server):
            agent.run()
    return agent.verdict


def _planner(
    spec: LaunchSpec,
    here: Machine,
    environ: Mapping[str, str],
    run_dir: Path,
    private: Path,
    port: int,
) -> Callable[[Meeting], Plan]:
    """Return what plans a generation and says where its ranks are; `port` is for a rank that is alone."""

    def plan(meeting: Meeting) -> Plan:
        if meeting.size == 1:
            meeting = dataclasses.replace(meeting, port=port)
        made = make_plan(spec, here, environ, meeting=meeting, run_dir=run_dir, error_dir=private)
        for line in placement(made):
            say(line)
        return made

    return plan


@contextlib.contextmanager
def _gathered(
    spec: LaunchSpec, here: Machine, environ: Mapping[str, str], interrupts: Interrupts
) -> Iterator[Gathering | None]:
    """Meet the launchers of the other nodes, if there are any."""
    nodes = spec.nodes
    # A function is launched for its values, which other launchers would not get.
    work = (spec.target, *spec.args)
    party = None if spec.kind == "function" else find_party(nodes, work, environ)
    if party is None:
        yield None
        return
    from lockstep.launch.gathering import gather
    from lockstep.world.meet import chosen_interface, join_timeout

    seconds = nodes.join_timeout or join_timeout().total_seconds()
    gathering = gather(
        party,
        _describe(spec, here, environ),
        seconds=seconds,
        interface=nodes.interface or chosen_interface(),
        check=_patience(party, seconds, interrupts),
    )
    if gathering.roster.index == 0:
        say(f"lockstep: {gathering.roster}")
    try:
        yield gathering
    finally:
        gathering.close()


def _describe(spec: LaunchSpec, here: Machine, environ: Mapping[str, str]) -> Launcher:
    hidden = environ.get(here.visible_variable, "")
    known = tuple(gpu.uuid for gpu in visible(here.cards, environ).gpus if gpu.uuid)
    return Launcher(
        ranks=count_ranks(spec, here, environ),
        name=socket.gethostname(),
        cpus=tuple(sorted(os.sched_getaffinity(0))),
        gpus=known or tuple(filter(None, hidden.split(","))),
    )


def _patience(party: Party, seconds: float, interrupts: Interrupts) -> Callable[[], None]:
    """Return what is called while other launchers are waited for: says so once, after a moment."""
    began, told = time.monotonic(), False

    def check() -> None:
        nonlocal told
        interrupts.check()
        if not told and time.monotonic() - began > _SILENCE_SECONDS:
            told = True
            where = party.directory or party.address
            say(f"lockstep: waiting for the other nodes at {where}, {seconds:g} s at most")

    return check


def _judge(size: int) -> Callable[[list[Failure]], Verdict]:
    """Return what gives the verdict over failures from here on, in a launch of `size` ranks."""
    kills = failure.oom_kills()

    def judge(failures: list[Failure]) -> Verdict:
        killed = _grew(kills, failure.oom_kills())
        return failure.verdict(failures, size, killed_for_memory=killed)

    return judge


def _agree_on_directory(gathering: Gathering | None, place: Place) -> Path:
    if gathering is None:
        return place(None)
    try:
        if gathering.roster.index > 0:
            run_dir = place(gathering.hear("directory"))
        else:
            run_dir = place(None)
            gathering.tell("directory", run_dir.name)
    except LockstepError as error:
        gathering.fail(error)
        raise
    gathering.ready()
    return run_dir


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
