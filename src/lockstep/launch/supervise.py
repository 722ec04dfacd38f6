"""One launch from its fork server to its verdict, leaving nothing behind."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import secrets
import shutil
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.checkpoint.shared_memory import Descriptors
from lockstep.errors import LockstepError
from lockstep.launch import failure, imports, servers, source, stdin, worker
from lockstep.launch.dry_run import placement
from lockstep.launch.failure import Failure, MemoryKills, Verdict
from lockstep.launch.forkserver import ForkServer, Job, Preload
from lockstep.launch.gpus import visible
from lockstep.launch.hang import HangWatch
from lockstep.launch.interrupts import Interrupts
from lockstep.launch.machine import Machine
from lockstep.launch.nodes.config import Nodes, RendezvousConfig, rendezvous_config
from lockstep.launch.nodes.membership import Launcher
from lockstep.launch.old_scripts import kept_port
from lockstep.launch.output import Output, say
from lockstep.launch.plan import (
    Meeting,
    Plan,
    check_replicas,
    count_ranks,
    make_plan,
    threads_of_workers,
)
from lockstep.launch.preload import import_shared
from lockstep.launch.rank_progress import RankProgress
from lockstep.launch.restarts import Restarts
from lockstep.launch.run_directory import RunDirectory, remove_left
from lockstep.launch.spec import LaunchSpec
from lockstep.world import host

#: How long a launcher waits for others before it says that it does.
_SILENCE_SECONDS = 3.0
#: Names of a launcher's own directory, and of the lock in it.
_PREFIX, _LOCK = "lockstep-", "launcher.lock"

if TYPE_CHECKING:
    from lockstep.launch.nodes.rounds import Rounds
    from lockstep.launch.rendezvous import Rendezvous


def supervise(
    spec: LaunchSpec,
    here: Machine,
    job: Job,
    place: RunDirectory,
    private: Path,
    interrupts: Interrupts,
    deadline: float | None = None,
) -> Verdict | None:
    """Run the workers of `spec` to their end; return the verdict if they failed.

    Args:
        spec: the launch.
        here: facts about this machine.
        job: what each worker does.
        place: makes the run's directories, once the launchers of all nodes have met.
        private: a directory for this launch's own files.
        interrupts: signals to the launcher.
        deadline: moment of `time.monotonic` at which it must be over.

    Raises:
        Interrupted: if the launcher was told to stop.
        NotNeeded: if the launch ended before there was a place for this launcher.
        TimeoutError: if `deadline` passed.
        WorldError: if the launchers of other nodes cannot be met.
    """
    environ = dict(os.environ)
    ranks, is_run = count_ranks(spec, here, environ), source.imports(spec, "lockstep")
    has_locks = (private / _LOCK).exists()
    listens = _listens(spec, environ, ranks, is_run=is_run, has_locks=has_locks)
    only_port, store_port = _ports(spec.nodes, is_only=not listens)
    job = worker.or_server(spec, job)
    with (
        stdin.restored(),
        _memory() as memory,  # before the server is forked, so that workers inherit it
        _serving(job, interrupts, _preload(spec, environ, is_run=is_run)) as server,
        _showing() as output,
        _gathered(spec, here, environ, interrupts) as rounds,
        kept_port(only_port) as port,  # after the fork, so that no worker inherits what keeps it
    ):
        from lockstep.launch.agent import Agent
        from lockstep.launch.rendezvous import Rendezvous

        name, token = _agree(rounds, place, private)
        rendezvous = Rendezvous(name, ranks, rounds, port=store_port, listens=listens)
        alone = _alone(private if has_locks else None, port, token, listens=listens)
        several = _among_several(None if servers.count(spec, environ) else port, token)
        meets = alone if rounds is None else several
        standing = RankProgress(memory, ranks)
        agent = Agent(
            _planner(spec, here, environ, place, private, meets),
            _judge(rendezvous),
            rendezvous,
            server=server,
            output=output,
            interrupts=interrupts,
            standing=standing,
            hangs=HangWatch(standing.slots, spec.fault_tolerance.patience(environ)),
            restarts=Restarts(spec.fault_tolerance.restarts(environ)),
            is_run=is_run,
            deadline=deadline,
        )
        # The server ends before the output does: what is left of the workers cannot write after it.
        with contextlib.closing(server):
            agent.run()
    return agent.verdict


def _listens(
    spec: LaunchSpec, environ: dict[str, str], ranks: int, *, is_run: bool, has_locks: bool
) -> bool:
    """Return whether ranks meet in a store at a port: files do where they can be locked."""
    if has_locks and is_run and source.leaves_groups_alone(spec):
        return False
    return ranks > 1 or (not has_locks and servers.count(spec, environ) > 0)


def _ports(nodes: Nodes, *, is_only: bool) -> tuple[int, int]:
    """Return the ports for the only rank of a launch and for the store of its ranks; 0 for any.

    Where nodes come and go, they meet at the port that was asked for as long as the launch lasts.
    """
    port = nodes.main_port or 0
    if is_only and nodes.count in (None, 1):
        return port, 0
    return 0, port if nodes.least is None else 0


def _check_port(port: int) -> None:
    """Refuse a port that is taken, before anything is made."""
    with kept_port(port):
        return


def _planner(
    spec: LaunchSpec,
    here: Machine,
    environ: Mapping[str, str],
    place: RunDirectory,
    private: Path,
    meets: Callable[[Meeting], Meeting],
) -> Callable[[Meeting], Plan]:
    """Return what plans a generation, whose ranks meet as `meets` says, and says where they are."""

    def plan(meeting: Meeting) -> Plan:
        meeting = meets(meeting)
        assert place.path is not None, "made when the launchers had met"
        made = make_plan(
            spec,
            here,
            environ,
            meeting=meeting,
            run_dir=place.path,
            log_dir=place.logs,
            error_dir=private,
        )
        if meeting.generation == 0:
            for line in placement(made):
                say(line)
        return made

    return plan


def _alone(
    private: Path | None, port: int, token: str, *, listens: bool
) -> Callable[[Meeting], Meeting]:
    """Return where the ranks of each generation meet if this launcher starts all: in a private file.

    torch locks that file. On a file system without locks they meet at the port where the launcher listens.
    At `port`, rank 0 may host a store if the script wants one and this launcher `listens` at none.
    """

    def meets(meeting: Meeting) -> Meeting:
        return dataclasses.replace(
            meeting,
            store=None if private is None else private / f"store-{meeting.generation}",
            token=token,
            listens=listens,
            port=meeting.port or port,
        )

    return meets


def _among_several(port: int | None, token: str) -> Callable[[Meeting], Meeting]:
    """Return where they meet if there are several launchers: at the store of launcher 0.

    A rank that is alone gets a `port` of its own.
    """

    def meets(meeting: Meeting) -> Meeting:
        if meeting.size == 1 and port is not None:
            meeting = dataclasses.replace(meeting, port=port)
        return dataclasses.replace(meeting, token=token)

    return meets


@contextlib.contextmanager
def _gathered(
    spec: LaunchSpec, here: Machine, environ: Mapping[str, str], interrupts: Interrupts
) -> Iterator[Rounds | None]:
    """Meet the launchers of the other nodes, if there are any."""
    nodes = spec.nodes
    # A function is launched for its values, which other launchers would not get.
    work = (spec.target, *spec.args)
    config = None if spec.kind == "function" else rendezvous_config(nodes, work, environ)
    if config is None:
        _check_port(nodes.main_port or 0)
        yield None
        return
    from lockstep.launch.nodes.join import LAST_CALL_SECONDS, Terms
    from lockstep.launch.nodes.rounds import Rounds
    from lockstep.world.meet import chosen_interface, join_timeout

    own = _describe(spec, here, environ)
    terms = Terms(
        least=config.least or config.count,
        most=config.count,
        fixed=config.least is None,
        seconds=nodes.join_timeout or join_timeout().total_seconds(),
        last_call=nodes.last_call or LAST_CALL_SECONDS,
    )
    if not terms.fixed:  # now, and not when a node comes that is one too many
        check_replicas(spec, environ, terms.most * own.ranks)
    rounds = Rounds(
        config,
        own,
        terms,
        interface=nodes.interface or chosen_interface(),
        check=_patience(config, terms.seconds, interrupts),
        say=say,
    )
    with contextlib.closing(rounds):
        yield rounds


def _describe(spec: LaunchSpec, here: Machine, environ: Mapping[str, str]) -> Launcher:
    hidden = environ.get(here.visible_variable, "")
    known = tuple(gpu.uuid for gpu in visible(here.cards, environ).gpus if gpu.uuid)
    return Launcher(
        ranks=count_ranks(spec, here, environ),
        name=socket.gethostname(),
        cpus=tuple(sorted(os.sched_getaffinity(0))),
        gpus=known or tuple(filter(None, hidden.split(","))),
    )


def _patience(
    config: RendezvousConfig, seconds: float, interrupts: Interrupts
) -> Callable[[], None]:
    """Return what is called while other launchers are waited for: says so, after a moment."""
    began = last = time.monotonic()
    told = False

    def check() -> None:
        nonlocal began, last, told
        interrupts.check()
        now = time.monotonic()
        if now - last > _SILENCE_SECONDS:  # they met meanwhile, and meet again
            began, told = now, False
        last = now
        if not told and now - began > _SILENCE_SECONDS:
            told = True
            say(f"lockstep: waiting for the other nodes at {config.place}, {seconds:g} s at most")

    return check


def _judge(rendezvous: Rendezvous) -> Callable[[list[Failure]], Verdict]:
    """Return what gives the verdict over failures from here on, of ranks that meet there."""
    kills = MemoryKills()

    def judge(failures: list[Failure]) -> Verdict:
        size = rendezvous.membership.size
        return failure.verdict(failures, size, killed_for_memory=kills.grew())

    return judge


def _agree(rounds: Rounds | None, place: RunDirectory, private: Path) -> tuple[str, str]:
    """Return the name of this launch, which no other has, and its secret; make its run's directories."""
    run_id, token = uuid.uuid4().hex, secrets.token_hex(16)
    if rounds is None:
        place.make(None, private)
        return run_id, token
    try:
        if rounds.leads:
            run_dir = place.make(None, private)
            rounds.tell([run_id, token, run_dir.name])
        else:
            run_id, token, directory = rounds.hear()
            place.make(directory, private)
    except LockstepError as error:
        rounds.fail(error)
        raise
    return run_id, token


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


def _preload(spec: LaunchSpec, environ: Mapping[str, str], *, is_run: bool) -> Preload | None:
    """Return what imports, before workers are forked, what they share besides what the launcher has."""
    # A function's parent is the user's interpreter: it imports what the user says.
    wanted = environ.get("LOCKSTEP_PRELOAD", "1") != "0"
    if not (wanted and is_run and spec.start == "fork" and spec.kind != "function"):
        return None
    found = imports.at_the_top(spec)
    if all(one.module in sys.modules for one in found):
        return None
    return partial(import_shared, found, threads_of_workers(spec))


@contextlib.contextmanager
def _memory() -> Iterator[Descriptors]:
    memory = Descriptors.create()
    try:
        yield memory
    finally:
        memory.close()


@contextlib.contextmanager
def _serving(job: Job, interrupts: Interrupts, preload: Preload | None) -> Iterator[ForkServer]:
    server = ForkServer(job, interrupts.polite, preload)
    try:
        yield server
    finally:
        server.close()


@contextlib.contextmanager
def _showing() -> Iterator[Output]:
    output = Output()
    try:
        yield output
    finally:
        output.finish()
