"""Plans of launches that are made up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lockstep.launch.devices.machine import Machine
from lockstep.launch.nodes.membership import Membership
from lockstep.launch.plan import Generation, Plan, make_plan, resolve
from lockstep.launch.spec import LaunchSpec
from lockstep.launch.target.imports import Sources

LAPTOP = Machine(cores=8)


def membership_of(
    ranks: tuple[int, ...], nodes: tuple[int, ...], index: int, **more: Any
) -> Membership:
    """Return the launchers of a launch, with their ranks and nodes, as launcher `index` sees them."""
    names = tuple(f"node {number}" for number in range(len(ranks)))
    told = {"address": "10.0.0.1", "interface": None, **more}
    return Membership(index=index, ranks=ranks, nodes=nodes, names=names, **told)


def plan(
    spec: LaunchSpec,
    machine: Machine = LAPTOP,
    environ: dict[str, str] | None = None,
    **generation: Any,
) -> Plan:
    """Return the plan of a generation."""
    launch = resolve(spec, Sources(), machine, environ or {})
    there = {"run_dir": Path("runs/a"), "error_dir": Path("private")}
    return make_plan(launch, Generation(**generation), **there)
