"""The clock of the wall may jump: nothing that decides who lives may look at it."""

from __future__ import annotations

import ast
from pathlib import Path

import lockstep

ROOT = Path(lockstep.__file__).parent
PARTS = ("launch", "engine", "world", "state/checkpoint")
#: Where it is read all the same, and why that decides nothing on one machine.
ALLOWED = {
    "launch/agent/failure.py",  # of two machines: which failed first
    "launch/agent/agent.py",  # the same
    "engine/training/variables.py",  # leaves out variables that hold a time
    "world/rendezvous/connectivity_check.py",  # compares the clocks of two machines, and warns
}


def reads_the_wall(tree: ast.AST) -> bool:
    names = {("time", "time"), ("time", "time_ns"), ("datetime", "now"), ("datetime", "utcnow")}
    return any(
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and (node.value.id, node.attr) in names
        for node in ast.walk(tree)
    )


def test_nothing_looks_at_the_clock_of_the_wall() -> None:
    files = [file for part in PARTS for file in (ROOT / part).rglob("*.py")]
    found = {str(f.relative_to(ROOT)) for f in files if reads_the_wall(ast.parse(f.read_text()))}
    assert found == ALLOWED
