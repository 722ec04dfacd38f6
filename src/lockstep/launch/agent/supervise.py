"""Supervise one launch, from its fork server to its verdict and clean-up."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.launch import stdin, unfinished
from lockstep.launch.agent import worker
from lockstep.launch.agent.failure import Verdict
from lockstep.launch.agent.forkserver import ForkServer, Job, Preload
from lockstep.launch.agent.hang import HangWatch
from lockstep.launch.agent.interrupts import Interrupts
from lockstep.launch.agent.rank_progress import RankProgress
from lockstep.launch.agent.restarts import Restarts
from lockstep.launch.devices.gpus import visible
from lockstep.launch.dry_run import placement
from lockstep.launch.nodes.config import Nodes, RendezvousConfig
from lockstep.launch.nodes.membership import Common, Launcher
from lockstep.launch.output import Output, say
from lockstep.launch.plan import (
    Generation,
    Launch,
    Plan,
    check_replicas,
    make_plan,
    share_of_threads,
)
from lockstep.launch.run_directory import RunDirectory, remove_left
from lockstep.launch.spec import LaunchSpec
from lockstep.launch.target.old_scripts import kept_port
from lockstep.launch.target.preload import import_shared
from lockstep.state.checkpoint.shared_memory import Descriptors
from lockstep.world import host

#: How long a launcher waits for others before it says that it does.
_SILENCE_SECONDS = 3.0
#: Names of a launcher's own directory, and of the lock in it.
_PREFIX, _LOCK = "lockstep-", "launcher.lock"

if TYPE_CHECKING:
    from lockstep.launch.nodes.membership_rounds import Rounds


def supervise(
    launch: Launch,
    job: Job,
    place: RunDirectory,
    private: Path,
    interrupts: Interrupts,
    deadline: float | None = None,
) -> Verdict | None:
    """Run the workers of `launch` to their end; return the verdict if they failed.

    Args:
        launch: the launch, on this machine.
        job: what each worker does.
        place: makes the run's directories, after the rendezvous of all launchers.
        private: a directory for this launch's own files.
        interrupts: signals to the launcher.
        deadline: moment of `time.monotonic` at which it must be over.

    Raises:
        Interrupted: if the launcher was told to stop.
        NotNeeded: if the launch ended before there was a place for this launcher.
        TimeoutError: if `deadline` passed.
        WorldError: if the rendezvous with other launchers fails.
    """
    spec, environ = launch.spec, launch.environ
    has_locks = (private / _LOCK).exists()
    listens = _listens(launch, has_locks=has_locks)
    only_port, store_port = _ports(spec.nodes, is_only=not listens)
    with (
        stdin.restored(),
        closing(Descriptors.create()) as memory,  # before the server is forked: workers inherit it
        closing(_fork_server(launch, job, interrupts)) as server,
        closing(Output()) as output,
        _joined(launch, place.name, interrupts) as rounds,
        kept_port(only_port) as port,  # after the fork, so that no worker inherits what keeps it
        # Closed before the output: what is left of the workers cannot write after it.
        closing(server),
    ):
        from lockstep.launch.agent.agent import Agent
        from lockstep.launch.agent.rendezvous import Rendezvous

        restarts = Restarts(spec.fault_tolerance.restarts(environ))
        shared = None if rounds is None else rounds.common
        common, listens = shared or Common.new(launch.ranks), listens or rounds is not None
        generation = _generation(common, max_restarts=restarts.limit, listens=listens)
        files = private if has_locks else None
        planner = partial(_plan, launch, place, shared, private, port, files)
        progress = RankProgress(memory, launch.ranks)
        agent = Agent(
            planner,
            Rendezvous(generation, launch.ranks, rounds, port=store_port),
            server=server,
            output=output,
            interrupts=interrupts,
            progress=progress,
            hangs=HangWatch(progress.slots, spec.fault_tolerance.patience(environ)),
            restarts=restarts,
            is_run=launch.sources.uses_lockstep,
            deadline=deadline,
        )
        agent.run()
    return agent.verdict


def _generation(common: Common, *, max_restarts: int, listens: bool) -> Generation:
    """Return what all generations of a launch have in common."""
    return Generation(
        run_id=common.run_id, token=common.token, max_restarts=max_restarts, listens=listens
    )


def _fork_server(launch: Launch, job: Job, interrupts: Interrupts) -> ForkServer:
    job = worker.or_server(launch.spec, job)
    return ForkServer(job, interrupts.polite, _preload(launch), interrupts.check)


def _listens(launch: Launch, *, has_locks: bool) -> bool:
    """Return whether the ranks' store is at a port: files do where they can be locked."""
    sources = launch.sources
    if has_locks and sources.uses_lockstep and sources.leaves_groups_alone:
        return False
    return launch.ranks > 1 or (not has_locks and launch.servers > 0)


def _ports(nodes: Nodes, *, is_only: bool) -> tuple[int, int]:
    """Return the ports for the only rank of a launch and for the store of its ranks; 0 for any.

    Where nodes come and go, the rendezvous has the requested port as long as the launch lasts.
    """
    port = nodes.main_port or 0
    if is_only and nodes.count in (None, 1):
        return port, 0
    return 0, port if nodes.least is None else 0


