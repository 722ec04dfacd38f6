"""A launch whose run is finished already: a launcher that is killed at the end leaves nothing to do."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path

from lockstep.errors import RunDirectoryError
from lockstep.launch import nodes, source
from lockstep.launch.spec import LaunchSpec
from lockstep.record import run_file

_LOOPS = (ast.For, ast.AsyncFor, ast.While, ast.comprehension)


def already(spec: LaunchSpec) -> str | None:
    """Return what is said if the same command has finished its run in the directory that it names.

    `None` where there is something to do, or ranks are to say what keeps them from it.
    """
    if spec.run_dir is None or spec.fresh or os.environ.get("LOCKSTEP_FRESH", "0") != "0":
        return None
    if spec.kind != "script" or nodes.party(spec.nodes, (spec.target,), os.environ) is not None:
        return None
    try:
        recorded = run_file.read(spec.run_dir) or {}
    except RunDirectoryError:
        return None
    if recorded.get("status") != "finished" or "next" in recorded:
        return None
    if not _is_same(spec, recorded.get("identity", {})) or not makes_one_run(source.parse(spec)):
        return None
    return (
        f"lockstep: finished already steps={recorded.get('steps')} digest={recorded.get('digest')}: "
        f"{spec.run_dir}; --fresh begins anew"
    )


def _is_same(spec: LaunchSpec, identity: dict[str, object]) -> bool:
    meant = {
        "script": Path(spec.target).name,
        "arguments": list(spec.args),
        "replicas": spec.replicas,
        "threads": spec.threads,
        "precision": spec.method.precision,
    }
    return all(value is None or identity.get(name) == value for name, value in meant.items())


def makes_one_run(tree: ast.Module) -> bool:
    """Return whether a script surely makes one run: a later one may be missing otherwise."""
    calls = list(_calls(tree, "Run"))
    if len(calls) != 1 or calls[0][1]:
        return False
    function = calls[0][0]
    if function is None:
        return True
    ways = list(_calls(tree, function))
    return len(ways) == 1 and not ways[0][1] and ways[0][0] is None


def _calls(
    node: ast.AST, name: str, function: str | None = None, *, repeated: bool = False
) -> Iterator[tuple[str | None, bool]]:
    """Yield, for each call of `name`, the function that it is in, and whether a loop repeats it."""
    if isinstance(node, ast.Call):
        called = node.func
        if name in (getattr(called, "attr", None), getattr(called, "id", None)):
            yield function, repeated
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        function, repeated = node.name, False
    for child in ast.iter_child_nodes(node):
        yield from _calls(child, name, function, repeated=repeated or isinstance(node, _LOOPS))
