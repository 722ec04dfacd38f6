"""`Plan`: commands, environments, devices and log files of a launch. Pure, starts nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.engine.layout import mesh as meshes
from lockstep.errors import DeviceError, UsageError
from lockstep.launch.agent import server_processes
from lockstep.launch.devices import binding
from lockstep.launch.devices.gpus import Gpu
from lockstep.launch.devices.machine import Machine
from lockstep.launch.devices.placement import (
    asked,
    choose,
    no_gpus,
    rank_devices,
    ranks_without_looking,
)
from lockstep.launch.nodes.config import RendezvousConfig, rendezvous_config
from lockstep.launch.nodes.membership import Membership
from lockstep.launch.spec import LaunchSpec
from lockstep.launch.target.imports import Sources
from lockstep.settings import TABLE
from lockstep.version import __version__
from lockstep.world.cores import usable_cores
from lockstep.world.environments.init_method import STORE
from lockstep.world.environments.lockstep import MARK, TOKEN
from lockstep.world.network import INTERFACES

#: What a fresh interpreter runs, and its flag for scripts whose generators start alike on all ranks.
BOOTSTRAP, SEEDED = "lockstep.launch.agent.bootstrap", "--seeded"
#: More ranks on one core than this are a slip of the finger, not a plan.
MAX_RANKS_PER_CORE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A launch as asked for, resolved on this machine; made by `resolve`.

    Attributes:
        environ: the launcher's environment, which the workers' variables are added to.
        nodes: how this launcher and others find each other; `None` for one that is alone.
    """

    spec: LaunchSpec
    sources: Sources
    machine: Machine
    environ: Mapping[str, str] = field(repr=False)
    ranks: int
    servers: int
    nodes: RendezvousConfig | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """Rendezvous and number of the workers of one generation.

    Attributes:
        membership: the ranks of each launcher; `None` where this launcher starts them all.
        port: of the store; 0 while it is not known, as in a dry run.
        run_id: name of the launch among its nodes.
        listens: whether a launcher hosts a store at the port; otherwise rank 0 does, if the script asks
            for one.
        store: the file that is the store of this generation, where this launcher starts all ranks.
        token: the secret by which workers and servers of the launch know each other.
        replicas: replicas of a run that names no number; `None` leaves its number of ranks.
    """

    number: int = 0
    max_restarts: int = 0
    membership: Membership | None = None
    port: int = 0
    run_id: str = "none"
    listens: bool = True
    store: Path | None = None
    token: str = field(default="", repr=False)
    replicas: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlan:
    """One worker or server: its command, its rank and its files.

    Attributes:
        rank: its rank; server 0 has -1, server 1 has -2 and so on.
        command: its command line; for `fork` the one that would do the same.
        env: variables added to the launcher's own.
        device: its device, by its own name for it.
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
        """`rank 3`, or `server 0`."""
        return f"rank {self.rank}" if self.rank >= 0 else f"server {-1 - self.rank}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All workers of this node for one generation, and the servers that it has."""

    spec: LaunchSpec
    size: int
    workers: tuple[WorkerPlan, ...]
    servers: tuple[WorkerPlan, ...] = ()


def resolve(
    spec: LaunchSpec, sources: Sources, machine: Machine, environ: Mapping[str, str]
) -> Launch:
    """Return the launch of `spec` on `machine`, once it is known that its processes can be planned.

    Raises:
        DeviceError: if the machine lacks the devices.
        UsageError: if the flags and variables cannot work together.
    """
    work = (spec.target, *spec.args)
    launch = Launch(
        spec=spec,
        sources=sources,
        machine=machine,
        environ=dict(environ),
        ranks=count_ranks(spec, machine, environ),
        servers=server_processes.count(spec, environ),
        # A function is launched for its values, which other launchers would not get.
        nodes=None if spec.kind == "function" else rendezvous_config(spec.nodes, work, environ),
    )
    mesh = spec.settings.value("mesh", environ)
    # Whether it has as many ranks as all launchers start is known after their rendezvous.
    size = launch.ranks if launch.nodes is None or mesh is None else meshes.parse(mesh, "mesh").size
    check_replicas(launch, size)
    first, members = Generation(), Membership.alone(launch.ranks)
    shared = _shared_environment(launch, first, members)
    _workers(launch, first, members, shared, Path(), Path())
    return launch


