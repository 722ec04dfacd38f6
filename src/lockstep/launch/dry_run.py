"""`--dry-run`: print the plan of a launch."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from lockstep.launch.plan import Plan, WorkerPlan


def show(plan: Plan) -> None:
    """Print `plan` to standard output."""
    print("\n".join(lines(plan)))  # noqa: T201 - this is what --dry-run is for


def lines(plan: Plan) -> list[str]:
    """Return the lines that describe `plan`: what all ranks share, then each rank."""
    shared = _shared(plan)
    result = [
        f"{plan.size} rank(s){_here(plan)}, started by {plan.spec.start}",
        "",
        "environment of every rank:",
    ]
    result += [f"  {line}" for line in _assignments(shared)]
    for worker in plan.workers:
        own = {name: value for name, value in worker.env.items() if name not in shared}
        result += [
            "",
            f"rank {worker.rank} on {placed(worker)}",
            f"  command: {shlex.join(worker.command)}",
        ]
        result += [f"  log: {worker.log}"]
        result += [f"  {line}" for line in _assignments(own)]
    for server in plan.servers:
        result += [
            "",
            f"{server.name} on {placed(server)}",
            f"  command: {shlex.join(server.command)}",
            f"  log: {server.log}",
        ]
    return result


def placed(worker: WorkerPlan) -> str:
    """Return what a rank computes on: what it calls its device, and which GPU that is."""
    return worker.device if worker.gpu is None else f"{worker.device} = {worker.gpu}"


def placement(plan: Plan) -> list[str]:
    """Return a line for each rank whose GPU is known."""
    return [
        f"lockstep: rank {worker.rank}: {placed(worker)}"
        for worker in plan.workers
        if worker.gpu is not None
    ]


def _here(plan: Plan) -> str:
    return "" if len(plan.workers) == plan.size else f", {len(plan.workers)} of them on this node"


def _shared(plan: Plan) -> dict[str, str]:
    first, *others = (worker.env for worker in plan.workers)
    return {
        name: value
        for name, value in first.items()
        if name not in _OWN and all(other.get(name) == value for other in others)
    }


#: Variables that belong to one rank, even where there is only one.
_OWN = (
    "RANK",
    "LOCAL_RANK",
    "ROLE_RANK",
    "TORCHELASTIC_ERROR_FILE",
    "LOCKSTEP_DEVICE",
    "LOCKSTEP_PROCESSORS",
)


def _assignments(variables: Mapping[str, str]) -> list[str]:
    return [f"{name}={shlex.quote(_value(name, variables[name]))}" for name in sorted(variables)]


def _value(name: str, value: str) -> str:
    return "(a free port)" if name == "MASTER_PORT" and value == "0" else value
