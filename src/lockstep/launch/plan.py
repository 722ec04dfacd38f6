"""From a launch as asked for to the exact processes that would run: pure, starts nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.errors import DeviceError, UsageError
from lockstep.launch import binding, servers
from lockstep.launch.gpus import Gpu
from lockstep.launch.machine import Machine
from lockstep.launch.nodes.membership import Membership
from lockstep.launch.placement import asked, choose, no_gpus, ranks_without_looking, seats
from lockstep.launch.spec import LaunchSpec
from lockstep.layout import mesh as meshes
from lockstep.settings import TABLE
from lockstep.version import __version__
from lockstep.world.cores import usable_cores
from lockstep.world.environments.init_method import STORE
from lockstep.world.environments.lockstep import MARK, TOKEN

#: More ranks on one core than this are a slip of the finger, not a plan.
MAX_RANKS_PER_CORE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where and as how many the workers of one generation meet.

    Attributes:
        address: host of the store.
        port: its port; 0 while it is not known, as in a dry run.
        generation: how many times the workers were restarted before.
        max_restarts: how many times they may be.
        node_rank: number of this node among all nodes.
        node_count: number of nodes.
        first_rank: the first rank that this launcher starts.
        size: number of ranks in all; `None` where this launcher starts them all.
        first_local_rank: how many ranks other launchers start on this node, before those of this one.
        local_size: number of ranks on this node; `None` where this launcher starts them all.
        interface: network interface that the workers use; `None` leaves the loopback interface for a
            single node.
        own_cores: whether launchers that share this node have processors of their own each.
        own_gpus: the same of their GPUs.
        overrules_interface: whether the user chose it for Lockstep, over variables of Gloo and NCCL.
        run_id: what the nodes of one launch call it.
        listens: whether a launcher hosts a store at the port; otherwise rank 0 does, if the script asks
            for one.
        store: the file that is the store of this generation, where this launcher starts all ranks.
        token: known to workers and servers of the launch alone.
        replicas: replicas of a run that names no number; `None` leaves its number of ranks.
    """

    address: str = "127.0.0.1"
    port: int = 0
    generation: int = 0
    max_restarts: int = 0
    node_rank: int = 0
    node_count: int = 1
    first_rank: int = 0
    size: int | None = None
    first_local_rank: int = 0
    local_size: int | None = None
    interface: str | None = None
    own_cores: bool = False
    own_gpus: bool = False
    overrules_interface: bool = False
    run_id: str = "none"
    listens: bool = True
    store: Path | None = None
    token: str = field(default="", repr=False)
    replicas: int | None = None

    @staticmethod
    def of(
        membership: Membership,
        *,
        port: int,
        generation: int,
        max_restarts: int,
        run_id: str,
        replicas: int | None = None,
    ) -> Meeting:
        """Return the meeting of the launchers in `membership`, as one of them sees it."""
        return Meeting(
            address=membership.address,
            port=port,
            generation=generation,
            max_restarts=max_restarts,
            node_rank=membership.node,
            node_count=membership.node_count,
            first_rank=membership.first_rank,
            size=membership.size,
            first_local_rank=membership.first_local_rank,
            local_size=membership.local_size,
            interface=membership.interface,
            own_cores=membership.own_cores,
            own_gpus=membership.own_gpus,
            overrules_interface=membership.overrules_interface,
            run_id=run_id,
            replicas=replicas,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlan:
    """One worker or server: what it runs, as whom, and where its output goes.

    Attributes:
        rank: its number among all workers; server 0 has -1, server 1 has -2 and so on.
        local_rank: its number among the workers of this node.
        command: what it runs; for `fork` the command line that would do the same.
        env: variables added to the launcher's own.
        device: where it computes, as it calls it.
        gpu: which GPU that is, where it is known.
        log: file that receives its output.
        error_file: file in which it describes its exception.
    """

    rank: int
    local_rank: int
    command: tuple[str, ...]
    env: Mapping[str, str] = field(repr=False)
    device: str
    gpu: Gpu | None = None
    log: Path
    error_file: Path

    @property
    def name(self) -> str:
        """What people call it."""
        return f"rank {self.rank}" if self.rank >= 0 else f"server {-1 - self.rank}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All workers of this node for one generation, and the servers that it has."""

    spec: LaunchSpec
    size: int
    workers: tuple[WorkerPlan, ...]
    servers: tuple[WorkerPlan, ...] = ()


def make_plan(
    spec: LaunchSpec,
    machine: Machine,
    environ: Mapping[str, str],
    *,
    meeting: Meeting | None = None,
    run_dir: Path,
    log_dir: Path | None = None,
    error_dir: Path,
) -> Plan:
    """Return the workers that `spec` means on `machine`.

    Args:
        spec: the launch as asked for.
        machine: facts about this node.
        environ: the launcher's environment, which the workers' variables are added to.
        meeting: where the workers meet.
        run_dir: the run's directory.
        log_dir: receives the workers' output; `logs/` in the run's directory by default.
        error_dir: a directory private to this launch.

    Raises:
        DeviceError: if the machine lacks the devices.
        UsageError: if the flags and variables cannot work together.
    """
    meeting = meeting or Meeting()
    n = count_ranks(spec, machine, environ)
    size = meeting.size or n
    check_replicas(spec, environ, size)
    log_dir = log_dir or run_dir / "logs"
    shared = _shared_environment(spec, machine, environ, meeting, n)
    shared |= {"LOCKSTEP_RUN_DIR": str(run_dir), "LOCKSTEP_LOG_DIR": str(log_dir)}
    here = range(meeting.first_local_rank, meeting.first_local_rank + n)
    places = seats(spec, machine, environ, here, own=meeting.own_gpus)
    sharing, among = (range(n), n) if meeting.own_cores else (here, meeting.local_size or n)
    bound = binding.variables(spec, machine, environ, sharing, among)

    def worker(index: int) -> WorkerPlan:
        rank, local_rank = meeting.first_rank + index, meeting.first_local_rank + index
        error_file = error_dir / f"rank-{rank}.{meeting.generation}.json"
        return WorkerPlan(
            rank=rank,
            local_rank=local_rank,
            command=command(spec, local_rank),
            env=_identity(rank, local_rank, error_file)
            | {**shared, **places[index].env, **bound[index]},
            device=places[index].device,
            gpu=places[index].gpu,
            log=log_dir / f"rank-{rank}.log",
            error_file=error_file,
        )

    # Servers are with the first rank, where the store is: on the node that all others reach.
    own = 0 if meeting.first_rank else servers.count(spec, environ)
    errors = error_dir / f"{meeting.generation}.json"
    return Plan(
        spec=spec,
        size=size,
        workers=tuple(map(worker, range(n))),
        servers=tuple(_server(index, spec, shared, log_dir, errors) for index in range(own)),
    )


def _server(
    index: int, spec: LaunchSpec, shared: Mapping[str, str], log_dir: Path, errors: Path
) -> WorkerPlan:
    error_file = errors.with_name(f"server-{index}.{errors.name}")
    own = {**servers.variables(index, spec), "TORCHELASTIC_ERROR_FILE": str(error_file)}
    return WorkerPlan(
        rank=-1 - index,
        local_rank=index,
        command=(*interpreter(), "-m", servers.MODULE),
        env={**shared, **own},
        device="cpu",
        log=log_dir / f"server-{index}.log",
        error_file=error_file,
    )


def count_ranks(spec: LaunchSpec, machine: Machine, environ: Mapping[str, str]) -> int:
    """Return how many ranks `spec` means on `machine`.

    Raises:
        DeviceError: if the machine has too few devices for them.
    """
    wanted = asked(spec, environ)
    if isinstance(wanted, tuple):
        return _count_named(spec, choose(spec, machine, environ))
    if "gpu" in (spec.n, wanted) and machine.gpus == 0:
        raise no_gpus(machine)
    on_gpu = machine.gpus > 0 and wanted != "cpu"
    n = 1 if spec.n is None else spec.n
    if isinstance(n, str):
        n = machine.gpus if on_gpu else machine.cores
    _check_capacity(n, machine, on_gpu=on_gpu)
    return n


def _count_named(spec: LaunchSpec, gpus: Sequence[Gpu]) -> int:
    if isinstance(spec.n, int) and spec.n != len(gpus):
        raise UsageError(
            f"-n is {spec.n} for {len(gpus)} named GPU(s); expected one rank for each",
            hint="leave out -n, or name as many GPUs as there are ranks on this node",
        )
    return len(gpus)


def share_of_threads(
    spec: LaunchSpec, environ: Mapping[str, str], cores: int, n: int
) -> str | None:
    """Return the worker's `OMP_NUM_THREADS`, or `None` where the user's own value stays."""
    threads = spec.settings.value("threads", environ)
    if threads is not None:
        return str(threads)
    return None if "OMP_NUM_THREADS" in environ else str(max(1, cores // n))


def threads_of_workers(spec: LaunchSpec) -> str | None:
    """Return the workers' `OMP_NUM_THREADS` as far as it is known before devices are looked at."""
    cores = usable_cores()
    n = ranks_without_looking(spec, os.environ, cores)
    return None if n is None else share_of_threads(spec, os.environ, cores, n)


def _check_capacity(n: int, machine: Machine, *, on_gpu: bool) -> None:
    if on_gpu and n > machine.gpus:
        hint = f"-n {machine.gpus}, or --devices cpu to run on the processor"
        if any(gpu.parent for gpu in machine.cards):
            hint = "a process sees one MIG device; name one for each rank: --devices MIG-…,MIG-…"
        raise DeviceError(
            f"{n} ranks, but this machine has {machine.gpus} GPU(s); expected one for each rank",
            hint=hint,
        )
    if not on_gpu and n > MAX_RANKS_PER_CORE * machine.cores:
        raise DeviceError(
            f"{n} ranks, but this process may use {machine.cores} core(s); "
            f"expected at most {MAX_RANKS_PER_CORE} ranks for each",
            hint=f"-n {machine.cores}; replicas may be more than ranks: --replicas {n}",
        )


def check_replicas(spec: LaunchSpec, environ: Mapping[str, str], size: int) -> None:
    """Refuse fewer replicas than models.

    Raises:
        UsageError: if `size` ranks hold more models than there are replicas, or don't fit the mesh.
    """
    strategy = spec.settings.value("strategy", environ)
    asked = spec.settings.value("mesh", environ)
    if strategy is None:  # the script may say one, which spreads models if there is a mesh
        strategy = "auto" if asked is None else meshes.SPREAD[0]
    mesh = meshes.choose(asked, strategy, size)
    if mesh.model > 1:
        size = mesh.data
    replicas = spec.settings.value("replicas", environ)
    if replicas is not None and replicas < size:
        raise UsageError(
            f"{size} ranks for {replicas} replica(s); expected at least one replica for each rank",
            hint=f"-n {replicas}, or --replicas {size} for a run with more replicas",
        )


def _identity(rank: int, local_rank: int, error_file: Path) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "ROLE_RANK": str(rank),
        "TORCHELASTIC_ERROR_FILE": str(error_file),
    }


def _shared_environment(
    spec: LaunchSpec,
    machine: Machine,
    environ: Mapping[str, str],
    meeting: Meeting,
    n: int,
) -> dict[str, str]:
    size = str(meeting.size or n)
    has_servers = servers.count(spec, environ) > 0
    variables = {
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": str(meeting.local_size or n),
        "GROUP_RANK": str(meeting.node_rank),
        "GROUP_WORLD_SIZE": str(meeting.node_count),
        "ROLE_WORLD_SIZE": size,
        "ROLE_NAME": spec.role,
        "MASTER_ADDR": meeting.address,
        "MASTER_PORT": str(meeting.port),
        # A rank that is alone may start ranks of its own, which meet without the launcher's store.
        "TORCHELASTIC_USE_AGENT_STORE": str(meeting.listens and (size != "1" or has_servers)),
        "TORCHELASTIC_RUN_ID": spec.nodes.id or meeting.run_id,
        "LOCKSTEP_LAUNCH": meeting.run_id,
        "TORCHELASTIC_RESTART_COUNT": str(meeting.generation),
        "TORCHELASTIC_MAX_RESTARTS": str(meeting.max_restarts),
        MARK: __version__,
    }
    # Empty where there is none: a launch inside of another one must not take over the outer one's.
    has_store = meeting.store is not None and (size != "1" or has_servers)
    variables[TOKEN] = meeting.token if has_servers else ""
    variables[STORE] = str(meeting.store) if has_store else ""
    if meeting.replicas is not None:
        variables[TABLE["default_replicas"].variable] = str(meeting.replicas)
    if "LOCKSTEP_ENVIRONMENT" in environ:  # what it says of the launcher is not true of its workers
        variables["LOCKSTEP_ENVIRONMENT"] = "lockstep"
    variables |= spec.settings.variables()
    sharing = n if meeting.own_cores else meeting.local_size or n
    threads = share_of_threads(spec, environ, machine.cores, sharing)
    if threads is not None:
        variables["OMP_NUM_THREADS"] = threads
    return variables | _interface(machine, environ, meeting)


#: Gloo's, NCCL's and TensorPipe's: each would otherwise choose by the host's name, or what looks good.
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


def _interface(machine: Machine, environ: Mapping[str, str], meeting: Meeting) -> dict[str, str]:
    # A single node binds to loopback: no other machine can reach the workers' sockets.
    chosen = meeting.interface or (machine.loopback if meeting.node_count == 1 else None)
    kept = () if meeting.overrules_interface else environ
    return {name: chosen for name in _INTERFACES if chosen is not None and name not in kept}


def arguments(spec: LaunchSpec, local_rank: int) -> tuple[str, ...]:
    """Return the arguments of the script on `local_rank`."""
    option = spec.local_rank_option
    given = (f"{option}={local_rank}",) if option.startswith("--") else ()
    return (*given, *spec.args)


def command(spec: LaunchSpec, local_rank: int) -> tuple[str, ...]:
    """Return the command line of a worker; for `fork` and functions, one that says the same."""
    arguments_ = arguments(spec, local_rank)
    if spec.start == "spawn":
        return (
            *interpreter(),
            "-m",
            "lockstep.launch.bootstrap",
            spec.kind,
            spec.target,
            *arguments_,
        )
    if spec.kind == "program":
        return (spec.target, *arguments_)
    if spec.kind == "module":
        return (*interpreter(), "-m", spec.target, *arguments_)
    return (*interpreter(), spec.target, *arguments_)


def interpreter() -> tuple[str, ...]:
    """Return this interpreter's command with its own -O, -W, -X and the like."""
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return (sys.executable, *flags)
