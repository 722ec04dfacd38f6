"""Decide after which failures the workers start again, and prepare each start.

Each start needs a rendezvous of the launchers, a store and a plan. A failure that came from outside the
script (a signal, a lost node, a full disk) may not happen again. An exception of the script would: a run is
deterministic, so the same step fails the same way. Failures are counted in a row; the count starts anew
once the run has made progress after the last failure.

A generation is the set of workers between two restarts. A rendezvous round is the time in which the same
launchers take part. Each generation has a store of its own, so that workers never read keys of earlier
workers: torchrun 2.13 keeps one store, and Gloo then hangs on addresses of dead processes.

    round 1: generations 0, 1, 2   a launcher joins, or is lost   round 2: generation 3 …
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from pathlib import Path

from torch.distributed import TCPStore

from lockstep.launch import earlier_runs
from lockstep.launch.agent.failure import Kind, Policy, Verdict
from lockstep.launch.dry_run import placement
from lockstep.launch.nodes.client import CoordinatorClient, RoundOverError
from lockstep.launch.nodes.config import port_taken
from lockstep.launch.nodes.membership import Common, Membership
from lockstep.launch.nodes.membership_rounds import Rounds
from lockstep.launch.output import say
from lockstep.launch.plan import Generation, Launch, Plan, check_replicas, make_plan
from lockstep.launch.run_directory import RunDirectory
from lockstep.state.checkpoint.shared_memory import (
    AFTER_RUN,
    SLOTS,
    VARIABLE,
    Descriptors,
    ProgressSlot,
    StatusPage,
    progress,
    run_of,
)
from lockstep.state.files.lock import LAUNCHER_VARIABLE
from lockstep.world import network
from lockstep.world.rendezvous.store import host_store
from lockstep.world.waiting import Check, go_on

#: Default number of failures in a row without progress after which workers still start again.
DEFAULT = 3
_HOST_HINT = (
    "launchers that meet in a shared directory survive it: --rdzv-endpoint file:///DIRECTORY"
)


class RankProgress:
    """Progress of this launcher's ranks, read from memory that the launcher shares with them.

    Args:
        memory: the shared memory; workers inherit it through the fork server.
    """

    def __init__(self, memory: Descriptors, ranks: int) -> None:
        self._memory = memory
        self._page = StatusPage(memory.page)
        self.slots: tuple[ProgressSlot, ...] = tuple(
            self._page.slot(index) for index in range(min(ranks, SLOTS))
        )
        self._opened = False

    def begin(self) -> None:
        """Clear the ranks' progress before the workers start again; all earlier workers have ended."""
        self._opened = self.opened
        self._page.clear()

    @property
    def pids(self) -> set[int]:
        """Process ids of the running ranks that have opened a `lockstep.Run`."""
        return {slot.pid for slot in self.slots} - {0}

    @property
    def opened(self) -> bool:
        """Whether any rank has opened a `lockstep.Run`, before or after the last restart."""
        return self._opened or bool(self.pids)

    def is_inside(self, index: int) -> bool:
        """Whether the `index`-th rank of this launcher is inside `with lockstep.Run(…)`."""
        slot = self.slots[index] if index < len(self.slots) else None
        return slot is not None and slot.pid != 0 and slot.waiting != AFTER_RUN

    @property
    def step(self) -> int:
        """Number of optimizer steps that the run has done, by the rank that is furthest."""
        return max(slot.step for slot in self.slots)

    @property
    def snapshot(self) -> tuple[bytes, int]:
        """Run tag and number of the newest complete snapshot, or `b""` and 0 if there is none.

        A snapshot is a copy of a run's state in memory. The tag identifies a run of the script.
        """
        return progress(self._memory)

    @property
    def origin(self) -> str:
        """End of a message about a restart: says that it uses a saved state; empty without one."""
        tag, number = self.snapshot
        if not number:
            return ""
        run = run_of(tag)
        of_run = f" of run {run + 1} in the script" if run else ""
        return f", from the newest snapshot or checkpoint{of_run}"

    def variables(self, index: int, ranks: int) -> dict[str, str]:
        """Return environment variables that give a worker the memory shared with the launcher.

        `index` is the worker's number among the `ranks` ranks of this launcher.
        """
        return {
            VARIABLE: self._memory.variable(),
            "LOCKSTEP_SLOT": f"{index}/{ranks}",
            LAUNCHER_VARIABLE: str(os.getpid()),
        }


