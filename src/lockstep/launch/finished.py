"""Marker of a finished run: a launcher that was killed at the end leaves nothing to do."""

from __future__ import annotations

import ast
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from lockstep.errors import RunDirectoryError
from lockstep.launch.nodes.config import rendezvous_config
from lockstep.launch.spec import LaunchSpec
from lockstep.launch.target import source
from lockstep.launch.unfinished import meant
from lockstep.state.files import run_file
from lockstep.state.record.unfinished import is_same

#: Set in `run.json` by the launcher, when the launch of a finished run has ended with exit code 0.
_MARK = "complete"
#: What may evaluate its parts several times.
_LOOPS = (
    *(ast.For, ast.AsyncFor, ast.While, ast.Lambda),
    *(ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp),
)


def already(spec: LaunchSpec) -> str | None:
    """Return what is said if the same command has finished its run in the directory that it names.

    `None` where there is something to do, or ranks are to say what keeps them from it.
    """
    if spec.run_dir is None or spec.settings.value("fresh", os.environ):
        return None
    try:
        recorded = (_is_only(spec) and run_file.read(spec.run_dir)) or {}
    except RunDirectoryError:
        return None
    if recorded.get("status") != "finished" or "next" in recorded:
        return None
    if not is_same(recorded.get("identity", {}), meant(spec)):
        return None
    if not recorded.get(_MARK) and not ends_with_its_run(source.parse(spec)):
        return None
    return (
        f"lockstep: finished already steps={recorded.get('steps')} digest={recorded.get('digest')}: "
        f"{spec.run_dir}; --fresh begins anew"
    )


def mark(spec: LaunchSpec, directory: Path) -> None:
    """Note in a finished run's record that the whole script has ended with exit code 0."""
    if not _is_only(spec):
        return
    with contextlib.suppress(RunDirectoryError):  # without the mark, the script itself must tell
        recorded = run_file.read(directory)
        if recorded is not None and recorded.get("status") == "finished":
            run_file.write(directory, {**recorded, _MARK: True})


def _is_only(spec: LaunchSpec) -> bool:
    """Return whether `spec` is a script's, and this launcher is the only one."""
    alone = rendezvous_config(spec.nodes, (spec.target,), os.environ) is None
    return alone and spec.kind == "script"


def ends_with_its_run(tree: ast.Module) -> bool:
    """Return whether a script surely makes one run and does nothing after it."""
    try:
        return _ends_with_its_run(tree)
    except RecursionError:
        return False


def _ends_with_its_run(tree: ast.Module) -> bool:
    calls = list(_calls(tree, "Run"))
    if len(calls) != 1 or calls[0][1]:
        return False
    name = calls[0][0]
    if name is None:
        return _ends_with(tree.body, "Run")
    ways = list(_calls(tree, name))
    if ways != [(None, False)] or sum(name in source.said(node) for node in ast.walk(tree)) != 1:
        return False
    found = [one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef) and one.name == name]
    return (
        len(found) == 1
        and not found[0].decorator_list  # it may call the function several times
        and _ends_with(found[0].body, "Run")
        and _ends_with(tree.body, name)
    )


def _ends_with(body: list[ast.stmt], name: str) -> bool:
    """Return whether the last statement is `with name(…)`, or a call `name(…)`, maybe under an `if`."""
    last = body[-1] if body else None
    if isinstance(last, ast.If):
        return _ends_with(last.body, name)
    if isinstance(last, ast.With):
        return _is_call(last.items[0].context_expr, name)
    return isinstance(last, ast.Expr) and name != "Run" and _is_call(last.value, name)


def _is_call(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Call) and name in source.said(node.func)


def _calls(
    node: ast.AST, name: str, function: str | None = None, *, repeated: bool = False
) -> Iterator[tuple[str | None, bool]]:
    """Yield, for each call of `name`, the function that it is in, and whether a loop repeats it."""
    if isinstance(node, ast.Call) and name in source.said(node.func):
        yield function, repeated
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        function, repeated = node.name, False
    for child in ast.iter_child_nodes(node):
        yield from _calls(child, name, function, repeated=repeated or isinstance(node, _LOOPS))
