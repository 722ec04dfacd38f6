"""`Context`: ranks, groups, device, settings and memory, which all parts of a run share."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from lockstep.engine.exchange.choose import choose_exchange, exactness_of
from lockstep.engine.layout.classes import of_servers, worst
from lockstep.engine.recovery.resume import ResumeInfo, launch_of, recall
from lockstep.engine.strategies.model_context import ModelContext
from lockstep.engine.strategies.precision import check_precision
from lockstep.engine.training.collective_check import CollectiveCheck
from lockstep.engine.training.fingerprint import describe, reproduced
from lockstep.engine.training.first_error import FirstError
from lockstep.engine.training.heartbeat import Heartbeat
from lockstep.engine.training.parallel_dims import Groups, ParallelDims, choose_mesh
from lockstep.engine.training.watchdog import Watchdog
from lockstep.errors import MismatchError
from lockstep.registry import STRATEGIES, StrategyEntry, choose_strategy
from lockstep.settings import Settings
from lockstep.state.checkpoint.shared_memory import (
    SLOTS,
    Descriptors,
    LossRing,
    ProgressSlot,
    StatusPage,
    tag_of,
)
from lockstep.state.checkpoint.snapshot import Snapshots
from lockstep.state.checkpoint.snapshot_schedule import SnapshotSchedule
from lockstep.state.files.run_file import Identity
from lockstep.state.record.recorder import Recorder
from lockstep.state.record.settings import RecordSettings
from lockstep.world import World
from lockstep.world.connect import Connection, connect
from lockstep.world.cores import shared_cores
from lockstep.world.devices import (
    check_device,
    choose_device,
    default_threads,
    keep_freed_memory,
    make_deterministic,
)
from lockstep.world.devices_asked import CORES
from lockstep.world.environments import ray
from lockstep.world.rendezvous.rank_rendezvous import RankRendezvous, join_ranks

#: Environment variable with a rank's index among its launcher's ranks and their count: `index/count`.
SLOT_VARIABLE = "LOCKSTEP_SLOT"
#: Parts of a run's identity that must be equal on all ranks.
_EQUAL = ("seed", "replicas", "threads", "precision", "method")
#: Directories that earlier runs of this process use.
taken_directories: set[Path] = set()
#: Process id and directory of the previous run.
_before: tuple[int, Path] | None = None


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory that the launcher shares with the ranks it started, such as status page and snapshots.

    The memory outlives the ranks' processes.
    """

    page: StatusPage  # status page, which all ranks of the launcher write
    slot: ProgressSlot  # this rank's part of the status page
    snapshots: Snapshots  # memory with copies of the run's state
    schedule: SnapshotSchedule  # schedule of snapshots
    losses: LossRing  # memory with this rank's latest losses
    losses_before: Mapping[int, int]  # losses of its ranks before a restart, by key

    @staticmethod
    def find(
        environ: Mapping[str, str],
        rendezvous: RankRendezvous,
        identity: Identity,
        ahead: int,
        *,
        forgets: bool,
    ) -> Memory | None:
        """Return the memory that the launcher shares with its ranks; `None` without it.

        Under `torchrun`, for example, there is no such memory. `ahead`: number of steps by which another
        rank may be ahead of rank 0. `forgets`: whether to drop the losses that were recorded before a
        restart, since they may be wrong.
        """
        world, run = rendezvous.world, rendezvous.number  # 0 for this process's first run
        if (found := _descriptors(environ, world)) is None:
            return None
        descriptors, index, count = found
        page = StatusPage(descriptors.page)
        slot = page.slot(index)
        # An earlier run of this process has left its numbers on the page.
        if index == 0 and run > 0:
            page.begin_run()
        slot.run, slot.step = run, 0
        tag = tag_of(json.dumps(asdict(identity), sort_keys=True).encode(), run)
        first = world.rank - index
        snapshots = Snapshots(
            descriptors, tag=tag, part=index, parts=count, first=first, size=world.size
        )
        schedule = SnapshotSchedule(snapshots, page, leads=index == 0, ahead=ahead)
        losses = LossRing(LossRing.memory(descriptors.losses), index, run)
        before = _losses_at_start(descriptors.losses, os.fstat(descriptors.losses).st_ino, count)
        if forgets:
            losses.clear()
            before = {}
        return Memory(page, slot, snapshots, schedule, losses, before)


