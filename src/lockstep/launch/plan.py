"""From a launch as asked for to the exact processes that would run: pure, starts nothing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.errors import DeviceError, UsageError
from lockstep.launch.machine import Machine
from lockstep.launch.spec import LaunchSpec
from lockstep.version import __version__
from lockstep.world.environments.lockstep import MARK

#: More ranks on one core than this are a slip of the finger, not a plan.
MAX_RANKS_PER_CORE = 16
#: torchrun's role of workers that were given none.
_ROLE = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where and as how many the workers of one generation meet.

    Attributes:
        address: host of the store.
        port: its port; 0 while it is not known, as in a dry run.
        generation: how many times the workers were restarted before.
        max_restarts: how many times they may be.
        node_rank: number of this node among all nodes.
        node_count: number of nodes, each with as many ranks.
        run_id: what the nodes of one launch call it.
    """

    address: str = "127.0.0.1"
    port: int = 0
    generation: int = 0
    max_restarts: int = 0
    node_rank: int = 0
    node_count: int = 1
    run_id: str = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlan:
    """One worker: what it runs, as whom, and where its output goes.

    Attributes:
        rank: its number among all workers.
        local_rank: its number among the workers of this node.
        command: what it runs; for `fork` the command line that would do the same.
        env: variables added to the launcher's own.
        device: where it computes.
        log: file that receives its output.
        error_file: file in which it describes its exception.
    """

    rank: int
    local_rank: int
    command: tuple[str, ...]
    env: Mapping[str, str] = field(repr=False)
    device: str
    log: Path
    error_file: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All workers of this node for one generation."""

    spec: LaunchSpec
    size: int
    workers: tuple[WorkerPlan, ...]


def make_plan(
    spec: LaunchSpec,
    machine: Machine,
    environ: Mapping[str, str],
    *,
    meeting: Meeting | None = None,
    run_dir: Path,
    error_dir: Path,
) -> Plan:
    """Return the workers that `spec` means on `machine`.

    Args:
        spec: the launch as asked for.
        machine: facts about this node.
        environ: the launcher's environment, which the workers' variables are added to.
        meeting: where the workers meet.
        run_dir: the run's directory, whose `logs/` receive the workers' output.
        error_dir: a directory private to this launch.

    Raises:
        DeviceError: if the machine lacks the devices.
        UsageError: if the flags and variables cannot work together.
    """
    meeting = meeting or Meeting()
    n = count_ranks(spec, machine, environ)
    size = n * meeting.node_count
    _check_replicas(spec, environ, size)
    shared = _shared_environment(spec, machine, environ, meeting, run_dir, n)

    def worker(local_rank: int) -> WorkerPlan:
        rank = meeting.node_rank * n + local_rank
        error_file = error_dir / f"rank-{rank}.{meeting.generation}.json"
        return WorkerPlan(
            rank=rank,
            local_rank=local_rank,
            command=command(spec, local_rank),
            env=_identity(rank, local_rank, error_file) | shared,
            device=_device(spec, machine, environ, local_rank),
            log=run_dir / "logs" / f"rank-{rank}.log",
            error_file=error_file,
        )

    return Plan(spec=spec, size=size, workers=tuple(worker(index) for index in range(n)))


def count_ranks(spec: LaunchSpec, machine: Machine, environ: Mapping[str, str]) -> int:
    """Return how many ranks `spec` means on `machine`.

    Raises:
        DeviceError: if the machine has too few devices for them.
    """
    devices = _devices(spec, environ)
    if "gpu" in (spec.n, devices) and machine.gpus == 0:
        raise DeviceError(
            "GPUs were asked for, but torch sees none on this machine",
            hint="--devices cpu and a number for -n run on the processor",
        )
    if spec.n == "gpu" and devices == "cpu":
        raise UsageError(
            "-n gpu and --devices cpu contradict each other", hint="choose one of them"
        )
    on_gpu = machine.gpus > 0 and devices != "cpu" and spec.n != "cpu"
    n = spec.n if isinstance(spec.n, int) else (machine.gpus if on_gpu else machine.cores)
    _check_capacity(n, machine, on_gpu=on_gpu)
    return n


def share_of_threads(
    spec: LaunchSpec, environ: Mapping[str, str], cores: int, n: int
) -> str | None:
    """Return the worker's `OMP_NUM_THREADS`, or `None` where the user's own value stays."""
    asked = str(spec.threads) if spec.threads is not None else environ.get("LOCKSTEP_THREADS")
    if asked is not None:
        return asked
    return None if "OMP_NUM_THREADS" in environ else str(max(1, cores // n))


def _devices(spec: LaunchSpec, environ: Mapping[str, str]) -> str:
    devices = spec.devices or environ.get("LOCKSTEP_DEVICES") or "auto"
    if devices not in ("auto", "cpu", "gpu"):
        raise UsageError(f"LOCKSTEP_DEVICES is {devices!r}; expected auto, cpu or gpu")
    return devices


def _check_capacity(n: int, machine: Machine, *, on_gpu: bool) -> None:
    if on_gpu and n > machine.gpus:
        raise DeviceError(
            f"{n} ranks, but this machine has {machine.gpus} GPU(s); expected one for each rank",
            hint=f"-n {machine.gpus}, or --devices cpu to run on the processor",
        )
    if not on_gpu and n > MAX_RANKS_PER_CORE * machine.cores:
        raise DeviceError(
            f"{n} ranks, but this process may use {machine.cores} core(s); "
            f"expected at most {MAX_RANKS_PER_CORE} ranks for each",
            hint=f"-n {machine.cores}; replicas may be more than ranks: --replicas {n}",
        )


def _check_replicas(spec: LaunchSpec, environ: Mapping[str, str], size: int) -> None:
    text = str(spec.replicas) if spec.replicas is not None else environ.get("LOCKSTEP_REPLICAS")
    if text is None:
        return
    if not text.isdecimal():
        raise UsageError(f"LOCKSTEP_REPLICAS is {text!r}; expected an integer")
    if int(text) < size:
        raise UsageError(
            f"{size} ranks for {text} replica(s); expected at least one replica for each rank",
            hint=f"-n {text}, or --replicas {size} for a run with more replicas",
        )


def _device(spec: LaunchSpec, machine: Machine, environ: Mapping[str, str], local_rank: int) -> str:
    on_cpu = machine.gpus == 0 or _devices(spec, environ) == "cpu" or spec.n == "cpu"
    return "cpu" if on_cpu else f"cuda:{local_rank}"


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
    run_dir: Path,
    n: int,
) -> dict[str, str]:
    size = str(n * meeting.node_count)
    variables = {
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": str(n),
        "GROUP_RANK": str(meeting.node_rank),
        "GROUP_WORLD_SIZE": str(meeting.node_count),
        "ROLE_WORLD_SIZE": size,
        "ROLE_NAME": _ROLE,
        "MASTER_ADDR": meeting.address,
        "MASTER_PORT": str(meeting.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": meeting.run_id,
        "TORCHELASTIC_RESTART_COUNT": str(meeting.generation),
        "TORCHELASTIC_MAX_RESTARTS": str(meeting.max_restarts),
        MARK: __version__,
        "LOCKSTEP_RUN_DIR": str(run_dir),
    }
    variables |= _flags(spec)
    threads = share_of_threads(spec, environ, machine.cores, n)
    if threads is not None:
        variables["OMP_NUM_THREADS"] = threads
    # A single node binds to loopback: no other machine can reach the workers' sockets.
    if meeting.node_count == 1 and machine.loopback and "GLOO_SOCKET_IFNAME" not in environ:
        variables["GLOO_SOCKET_IFNAME"] = machine.loopback
    return variables


def _flags(spec: LaunchSpec) -> dict[str, str]:
    """Return the variables of the flags that were given; others keep what the user's shell says."""
    given = {
        "LOCKSTEP_REPLICAS": spec.replicas,
        "LOCKSTEP_THREADS": spec.threads,
        "LOCKSTEP_DEVICES": spec.devices,
        "LOCKSTEP_FRESH": 1 if spec.fresh else None,
        "LOCKSTEP_STOP_ON_NAN": 1 if spec.stop_on_nan else None,
    }
    return {name: str(value) for name, value in given.items() if value is not None}


def arguments(spec: LaunchSpec, local_rank: int) -> tuple[str, ...]:
    """Return the arguments of the script on `local_rank`."""
    option = spec.local_rank_option
    return spec.args if option is None else (f"{option}={local_rank}", *spec.args)


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
    if spec.kind == "module":
        return (*interpreter(), "-m", spec.target, *arguments_)
    return (*interpreter(), spec.target, *arguments_)


def interpreter() -> tuple[str, ...]:
    """Return this interpreter's command with its own -O, -W, -X and the like."""
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return (sys.executable, *flags)