class Restarts:
    """The restart policy of a launch; with several launchers, only that of launcher 0 is applied.

    Args:
        limit: maximum number of failures in a row without progress that are followed by a restart; `None`
            means `DEFAULT` for scripts that use Lockstep, 0 for other scripts.
        uses_lockstep: whether the script's source imports Lockstep.
        leaves_out: whether the launch may go on without a rank that computes wrongly.
    """

    def __init__(
        self,
        limit: int | None,
        progress: RankProgress,
        *,
        uses_lockstep: bool,
        leaves_out: bool = False,
    ) -> None:
        self._limit, self._leaves_out = limit, leaves_out
        self._progress = progress
        self._uses_lockstep = uses_lockstep
        self._in_a_row = 0
        self._last: object = None
        self._count = 0  # generations after the first

    @property
    def limit(self) -> int:
        """Maximum number of restarts for the variable `TORCHELASTIC_MAX_RESTARTS`; 0 if not set."""
        return self._limit or 0

    @property
    def is_run(self) -> bool:
        """Whether the script uses Lockstep, so that a restart resumes from the saved state."""
        return self._uses_lockstep or self._progress.opened

    def decide(self, verdict: Verdict) -> str | None:
        """Return the message to print if the workers are to start again; otherwise `None`.

        `verdict` is the message about the failure. With several launchers, the coordinator of launcher 0
        calls this method, in its thread.
        """
        self._count_failure()
        limit = self._limit
        if limit is None:
            limit = DEFAULT if self.is_run and verdict.kind is not Kind.SCRIPT else 0
        is_wrong = verdict.wrong is not None
        is_refused = verdict.kind is Kind.REFUSED or (is_wrong and not self._leaves_out)
        if is_refused or self._in_a_row > limit:
            return None
        self._count += 1
        origin = self._progress.origin
        if is_wrong:
            origin = (
                f" without rank {verdict.wrong}, from the newest state that an audit has confirmed"
            )
        return f"{verdict.brief}; restart {self._count}{origin}"

    def count_restart(self) -> None:
        """Count a failure and a restart that launcher 0 decided on.

        All launchers count, since each may become launcher 0 later.
        """
        self._count_failure()
        self._count += 1

    def _count_failure(self) -> None:
        newest = self._progress.snapshot
        self._in_a_row = self._in_a_row + 1 if newest == self._last else 1
        self._last = newest


def policy_of(launch: Launch, progress: RankProgress, *, is_only: bool) -> Restarts:
    """Return the restart policy of `launch`.

    `is_only` is whether the launch has a single launcher.
    """
    settings, environ = launch.spec.settings, launch.environ
    return Restarts(
        settings.value("max_restarts", environ),
        progress,
        uses_lockstep=launch.sources.uses_lockstep,
        leaves_out=is_only and settings.value("mesh", environ) is None,
    )