@functools.cache
def _losses_at_start(descriptor: int, _inode: int, count: int) -> Mapping[int, int]:
    """Return the losses of a launcher's `count` ranks, as they were at the first call in this process.

    Those of a later run of the script are read here, too: after a restart the script computes its earlier
    runs again, which overwrite the memory. `_inode` tells the memory from others with this descriptor.
    """
    return LossRing.read_all(LossRing.memory(descriptor), count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Settings, ranks, process groups, device, record and watchdog that all parts of a run use."""

    settings: Settings
    rendezvous: RankRendezvous
    identity: Identity
    resume_info: ResumeInfo
    says_replicas: bool  # whether script or launch set the number of replicas
    dims: ParallelDims
    groups: Groups
    device: torch.device
    threads: int
    strategy: StrategyEntry
    exchange: str  # name of the algorithm that sums gradients over ranks; `none` on a single rank
    connection: Connection
    heartbeat: Heartbeat
    first_error: FirstError
    collectives: CollectiveCheck
    memory: Memory | None  # memory that this rank shares with its launcher; `None` without one
    record: Recorder
    watchdog: Watchdog | None  # detects ranks that wait in vain; `None` on a single rank

    @property
    def world(self) -> World:
        """Rank of this process, and number of processes."""
        return self.rendezvous.world

    @property
    def replicas(self) -> int:
        """Number of replicas, the logical data-parallel workers of the run."""
        return self.dims.replicas

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group of all ranks; `None` on a single rank."""
        return self.groups.everyone

    def exactness(self, *of_models: str) -> str:
        """Return the run's exactness class: the least exact class of its parts.

        The parts are the strategy, the exchange, parameter servers, and models with the classes
        `of_models`.
        """
        asked = self.settings
        servers = of_servers(asked.strategy, asked.staleness, self.device.type)
        of_sums = exactness_of(self.exchange, self.dims.forest)
        return worst([self.strategy.exactness, of_sums, servers, *of_models])

    def of_model(self, number: int, servers: object = None) -> ModelContext:
        """Return the ranks, groups and settings with which a strategy wraps the run's model `number`.

        `servers`: the connections to parameter servers, if the strategy has any.
        """
        return ModelContext(
            number=number,
            device=self.device,
            block=self.dims.block,
            replicas=self.replicas,
            forest=self.dims.forest,
            group=self.groups.data,
            mesh=self.groups.mesh,
            store=self.connection.store,
            exchange=self.exchange,
            sync_every=self.settings.sync_every,
            exact=self.settings.exact,
            say=self.record.say,
            warn=self.record.warn,
            staleness=self.settings.staleness,
            servers=servers,
            exchanging=self.record.pace.exchanging(self.device.type),
            collective=self.heartbeat.collective,
            passing=nullcontext if self.watchdog is None else self.watchdog.passing,
            ranks_of_row=self.dims.ranks_of_row,
        )


def join(settings: Settings, world: World, store: dist.Store | None = None) -> Context:
    """Join the other ranks at the rendezvous, through the script's `store` if given; return the context.

    Raises:
        UsageError: if settings contradict each other or do not fit the layout.
        WorldError: if the rendezvous fails.
        MismatchError: if ranks were given different seeds or other settings.
        DeviceError: if there are not enough devices.
        RunDirectoryError: if the directory cannot be used.
    """
    rendezvous = join_ranks(world, store)
    world = rendezvous.world
    heartbeat = Heartbeat.begin(find_slot(os.environ, world), os.environ)
    with rendezvous.reporting_failure(), heartbeat.collective("the start of the run"):
        run_dir = _run_dir(settings, rendezvous.number)
        resume_info = recall(rendezvous, run_dir, launch_of(world, os.environ), settings)
        mesh = choose_mesh(settings, world)
        replicas = settings.replicas or resume_info.replicas or settings.default_replicas
        here = ParallelDims.of(mesh, world.rank, replicas or mesh.data)
        device = choose_device(settings.devices, world)
        check_device(device)
        asked = settings.threads or resume_info.threads or settings.default_threads
        threads = asked or _default_threads(rendezvous, here.replicas * mesh.model)
        _prepare(device, settings, threads)
        own = describe(settings, replicas=here.replicas, threads=threads, device=device.type)
        identity = _equal_on_all(rendezvous, own)
        ahead, forgets = settings.staleness or 0, bool(resume_info.audits.get("unconfirmed"))
        memory = Memory.find(os.environ, rendezvous, identity, ahead, forgets=forgets)
        entry = STRATEGIES.find(settings.strategy)
        connection = connect(rendezvous, device, always=entry.needs_group)
        groups = Groups.of(connection.group, mesh, entry.name, device)
    grouped = connection.group is not None
    strategy = choose_strategy(entry.name, has_group=grouped, is_spread=mesh.model > 1)
    exchange = _exchange(settings, here, world, device) if grouped else "none"
    everyone, first_error = groups.everyone, FirstError(here.replicas)
    method = {"strategy": strategy.name, "exchange": exchange}
    record = _open_record(settings, rendezvous, identity, resume_info, here, device, method)
    return Context(
        settings=settings,
        rendezvous=rendezvous,
        identity=identity,
        resume_info=resume_info,
        says_replicas=replicas is not None,
        dims=here,
        groups=groups,
        device=device,
        threads=threads,
        strategy=strategy,
        exchange=exchange,
        connection=connection,
        heartbeat=heartbeat,
        first_error=first_error,
        collectives=CollectiveCheck(heartbeat, everyone, rendezvous, first_error),
        memory=memory,
        record=record,
        watchdog=None if everyone is None else Watchdog(rendezvous, heartbeat),
    )


def _exchange(settings: Settings, dims: ParallelDims, world: World, device: torch.device) -> str:
    """Return the name of the exchange by which the run's ranks sum gradients."""
    return choose_exchange(
        STRATEGIES.find(settings.strategy),
        settings.exchange,
        dims.forest,
        precision=settings.precision,
        one_host=world.local_size == world.size,
        device=device.type,
        exact=settings.exact,
    )


def _equal_on_all(rendezvous: RankRendezvous, identity: Identity) -> Identity:
    """Return `identity`; raise `MismatchError` if rank 0 has different settings, such as the seed."""
    if rendezvous.world.size == 1:
        return identity
    own = {name: getattr(identity, name) for name in _EQUAL}
    first = json.loads(rendezvous.broadcast("settings", lambda: json.dumps(own), "begin"))
    for name, value in own.items():
        if value != first[name]:
            raise MismatchError(
                f"{name} is {value!r} on rank {rendezvous.world.rank} and {first[name]!r} on rank 0; "
                "expected the same on all ranks",
                hint="give the run a constant, an argument or an environment variable: the clock, the "
                "process and the rank differ between ranks",
            )
    return identity


def _prepare(device: torch.device, settings: Settings, threads: int) -> None:
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)  # the bits of sums depend on the number of threads
    keep_freed_memory(device)
    if settings.exact:
        make_deterministic(device)
    check_precision(settings.precision, device)