def make_plan(
    launch: Launch,
    generation: Generation | None = None,
    *,
    run_dir: Path,
    log_dir: Path | None = None,
    error_dir: Path,
) -> Plan:
    """Return the processes of one generation that this launcher starts.

    The workers' output is in `log_dir`, by default `logs/` in the run's directory. `error_dir` is private
    to this launch.

    Raises:
        DeviceError: if the machine lacks the devices.
        UsageError: if the flags and variables cannot work together.
    """
    generation = generation or Generation()
    members = generation.membership or Membership.alone(launch.ranks)
    check_replicas(launch, members.size)
    log_dir = log_dir or run_dir / "logs"
    shared = _shared_environment(launch, generation, members)
    shared |= {"LOCKSTEP_RUN_DIR": str(run_dir), "LOCKSTEP_LOG_DIR": str(log_dir)}
    # Servers are with the first rank, where the store is: on the node that all others reach.
    own = 0 if members.first_rank else launch.servers
    errors = error_dir / f"{generation.number}.json"
    return Plan(
        spec=launch.spec,
        size=members.size,
        workers=_workers(launch, generation, members, shared, log_dir, error_dir),
        servers=tuple(_server(index, launch.spec, shared, log_dir, errors) for index in range(own)),
    )


def _workers(
    launch: Launch,
    generation: Generation,
    members: Membership,
    shared: Mapping[str, str],
    log_dir: Path,
    error_dir: Path,
) -> tuple[WorkerPlan, ...]:
    spec, machine, environ, n = launch.spec, launch.machine, launch.environ, launch.ranks
    here = range(members.first_local_rank, members.first_local_rank + n)
    devices = rank_devices(spec, machine, environ, here, own=members.own_gpus)
    sharing, among = (range(n), n) if members.own_cores else (here, members.local_size)
    bound = binding.variables(spec, machine, environ, sharing, among)

    def worker(index: int) -> WorkerPlan:
        rank, local_rank = members.first_rank + index, here[index]
        error_file = error_dir / f"rank-{rank}.{generation.number}.json"
        identity = {
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "ROLE_RANK": str(rank),
            "TORCHELASTIC_ERROR_FILE": str(error_file),
        }
        return WorkerPlan(
            rank=rank,
            local_rank=local_rank,
            command=command(launch, local_rank),
            env={**identity, **shared, **devices[index].env, **bound[index]},
            device=devices[index].device,
            gpu=devices[index].gpu,
            log=log_dir / f"rank-{rank}.log",
            error_file=error_file,
        )

    return tuple(map(worker, range(n)))


def _server(
    index: int, spec: LaunchSpec, shared: Mapping[str, str], log_dir: Path, errors: Path
) -> WorkerPlan:
    error_file = errors.with_name(f"server-{index}.{errors.name}")
    own = {**server_processes.variables(index, spec), "TORCHELASTIC_ERROR_FILE": str(error_file)}
    return WorkerPlan(
        rank=-1 - index,
        local_rank=index,
        command=(*interpreter(), "-m", server_processes.MODULE),
        env={**shared, **own},
        device="cpu",
        log=log_dir / f"server-{index}.log",
        error_file=error_file,
    )


def count_ranks(spec: LaunchSpec, machine: Machine, environ: Mapping[str, str]) -> int:
    """Return the number of ranks of `spec` on `machine`.

    Raises:
        DeviceError: if the machine has too few devices for them.
    """
    wanted = asked(spec, environ)
    if isinstance(wanted, tuple):
        named = len(choose(spec, machine, environ))
        if isinstance(spec.n, int) and spec.n != named:
            raise UsageError(
                f"-n is {spec.n} for {named} named GPU(s); expected one rank for each",
                hint="leave out -n, or name as many GPUs as there are ranks on this node",
            )
        return named
    if "gpu" in (spec.n, wanted) and machine.gpus == 0:
        raise no_gpus(machine)
    on_gpu = machine.gpus > 0 and wanted != "cpu"
    n = 1 if spec.n is None else spec.n
    if isinstance(n, str):
        n = machine.gpus if on_gpu else machine.cores
    _check_capacity(n, machine, on_gpu=on_gpu)
    return n


