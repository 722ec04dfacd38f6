"""`supervise`: run one launch, from the start of its fork server to the clean-up after its workers."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.errors import RunError
from lockstep.launch import earlier_runs, stdin
from lockstep.launch.agent import worker
from lockstep.launch.agent.failure import Verdict
from lockstep.launch.agent.forkserver import ForkServer, Job
from lockstep.launch.agent.hang import HangWatch
from lockstep.launch.agent.interrupts import Interrupts
from lockstep.launch.devices.gpus import visible
from lockstep.launch.nodes.config import Nodes, RendezvousConfig
from lockstep.launch.nodes.membership import Common, Launcher
from lockstep.launch.output import Output, say
from lockstep.launch.plan import (
    Generation,
    Launch,
    check_replicas,
    share_of_threads,
)
from lockstep.launch.run_directory import LOCK, RunDirectory
from lockstep.launch.target.old_scripts import kept_port
from lockstep.launch.target.preload import import_shared
from lockstep.state.checkpoint.shared_memory import Descriptors

#: Seconds that a launcher waits for other launchers before it prints a message.
_SILENCE_SECONDS = 3.0
#: Maximum number of fork servers started with imports; each leaves out the package that failed before.
_TRIES = 4

#: Function that imports packages for all workers, except the given ones; returns one that breaks `fork`.
Importer = Callable[[Collection[str]], str | None]

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
    """Run the workers of a launch to their end; return the failure message, `None` after success.

    Args:
        launch: what to launch, and the facts of this machine.
        job: function that runs in each worker process.
        place: run directory and log directory.
        private: temporary directory of this launch.
        interrupts: the signals that the launcher has received.
        deadline: value of `time.monotonic` at which the launch times out; `None` for no limit.

    Raises:
        Interrupted: if a signal stopped the launcher.
        LaunchEnded: if the launch ended while this launcher waited to join it.
        TimeoutError: if `deadline` passed.
        WorldError: if the rendezvous with other launchers fails.
    """
    has_locks = (private / LOCK).exists()
    listens = _listens(launch, has_locks=has_locks)
    only_port, store_port = _ports(launch.spec.nodes, is_only=not listens)
    job, preload = worker.or_server(launch.spec, job), _preload(launch)
    with (
        stdin.restored(),
        closing(Descriptors.create()) as memory,  # before the server is forked: workers inherit it
        closing(_fork_server(job, preload, interrupts)) as server,
        closing(Output()) as output,
        _joined(launch, place.name, interrupts) as rounds,
        kept_port(only_port) as port,  # after the fork: workers must not inherit the socket
        closing(server),  # closed before the output, so that no worker writes later
    ):
        from lockstep.launch.agent import restarts
        from lockstep.launch.agent.agent import Agent

        ranks, settings, environ = launch.ranks, launch.spec.settings, launch.environ
        progress = restarts.RankProgress(memory, ranks)
        policy = restarts.policy_of(launch, progress, is_only=rounds is None)
        shared = None if rounds is None else rounds.common
        common, files = shared or Common.new(ranks), private if has_locks else None
        generation = Generation(
            run_id=common.run_id,
            token=common.token,
            max_restarts=policy.limit,
            listens=listens or rounds is not None,
        )
        agent = Agent(
            partial(restarts.plan_generation, launch, place, shared, private, port, files),
            restarts.GenerationRendezvous(generation, ranks, rounds, store_port, policy.decide),
            server=server,
            output=output,
            interrupts=interrupts,
            progress=progress,
            hangs=HangWatch(progress.slots, settings.value_or_default("hang_timeout", environ)),
            restarts=policy,
            deadline=deadline,
        )
        agent.run()
    return agent.verdict


def _listens(launch: Launch, *, has_locks: bool) -> bool:
    """Return whether the launcher, if it is the only one, hosts a `TCPStore` for its ranks.

    Otherwise ranks and servers that need a store use a `FileStore`. `has_locks`: whether the file system
    has locks, which a `FileStore` requires.
    """
    sources = launch.sources
    if has_locks and sources.uses_lockstep and sources.leaves_groups_alone:
        return False
    return launch.ranks > 1 or (not has_locks and launch.servers > 0)


def _ports(nodes: Nodes, *, is_only: bool) -> tuple[int, int]:
    """Return two ports: one for a store that the script may host, one for the launcher's own store.

    0 means any free port. `is_only` is whether a single launcher hosts no `TCPStore`. With `is_only` and
    one node, the port that the user requested is the first one; otherwise it is the second one. In an
    elastic launch both ports are 0, since the launchers' rendezvous uses the requested port.
    """
    port = nodes.main_port or 0
    if is_only and nodes.count in (None, 1):
        return port, 0
    return 0, port if nodes.least is None else 0


@contextlib.contextmanager
def _joined(launch: Launch, name: str, interrupts: Interrupts) -> Iterator[Rounds | None]:
    """Context manager: yield the `Rounds` object for the rendezvous with launchers of other nodes.

    It yields `None` if this launcher is the only one. `name` is the name of the run's directory in `runs/`.
    """
    nodes, config = launch.spec.nodes, launch.nodes
    if config is None:
        with kept_port(nodes.main_port or 0):
            pass  # raises an error if the port is in use
        yield None
        return
    from lockstep.launch.nodes.membership_rounds import Rounds
    from lockstep.world.rendezvous.rank_rendezvous import chosen_interface, join_timeout

    config = dataclasses.replace(
        config,
        seconds=nodes.join_timeout or join_timeout().total_seconds(),
        last_call=nodes.last_call or config.last_call,
    )
    if not config.fixed:  # check the maximum now, before any node joins
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
    """Return a function to call repeatedly during waits for other launchers.

    The function prints one message about a long wait, and raises `Interrupted` after a signal.
    """
    began = last = time.monotonic()
    is_printed = False

    def check() -> None:
        nonlocal began, last, is_printed
        interrupts.check()
        now = time.monotonic()
        if now - last > _SILENCE_SECONDS:  # the last rendezvous is over: this is another one
            began, is_printed = now, False
        last = now
        if not is_printed and now - began > _SILENCE_SECONDS:
            is_printed = True
            wait = f"{config.seconds:g} s at most"
            say(f"lockstep: waiting for the other nodes at {config.place}, {wait}")

    return check


def _preload(launch: Launch) -> Importer | None:
    """Return the function that imports the script's packages in the fork server; `None` to import none."""
    spec = launch.spec
    # The launcher of a function is the user's interpreter, which has imported the packages.
    wanted = launch.environ.get("LOCKSTEP_PRELOAD", "1") != "0"
    if not (wanted and launch.sources.uses_lockstep and spec.start == "fork"):
        return None
    found = launch.sources.imports
    if all(one.module in sys.modules for one in found):
        return None
    threads = share_of_threads(spec, launch.environ, launch.machine.cores, launch.ranks)
    return partial(import_shared, found, threads)


def _fork_server(job: Job, preload: Importer | None, interrupts: Interrupts) -> ForkServer:
    """Start the fork server and return the launcher's side of it.

    `preload` imports the script's packages in the server, so that no worker has to. A package whose import
    starts threads or uses a device would break forks, so each worker imports it itself.
    """
    # Only an actual import shows whether a package makes forks unsafe.
    skipped: list[str] = []
    while preload is not None and len(skipped) < _TRIES:
        server = ForkServer(job, interrupts.preempting, partial(preload, skipped))
        try:
            problem = server.wait_for_preload(interrupts.check)
        except RunError:  # an import has ended the server: import nothing before the forks
            server.close()
            break
        if problem is None:
            return server
        server.close()
        skipped.append(problem)
    return ForkServer(job, interrupts.preempting)