def _run_dir(settings: Settings, number: int) -> Path | None:
    run_dir = settings.run_dir or ray.run_directory(settings.name)
    if run_dir is not None and number > 0 and run_dir in taken_directories:
        # The settings name one directory; further runs of the script are written below it.
        return run_dir / f"{settings.name}-{number + 1}"
    return run_dir


def _default_threads(rendezvous: RankRendezvous, replicas: int) -> int:
    """Return the default number of threads of a rank, the same on all ranks.

    Rank 0 computes the number from `replicas` and its cores, and broadcasts it.
    """
    # A launcher that binds its ranks to cores sets the variable `CORES`.
    alone = rendezvous.world.size == 1 or CORES in os.environ
    cores = None if alone else shared_cores(rendezvous)
    return int(
        rendezvous.broadcast("threads", lambda: str(default_threads(replicas, cores)), "begin")
    )


def _open_record(
    settings: Settings,
    rendezvous: RankRendezvous,
    identity: Identity,
    resume_info: ResumeInfo,
    here: ParallelDims,
    device: torch.device,
    method: dict[str, str],
) -> Recorder:
    global _before  # noqa: PLW0603 - of this process
    pid, before = _before or (0, None)
    unfinished = None if resume_info.directory is None else Path(resume_info.directory)
    asked = RecordSettings(
        name=settings.name,
        run_dir=_run_dir(settings, rendezvous.number) or unfinished,
        fresh=settings.fresh and not resume_info.is_ours,
        progress=settings.progress,
        trace=settings.trace,
        generation=resume_info.generations,
        chosen=reproduced(settings, replicas=here.replicas, threads=identity.threads),
        number=rendezvous.number,
        hash_every=settings.hash_every,
        launch=launch_of(rendezvous.world, os.environ),
        restarted=resume_info.is_ours,
        audits=resume_info.audits,
        repeats=here.column > 0,
        before=before if pid == os.getpid() else None,
        device=device,
        loggers=settings.loggers,
        method=method,
    )
    with rendezvous.reporting_failure():
        if not rendezvous.world.is_main:  # wait, as the main rank may find the directory unusable
            rendezvous.wait(["directory"], "begin")
        record = Recorder(asked, identity, rendezvous.world, rendezvous.store)
    if settings.run_dir is not None:
        taken_directories.add(settings.run_dir)
    _before = (os.getpid(), record.directory)
    return record


# --- the memory of the launcher ----------------------------------------------------------------------


def find_slot(environ: Mapping[str, str], world: World) -> ProgressSlot | None:
    """Return this rank's part of the status page in the launcher's memory; `None` without such memory."""
    found = _descriptors(environ, world)
    return None if found is None else StatusPage(found[0].page).slot(found[1])


def _descriptors(environ: Mapping[str, str], world: World) -> tuple[Descriptors, int, int] | None:
    """Return the launcher's shared memory, this rank's index in it, and how many ranks use it.

    Return `None` if there is no such memory, or if it has no room for this rank.
    """
    descriptors = Descriptors.find(environ) if world.environment == "lockstep" else None
    text, _, number = environ.get(SLOT_VARIABLE, "").partition("/")
    is_given = text.isdecimal() and number.isdecimal()
    index, count = (int(text), int(number)) if is_given else (world.local_rank, world.local_size)
    return None if descriptors is None or index >= SLOTS else (descriptors, index, count)
