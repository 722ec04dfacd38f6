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

from lockstep.launch import earlier_runs, stdin
from lockstep.launch.agent import worker
from lockstep.launch.agent.failure import Verdict
from lockstep.launch.agent.forkserver import ForkServer, Job, Preload
from lockstep.launch.agent.hang import HangWatch
from lockstep.launch.agent.interrupts import Interrupts
from lockstep.launch.agent.restarts import RankProgress, Restarts
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
from lockstep.launch.target.old_scripts import kept_port
from lockstep.launch.target.preload import import_shared
from lockstep.state.checkpoint.shared_memory import Descriptors
from lockstep.world import host

#: How long a launcher waits for others before it prints so.
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

    `private` is a directory for this launch's own files; `deadline` a moment of `time.monotonic`.

    Raises:
        Interrupted: if a signal stopped the launcher.
        NotNeeded: if the launch ended before there was a place for this launcher.
        TimeoutError: if `deadline` passed.
        WorldError: if the rendezvous with other launchers fails.
    """
    has_locks = (private / _LOCK).exists()
    listens = _listens(launch, has_locks=has_locks)
    only_port, store_port = _ports(launch.spec.nodes, is_only=not listens)
    job, preload = worker.or_server(launch.spec, job), _preload(launch)
    with (
        stdin.restored(),
        closing(Descriptors.create()) as memory,  # before the server is forked: workers inherit it
        closing(ForkServer(job, interrupts.preempting, preload, interrupts.check)) as server,
        closing(Output()) as output,
        _joined(launch, place.name, interrupts) as rounds,
        kept_port(only_port) as port,  # after the fork, so that no worker inherits what keeps it
        # Closed before the output: what is left of the workers cannot write after it.
        closing(server),
    ):
        from lockstep.launch.agent.agent import Agent
        from lockstep.launch.agent.rendezvous import GenerationRendezvous

        progress = RankProgress(memory, launch.ranks)
        hangs, restarts = _policies(launch, progress)
        shared = None if rounds is None else rounds.common
        common = shared or Common.new(launch.ranks)
        generation = Generation(
            run_id=common.run_id,
            token=common.token,
            max_restarts=restarts.limit,
            listens=listens or rounds is not None,
        )
        agent = Agent(
            partial(_plan, launch, place, shared, private, port, private if has_locks else None),
            GenerationRendezvous(generation, launch.ranks, rounds, store_port, restarts.decide),
            server=server,
            output=output,
            interrupts=interrupts,
            progress=progress,
            hangs=hangs,
            restarts=restarts,
            deadline=deadline,
        )
        agent.run()
    return agent.verdict


def _policies(launch: Launch, progress: RankProgress) -> tuple[HangWatch, Restarts]:
    """Return the watch over hangs and the restart policy, from the settings of the launch."""
    settings, environ = launch.spec.settings, launch.environ
    hangs = HangWatch(progress.slots, settings.value_or_default("hang_timeout", environ))
    limit, uses_lockstep = settings.value("max_restarts", environ), launch.sources.uses_lockstep
    return hangs, Restarts(limit, progress, uses_lockstep=uses_lockstep)


def _listens(launch: Launch, *, has_locks: bool) -> bool:
    """Whether the ranks' store listens at a port; otherwise it is a file, which needs locks."""
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
    """Return the plan of a generation; before the first, make the run's directory and print placements.

    A rank that is alone may host a store at `port`, if the script wants one. Ranks that one launcher starts
    have a store in `files`, a file for each generation, which torch locks; `files` is `None` on a file
    system without locks, where the store is at the launcher's port.
    """
    members = generation.membership
    assert members is not None, "known after the rendezvous"
    if launch.nodes is None:
        store = None if files is None else files / f"store-{generation.number}"
        generation = dataclasses.replace(generation, store=store, port=generation.port or port)
    elif members.size == 1 and not launch.servers:
        generation = dataclasses.replace(generation, port=port)
    run_dir = place.path
    if run_dir is None:
        check_replicas(launch, members.size)  # before anything is made
        if common is not None:
            earlier_runs.check(launch.spec, place.name, common)
        line = None if members.index else earlier_runs.note(launch.spec, place.name)
        if line is not None:
            say(line)
        run_dir = place.make(None if common is None else common.stamp, private)
    plan = make_plan(launch, generation, run_dir=run_dir, log_dir=place.logs, error_dir=private)
    if generation.number == 0:
        for line in placement(plan):
            say(line)
    return plan


@contextlib.contextmanager
def _joined(launch: Launch, name: str, interrupts: Interrupts) -> Iterator[Rounds | None]:
    """Join the rendezvous with the launchers of the other nodes, if there are any."""
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
    machine = launch.machine
    hidden = launch.environ.get(machine.visible_variable, "")
    gpus = tuple(gpu.uuid for gpu in visible(machine.cards, launch.environ).gpus if gpu.uuid)
    own = Launcher(
        ranks=launch.ranks,
        name=socket.gethostname(),
        cpus=tuple(sorted(os.sched_getaffinity(0))),
        gpus=gpus or tuple(filter(None, hidden.split(","))),
    )
    rounds = Rounds(
        config,
        own,
        interface=nodes.interface or chosen_interface(),
        check=_waiting_check(config, interrupts),
        say=say,
        stamp=earlier_runs.stamp(launch.spec, name),
    )
    with closing(rounds):
        yield rounds


def _waiting_check(config: RendezvousConfig, interrupts: Interrupts) -> Callable[[], None]:
    """Return a function to call while other launchers are waited for: after a moment it prints so."""
    began = last = time.monotonic()
    is_printed = False

    def check() -> None:
        nonlocal began, last, is_printed
        interrupts.check()
        now = time.monotonic()
        if now - last > _SILENCE_SECONDS:  # a rendezvous passed meanwhile, and another follows
            began, is_printed = now, False
        last = now
        if not is_printed and now - began > _SILENCE_SECONDS:
            is_printed = True
            wait = f"{config.seconds:g} s at most"
            say(f"lockstep: waiting for the other nodes at {config.place}, {wait}")

    return check


@contextlib.contextmanager
def private_directory() -> Iterator[Path]:
    """Make a directory that only this user can read, and remove it at the end.

    Directories that killed launchers have left are removed, too: a launcher that lives holds a lock.
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
    """Return the function that imports the script's packages in the fork server, if there are any."""
    spec = launch.spec
    # A function's parent is the user's interpreter, which has the imports already.
    wanted = launch.environ.get("LOCKSTEP_PRELOAD", "1") != "0"
    if not (wanted and launch.sources.uses_lockstep and spec.start == "fork"):
        return None
    found = launch.sources.imports
    if all(one.module in sys.modules for one in found):
        return None
    threads = share_of_threads(spec, launch.environ, launch.machine.cores, launch.ranks)
    return partial(import_shared, found, threads)
