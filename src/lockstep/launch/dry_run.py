"""Text of a launch's plan for `--dry-run`: commands, environment variables and devices."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from lockstep.launch.plan import Plan, WorkerPlan


def lines(plan: Plan) -> list[str]:
    """Return the text of `plan` as lines: variables of all ranks, then each rank."""
    first, *others = (worker.env for worker in plan.workers)
    shared = {
        name: value
        for name, value in first.items()
        if name not in _OWN and all(other.get(name) == value for other in others)
    }
    here = f", {len(plan.workers)} of them on this node" if plan.size > len(plan.workers) else ""
    result = [
        f"{plan.size} rank(s){here}, started by {plan.spec.start}",
        "",
        "environment of every rank:",
        *_assignments(shared),
    ]
    for worker in (*plan.workers, *plan.servers):
        result += [
            "",
            f"{worker.name} on {_device(worker)}",
            f"  command: {shlex.join(worker.command)}",
            f"  log: {worker.log}",
        ]
        own = {name: value for name, value in worker.env.items() if name not in shared}
        result += _assignments(own) if worker.rank >= 0 else []
    return result


def _device(worker: WorkerPlan) -> str:
    """Return a rank's device, such as `cuda:0`, and the GPU's id if known."""
    return worker.device if worker.gpu is None else f"{worker.device} = {worker.gpu}"


def placement(plan: Plan) -> list[str]:
    """Return, for each rank whose GPU is known, a message with the rank's device and GPU."""
    return [
        f"lockstep: rank {worker.rank}: {_device(worker)}"
        for worker in plan.workers
        if worker.gpu is not None
    ]


#: Variables listed with each rank, even if there is only one rank.
_OWN = (
    "RANK",
    "LOCAL_RANK",
    "ROLE_RANK",
    "TORCHELASTIC_ERROR_FILE",
    "LOCKSTEP_DEVICE",
    "LOCKSTEP_PROCESSORS",
)


def _assignments(variables: Mapping[str, str]) -> list[str]:
    if variables.get("MASTER_PORT") == "0":
        variables = {**variables, "MASTER_PORT": "(a free port)"}
    return [f"  {name}={shlex.quote(variables[name])}" for name in sorted(variables)]