def _plan(
    launch: Launch,
    place: RunDirectory,
    common: Common | None,
    private: Path,
    port: int,
    files: Path | None,
    generation: Generation,
) -> Plan:
    """Return the plan of a generation, and say where the ranks of the first one are.

    Args:
        launch: the launch.
        place: makes the run's directories, for the first generation.
        common: what all launchers know, if there are several.
        private: a directory for the launch's own files.
        port: of a rank that is alone: it may host a store there, if the script wants one.
        files: stores of ranks that one launcher starts, a file for each generation, which torch locks;
            `None` on a file system without locks, where the store is at the launcher's port.
        generation: the generation.
    """
    if launch.nodes is None:
        store = None if files is None else files / f"store-{generation.number}"
        generation = dataclasses.replace(generation, store=store, port=generation.port or port)
    elif (
        generation.membership is not None and generation.membership.size == 1 and not launch.servers
    ):
        generation = dataclasses.replace(generation, port=port)
    run_dir = place.path
    if run_dir is None:
        if generation.membership is not None:  # before anything is made
            check_replicas(launch, generation.membership.size)
        run_dir = _directory(launch.spec, place, common, private, generation)
    plan = make_plan(launch, generation, run_dir=run_dir, log_dir=place.logs, error_dir=private)
    if generation.number == 0:
        for line in placement(plan):
            say(line)
    return plan


def _directory(
    spec: LaunchSpec,
    place: RunDirectory,
    common: Common | None,
    private: Path,
    generation: Generation,
) -> Path:
    """Make the run's directory; name an unfinished run where a new one begins."""
    if common is not None:
        unfinished.check(spec, place.name, common)
    is_first = generation.membership is None or generation.membership.index == 0
    if is_first and (line := unfinished.note(spec, place.name)) is not None:
        say(line)
    return place.make(None if common is None else common.stamp, private)


@contextlib.contextmanager
def _joined(launch: Launch, name: str, interrupts: Interrupts) -> Iterator[Rounds | None]:
    """Meet the launchers of the other nodes, if there are any."""
    nodes, config = launch.spec.nodes, launch.nodes
    if config is None:
        with kept_port(nodes.main_port or 0):
            pass  # one that is taken is refused before anything is made
        yield None
        return
    from lockstep.launch.nodes.membership_rounds import Rounds
    from lockstep.world.rendezvous.rank_rendezvous import chosen_interface, join_timeout

    config = dataclasses.replace(
        config,
        seconds=nodes.join_timeout or join_timeout().total_seconds(),
        last_call=nodes.last_call or config.last_call,
    )
    if not config.fixed:  # now, and not when a node comes that is one too many
        for count in (config.needed, config.count):
            check_replicas(launch, count * launch.ranks)
    rounds = Rounds(
        config,
        _describe(launch),
        interface=nodes.interface or chosen_interface(),
        check=_patience(config, interrupts),
        say=say,
        stamp=unfinished.stamp(launch.spec, name),
    )
    with closing(rounds):
        yield rounds


def _describe(launch: Launch) -> Launcher:
    here, environ = launch.machine, launch.environ
    hidden = environ.get(here.visible_variable, "")
    known = tuple(gpu.uuid for gpu in visible(here.cards, environ).gpus if gpu.uuid)
    return Launcher(
        ranks=launch.ranks,
        name=socket.gethostname(),
        cpus=tuple(sorted(os.sched_getaffinity(0))),
        gpus=known or tuple(filter(None, hidden.split(","))),
    )


def _patience(config: RendezvousConfig, interrupts: Interrupts) -> Callable[[], None]:
    """Return what is called while other launchers are waited for: says so, after a moment."""
    began = last = time.monotonic()
    told = False

    def check() -> None:
        nonlocal began, last, told
        interrupts.check()
        now = time.monotonic()
        if now - last > _SILENCE_SECONDS:  # a rendezvous passed meanwhile, and another follows
            began, told = now, False
        last = now
        if not told and now - began > _SILENCE_SECONDS:
            told = True
            wait = f"{config.seconds:g} s at most"
            say(f"lockstep: waiting for the other nodes at {config.place}, {wait}")

    return check


@contextlib.contextmanager
def private_directory() -> Iterator[Path]:
    """Make a directory that only this user can read, and remove it at the end.

    What launchers that were killed have left is removed, too: a lock tells whether one lives.
    """
    for left in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_LOCK}"):
        _remove_left(left)
    path = Path(tempfile.mkdtemp(prefix=_PREFIX))
    lock = os.open(path / "new", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        with contextlib.suppress(OSError):  # a file system without locks: then it may be left
            fcntl.flock(lock, fcntl.LOCK_EX)
            os.write(lock, host.identity().encode())
            (path / "new").rename(path / _LOCK)
        yield path
    finally:
        os.close(lock)
        shutil.rmtree(path, ignore_errors=True)


def _remove_left(file: Path) -> None:
    """Remove the directory of a launcher that is gone, under its lock."""
    with contextlib.suppress(OSError):  # another user's, or of a launcher that lives
        if file.parent.is_symlink() or file.parent.stat().st_uid != os.getuid():
            return
        lock = os.open(file, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A file system that nodes share may have locks for each node alone.
            if os.pread(lock, 4096, 0) == host.identity().encode():
                remove_left(file.parent)
        finally:
            os.close(lock)


def _preload(launch: Launch) -> Preload | None:
    """Return what imports, before workers are forked, what they share besides what the launcher has."""
    spec = launch.spec
    # A function's parent is the user's interpreter: it imports what the user says.
    wanted = launch.environ.get("LOCKSTEP_PRELOAD", "1") != "0"
    if not (wanted and launch.sources.uses_lockstep and spec.start == "fork"):
        return None
    found = launch.sources.imports
    if all(one.module in sys.modules for one in found):
        return None
    threads = share_of_threads(spec, launch.environ, launch.machine.cores, launch.ranks)
    return partial(import_shared, found, threads)