class GenerationRendezvous:
    """Waits for all launchers before each start of workers, and opens the workers' store.

    Args:
        common: fields of `Generation` that are the same after every restart.
        rounds: rendezvous rounds of several launchers; `None` for a single launcher.
        port: port of the store if this launcher hosts it; 0 for any free port.
        policy: restart policy that this launcher applies for all launchers if it is launcher 0.
    """

    def __init__(
        self,
        common: Generation,
        ranks: int,
        rounds: Rounds | None = None,
        port: int = 0,
        policy: Policy = lambda _: None,
    ) -> None:
        self._common = common
        self._port = port
        self._rounds = rounds
        self._alone = Membership.alone(ranks)
        self._policy = policy
        #: Store of the current workers, if this launcher hosts it.
        self._store: TCPStore | None = None
        #: Connection to the coordinator of the launchers; `None` for a single launcher.
        self.coordinator: CoordinatorClient | None = None
        #: Number of the current generation: how many times workers have been started again.
        self.generation = -1

    @property
    def membership(self) -> Membership:
        """The launchers that take part now, with their ranks and nodes."""
        return self._alone if self._rounds is None else self._rounds.membership

    @property
    def may_leave(self) -> bool:
        """Whether the launch continues if this launcher leaves."""
        return self._rounds is not None and not self._rounds.fixed and self.membership.count > 1

    def leave_out(self, rank: int) -> None:
        """Leave a rank out of all following generations; call this only for a single launcher.

        `rank` is the rank's number in the current generation; higher ranks move down by one.
        """
        ranks = self._alone.size + len(self._common.left_out)  # of the first generation
        left = [place for place in range(ranks) if place not in self._common.left_out]
        self._common = replace(self._common, left_out=(*self._common.left_out, left[rank]))
        self._alone = Membership.alone(self._alone.size - 1)

    def next_generation(self, check: Check = go_on) -> Generation:
        """Wait until all launchers have stopped their workers; return the next generation.

        Args:
            check: called repeatedly during the wait; may raise to end it.

        Raises:
            RoundOverError: if the launch ends instead.
            WorldError: if a rendezvous of launchers fails.
        """
        self._store = None
        if self._rounds is None:
            self.generation += 1
            port = self._open_store()
        else:
            port = self._enter(self._rounds, check)
        return replace(
            self._common,
            number=self.generation,
            membership=self.membership,
            port=port,
            replicas=None if self._rounds is None else self._rounds.replicas,
        )

    def _open_store(self) -> int:
        """Host a `TCPStore` for the workers; return its port, 0 if workers do not need a store."""
        if not self._common.listens:
            return 0
        try:
            self._store = host_store(
                self._port, loopback=self.membership.address == network.LOOPBACK
            )
        except OSError as error:
            raise port_taken(self._port, network.reason(error)) from error
        return int(self._store.port)

    def _enter(self, rounds: Rounds, check: Check) -> int:
        """Wait until all launchers are ready to start workers; return the port of the new store.

        `rounds` makes the launchers' rendezvous. `check` is called repeatedly during the wait.
        """
        while True:
            client = self.coordinator = self._client(rounds)
            self.generation = max(rounds.generation, self.generation + 1)
            try:
                return client.enter(self.generation, self._open_store, check)
            except RoundOverError as over:
                if over.decision.kind != "round":
                    raise

    def _client(self, rounds: Rounds) -> CoordinatorClient:
        """Return this launcher's connection to the coordinator on launcher 0.

        If the coordinator has decided that the launchers change, join the next rendezvous round first.
        """
        client = self.coordinator
        if client is not None:
            decision, lost_coordinator = client.decision, client.has_lost_coordinator
            if decision is None or decision.kind != "round":
                return client
            self._close_round()
            rounds.next(decision.staying, self.generation + 1, lost_coordinator=lost_coordinator)
        return CoordinatorClient(
            rounds.membership,
            rounds.launcher_0,
            number=rounds.number,
            generation=max(rounds.generation, self.generation),
            policy=self._policy,
            least=rounds.least,
            hint=None if rounds.fixed or rounds.survives_host else _HOST_HINT,
        )

    def _close_round(self) -> None:
        if self.coordinator is not None:
            self.coordinator.close()
            self.coordinator = None

    def finish(self) -> None:
        """Close the connection to launcher 0; launcher 0 itself records the end of the launch."""
        decision = None if self.coordinator is None else self.coordinator.decision
        self._close_round()
        self._store = None
        over = decision is not None and decision.kind in ("end", "done")
        if over and self._rounds is not None and self.membership.index == 0:
            with contextlib.suppress(RuntimeError):  # the store is lost: keep the failure message
                self._rounds.end()


def plan_generation(
    launch: Launch,
    place: RunDirectory,
    common: Common | None,
    private: Path,
    port: int,
    files: Path | None,
    generation: Generation,
) -> Plan:
    """Return the commands, environment variables and files of the workers of one generation.

    The first call makes the run's directory.

    Args:
        launch: what to launch, and the facts of this machine.
        place: run directory and log directory, made here if the run has none yet.
        common: constants of a launch with several launchers, such as the name of the run's
            directory.
        private: temporary directory of this launcher.
        port: port at which the script may host a store, if the launch has a single rank.
        files: directory for a `FileStore` after each restart, which the ranks of a single launcher
            use; `None` on a file system without locks, where they use the launcher's `TCPStore`.
        generation: settings of the rendezvous of these workers.
    """
    members = generation.membership
    assert members is not None, "known after the rendezvous"
    if launch.nodes is None:
        store = None if files is None else files / f"store-{generation.number}"
        generation = replace(generation, store=store, port=generation.port or port)
    elif members.size == 1 and not launch.servers:
        generation = replace(generation, port=port)
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