def share_of_threads(
    spec: LaunchSpec, environ: Mapping[str, str], cores: int, n: int
) -> str | None:
    """Return the workers' `OMP_NUM_THREADS`, or `None` where the user's own value stays."""
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


def check_replicas(launch: Launch, size: int) -> None:
    """Refuse fewer replicas than models.

    Raises:
        UsageError: if `size` ranks hold more models than there are replicas, or don't fit the mesh.
    """
    settings, environ = launch.spec.settings, launch.environ
    strategy, asked = settings.value("strategy", environ), settings.value("mesh", environ)
    if strategy is None:  # the script may say one, which spreads models if there is a mesh
        strategy = "auto" if asked is None else meshes.SPREAD[0]
    mesh = meshes.choose(asked, strategy, size)
    if mesh.model > 1:
        size = mesh.data
    replicas = settings.value("replicas", environ)
    if replicas is not None and replicas < size:
        raise UsageError(
            f"{size} ranks for {replicas} replica(s); expected at least one replica for each rank",
            hint=f"-n {replicas}, or --replicas {size} for a run with more replicas",
        )


def _shared_environment(
    launch: Launch, generation: Generation, members: Membership
) -> dict[str, str]:
    spec, environ, size = launch.spec, launch.environ, str(members.size)
    has_servers = launch.servers > 0
    variables = {
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": str(members.local_size),
        "GROUP_RANK": str(members.node),
        "GROUP_WORLD_SIZE": str(members.node_count),
        "ROLE_WORLD_SIZE": size,
        "ROLE_NAME": spec.role,
        "MASTER_ADDR": members.address,
        "MASTER_PORT": str(generation.port),
        # A rank that is alone may start ranks of its own, whose rendezvous has another store.
        "TORCHELASTIC_USE_AGENT_STORE": str(generation.listens and (size != "1" or has_servers)),
        "TORCHELASTIC_RUN_ID": spec.nodes.id or generation.run_id,
        "LOCKSTEP_LAUNCH": generation.run_id,
        "TORCHELASTIC_RESTART_COUNT": str(generation.number),
        "TORCHELASTIC_MAX_RESTARTS": str(generation.max_restarts),
        MARK: __version__,
    }
    # Empty where there is none: a launch inside of another one must not take over the outer one's.
    has_store = generation.store is not None and (size != "1" or has_servers)
    variables[TOKEN] = generation.token if has_servers else ""
    variables[STORE] = str(generation.store) if has_store else ""
    if generation.replicas is not None:
        variables[TABLE["default_replicas"].variable] = str(generation.replicas)
    if "LOCKSTEP_ENVIRONMENT" in environ:  # what it says of the launcher is not true of its workers
        variables["LOCKSTEP_ENVIRONMENT"] = "lockstep"
    variables |= spec.settings.variables()
    sharing = launch.ranks if members.own_cores else members.local_size
    threads = share_of_threads(spec, environ, launch.machine.cores, sharing)
    if threads is not None:
        variables["OMP_NUM_THREADS"] = threads
    # A single node binds to loopback: no other machine can reach the workers' sockets.
    alone = launch.machine.loopback if members.node_count == 1 else None
    chosen = members.interface or alone
    kept = () if members.overrules_interface else environ
    interfaces = {name: chosen for name in INTERFACES if chosen is not None and name not in kept}
    return variables | interfaces


def arguments(spec: LaunchSpec, local_rank: int) -> tuple[str, ...]:
    """Return the arguments of the script on `local_rank`."""
    option = spec.local_rank_option
    given = (f"{option}={local_rank}",) if option.startswith("--") else ()
    return (*given, *spec.args)


def command(launch: Launch, local_rank: int) -> tuple[str, ...]:
    """Return the command line of a worker; for `fork` and functions, one that does the same."""
    spec = launch.spec
    words = (spec.target, *arguments(spec, local_rank))
    if spec.start == "spawn":
        seeded = (SEEDED,) if launch.sources.uses_lockstep else ()
        return (*interpreter(), "-m", BOOTSTRAP, *seeded, spec.kind, *words)
    if spec.kind == "program":
        return words
    return (*interpreter(), *(("-m",) if spec.kind == "module" else ()), *words)


def interpreter() -> tuple[str, ...]:
    """Return this interpreter's command with its own -O, -W, -X and the like."""
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return (sys.executable, *flags)
