"""`Plan`: commands, environment variables, devices and log files of a launch; starts no process."""

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
from lockstep.launch.devices.machine import Machine, look
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
from lockstep.world.devices_asked import CHOSEN
from lockstep.world.environments.init_method import STORE
from lockstep.world.environments.torchrun import MARK, TOKEN
from lockstep.world.network import INTERFACES

#: Entry module of a spawned worker, and its flag for scripts whose random generators are seeded.
BOOTSTRAP, SEEDED = "lockstep.launch.agent.bootstrap", "--seeded"
#: Maximum number of ranks per core; a larger `-n` is taken as a typing error.
MAX_RANKS_PER_CORE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A requested launch, with all that is known before its processes start; made by `resolve`.

    Attributes:
        spec: the requested launch.
        sources: facts about the script's source.
        machine: cores and GPUs of this machine.
        environ: environment variables of the launcher.
        ranks: number of ranks that this launcher starts.
        servers: number of parameter servers of the launch.
        nodes: rendezvous of several launchers; `None` for a single launcher.
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
    """Rendezvous settings of one generation, which is the set of workers between two restarts.

    Attributes:
        number: number of earlier restarts.
        membership: the launchers with their ranks; `None` for a single launcher.
        port: port of the workers' store; 0 if unknown, as in a dry run.
        run_id: name of the launch, the same on all nodes.
        listens: whether a launcher hosts a store at `port`; otherwise rank 0 does, if the script needs it.
        store: file of the workers' `FileStore`, if a single launcher starts all ranks.
        token: secret with which workers and parameter servers of the launch identify themselves.
        replicas: default number of logical data-parallel workers; `None` means the number of ranks.
        left_out: ranks of the first generation that this one leaves out, because an audit found that they
            compute wrong results; only with a single launcher.
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
    left_out: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlan:
    """Command, rank, environment and files of one worker or parameter server.

    Attributes:
        rank: rank of the worker; parameter server K has -1 - K.
        command: command line; with start method `fork`, an equivalent one for display.
        env: environment variables to add to the launcher's.
        device: device of the worker, by the name that is valid in the worker, such as `cuda:0`.
        error_file: file for the report of the process's exception.
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
        """Name in messages: `rank 3`, or `server 0`."""
        return f"rank {self.rank}" if self.rank >= 0 else f"server {-1 - self.rank}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All workers and parameter servers that this launcher starts together.

    `size` is the number of ranks of all launchers.
    """

    spec: LaunchSpec
    size: int
    workers: tuple[WorkerPlan, ...]
    servers: tuple[WorkerPlan, ...] = ()


def resolve(
    spec: LaunchSpec, sources: Sources, machine: Machine, environ: Mapping[str, str]
) -> Launch:
    """Check the requested launch `spec` against the cores and GPUs of `machine`; return the launch.

    `sources` are facts about the script's source, and `environ` the launcher's environment variables.

    Raises:
        DeviceError: if the machine lacks the devices.
        UsageError: if flags or variables contradict each other.
    """
    work = (spec.target, *spec.args)
    launch = Launch(
        spec=spec,
        sources=sources,
        machine=machine,
        environ=dict(environ),
        ranks=count_ranks(spec, machine, environ),
        servers=server_processes.count(spec, environ),
        # Functions run with a single launcher, which gets the return values.
        nodes=None if spec.kind == "function" else rendezvous_config(spec.nodes, work, environ),
    )
    mesh = spec.settings.value("mesh", environ)
    # The number of ranks of all launchers is known only after their rendezvous.
    size = launch.ranks if launch.nodes is None or mesh is None else meshes.parse(mesh, "mesh").size
    check_replicas(launch, size)
    first, members = Generation(), Membership.alone(launch.ranks)
    shared = _shared_environment(launch, first, members)
    _workers(launch, first, members, shared, Path(), Path())
    return launch


def resolve_here(spec: LaunchSpec, sources: Sources) -> Launch:
    """Check the requested launch `spec` against this machine, as `resolve` does; return the launch."""
    machine = look(gpus=asked(spec, os.environ) != "cpu")
    return resolve(spec, sources, machine, os.environ)


def make_plan(
    launch: Launch,
    generation: Generation | None = None,
    *,
    run_dir: Path,
    log_dir: Path | None = None,
    error_dir: Path,
) -> Plan:
    """Return the commands, environment variables, devices and files of one generation's processes.

    A generation is the set of processes that this launcher starts together, until the next restart.

    Args:
        launch: what to launch, and the facts of this machine.
        generation: rendezvous settings; by default those of the first generation of a single
            launcher.
        run_dir: the run directory.
        log_dir: directory of log files, by default `logs/` in `run_dir`.
        error_dir: directory of files in which processes report exceptions.

    Raises:
        DeviceError: if the machine lacks the devices.
        UsageError: if flags or variables contradict each other.
    """
    generation = generation or Generation()
    members = generation.membership or Membership.alone(launch.ranks)
    check_replicas(launch, members.size)
    log_dir = log_dir or run_dir / "logs"
    shared = _shared_environment(launch, generation, members)
    shared |= {"LOCKSTEP_RUN_DIR": str(run_dir), "LOCKSTEP_LOG_DIR": str(log_dir)}
    # Servers run on the node of rank 0, which all other nodes can reach.
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
    left_out = generation.left_out
    among = n if members.own_cores else members.local_size + len(left_out)
    bound = binding.variables(
        spec, machine, environ, range(n) if members.own_cores else here, among
    )

    def worker(index: int, place: int) -> WorkerPlan:
        device = devices[place]
        rank, local_rank = members.first_rank + index, here[index]
        error_file = error_dir / f"rank-{rank}.{generation.number}.json"
        identity = {
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "ROLE_RANK": str(rank),
            "TORCHELASTIC_ERROR_FILE": str(error_file),
        }
        if left_out and device.device != "cpu":  # it does not follow from the local rank any more
            identity[CHOSEN] = device.device
        return WorkerPlan(
            rank=rank,
            local_rank=local_rank,
            command=command(launch, local_rank),
            env={**identity, **shared, **device.env, **bound[place]},
            device=device.device,
            gpu=device.gpu,
            log=log_dir / f"rank-{rank}.log",
            error_file=error_file,
        )

    places = (place for place in range(n) if place not in left_out)
    return tuple(worker(index, place) for index, place in enumerate(places))


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
    """Return the number of ranks that `-n` and `--devices` request on this machine.

    Raises:
        DeviceError: if the machine has too few devices.
        UsageError: if `-n` and a list of GPUs in `--devices` give different numbers.
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
    """Return the `OMP_NUM_THREADS` of each of `n` workers on `cores` cores.

    Returns `None` to keep the value that the user has set.
    """
    threads = spec.settings.value("threads", environ)
    if threads is not None:
        return str(threads)
    return None if "OMP_NUM_THREADS" in environ else str(max(1, cores // n))


def threads_of_workers(spec: LaunchSpec) -> str | None:
    """Return the workers' `OMP_NUM_THREADS`.

    Returns `None` if the user has set it, or if it depends on GPUs, which are not counted yet.
    """
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
    """Check that `size` ranks fit the mesh and the number of replicas (logical data-parallel workers).

    Raises:
        UsageError: if there are fewer replicas than copies of the model, or the mesh has another size.
    """
    settings, environ = launch.spec.settings, launch.environ
    strategy, asked = settings.value("strategy", environ), settings.value("mesh", environ)
    if strategy is None:  # the script may choose one; with a mesh, one that splits models
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
        # A single rank may start further ranks itself, which need a store of their own.
        "TORCHELASTIC_USE_AGENT_STORE": str(generation.listens and (size != "1" or has_servers)),
        "TORCHELASTIC_RUN_ID": spec.nodes.id or generation.run_id,
        "LOCKSTEP_LAUNCH": generation.run_id,
        "TORCHELASTIC_RESTART_COUNT": str(generation.number),
        "TORCHELASTIC_MAX_RESTARTS": str(generation.max_restarts),
        MARK: __version__,
    }
    # Set to empty if unused, so that a nested launch does not inherit the outer values.
    has_store = generation.store is not None and (size != "1" or has_servers)
    variables[TOKEN] = generation.token if has_servers else ""
    variables[STORE] = str(generation.store) if has_store else ""
    if generation.left_out:
        variables["LOCKSTEP_LEFT_OUT"] = ",".join(map(str, generation.left_out))
    if generation.replicas is not None:
        variables[TABLE["default_replicas"].variable] = str(generation.replicas)
    if "LOCKSTEP_ENVIRONMENT" in environ:  # it is about the launcher, not its workers
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
    """Return the script's arguments for a worker.

    If the script has an option `--local_rank` or `--local-rank`, the option with the value `local_rank`
    comes first.
    """
    option = spec.local_rank_option
    given = (f"{option}={local_rank}",) if option.startswith("--") else ()
    return (*given, *spec.args)


def command(launch: Launch, local_rank: int) -> tuple[str, ...]:
    """Return the command line of a worker; for forked workers, an equivalent one for display."""
    spec = launch.spec
    words = (spec.target, *arguments(spec, local_rank))
    if spec.start == "spawn":
        seeded = (SEEDED,) if launch.sources.uses_lockstep else ()
        return (*interpreter(), "-m", BOOTSTRAP, *seeded, spec.kind, *words)
    if spec.kind == "program":
        return words
    return (*interpreter(), *(("-m",) if spec.kind == "module" else ()), *words)


def interpreter() -> tuple[str, ...]:
    """Return the command of this Python interpreter with its flags, such as `-O`, `-W` and `-X`."""
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return (sys.executable, *flags)
