"""Support of old scripts: `--local_rank` options, and `torch.multiprocessing.spawn`.

`torch.distributed.launch` gave each process its local rank as an option: `--local_rank=K`, spelled
`--local-rank=K` since torch 2.0. A script that declares one of them gets it here as well: the source
tells, nothing of it is imported or run. Scripts on `torch.multiprocessing.spawn` are one rank to the
launcher and start the others themselves.
"""

from __future__ import annotations

import ast
import contextlib
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from lockstep.launch.nodes.config import port_taken
from lockstep.launch.spec import LaunchSpec, LocalRankOption
from lockstep.launch.target import source
from lockstep.world import network

#: The two spellings of the option.
SPELLINGS: tuple[LocalRankOption, ...] = ("--local_rank", "--local-rank")
#: Methods of argparse, optparse, click and typer that declare an option.
_DECLARATIONS = frozenset({"add_argument", "add_option", "option", "Option"})
#: Keywords that give such a method away where the script calls it by a name of its own.
_SETTINGS = frozenset({"type", "default", "required", "dest", "metavar", "help"})
#: Functions of `torch.multiprocessing` that start a script's own ranks.
_SPAWNERS = frozenset({"spawn", "start_processes"})


def adapt(spec: LaunchSpec) -> tuple[LaunchSpec, str | None]:
    """Return `spec` with the option its script takes the local rank by, and what to tell the user.

    Only an option `auto` is decided here. A source that cannot be found or parsed takes none: the
    worker will say what is wrong with it.
    """
    if spec.local_rank_option != "auto":
        return spec, None
    option = None if _is_given(spec.args) else _declared(_calls(spec))
    if option is None:
        return replace(spec, local_rank_option="none"), None
    note = f"lockstep: {_shown(spec)} takes {option}: each rank gets its own"
    return replace(spec, local_rank_option=option), note


def warning(spec: LaunchSpec) -> str | None:
    """Return what to tell a user that starts several ranks of a script that starts its own."""
    line = next((call.lineno for call in _calls(spec) if _spawns(call)), None)
    if line is None:
        return None
    return (
        f"lockstep: {_shown(spec)} starts ranks of its own (line {line}), and so may each rank "
        "of this launch; such a script runs with -n 1"
    )


@contextlib.contextmanager
def kept_port(port: int = 0) -> Iterator[int]:
    """Keep a port: the system gives it to no other process; one that names it may listen on it.

    A rank that is alone may start ranks of its own. They, or the rank itself, host a store there: the
    launcher's would be in the way of ranks that it knows nothing of. Bound and never listening, on
    Linux the port can be bound by others that allow reuse of addresses, as torch's stores do.

    Args:
        port: the one to keep; 0 for one that the system chooses.

    Raises:
        UsageError: if it is taken.
    """
    with socket.socket() as keeper:
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            keeper.bind(("127.0.0.1", port))
        except OSError as error:
            raise port_taken(port, network.reason(error)) from None
        yield keeper.getsockname()[1]


def _shown(spec: LaunchSpec) -> str:
    return Path(spec.target).name if spec.kind == "script" else spec.target


def _is_given(args: tuple[str, ...]) -> bool:
    return any(word.partition("=")[0] in SPELLINGS for word in args)


def _declared(calls: list[ast.Call]) -> LocalRankOption | None:
    """Return the first spelling of the option that one of `calls` declares."""
    for call in calls:
        words = [one.value for one in call.args if isinstance(one, ast.Constant)]
        option = next((word for word in SPELLINGS if word in words), None)
        if option is not None and _declares(call):
            return option
    return None


def _declares(call: ast.Call) -> bool:
    keywords = {word.arg: word.value for word in call.keywords}
    action = keywords.get("action")
    if isinstance(action, ast.Constant) and action.value != "store":
        return False  # a switch such as `store_true` takes no number
    return not _DECLARATIONS.isdisjoint(source.said(call.func)) or not _SETTINGS.isdisjoint(
        keywords
    )


def _spawns(call: ast.Call) -> bool:
    """Return whether `call` is `torch.multiprocessing.spawn`, by its usual names."""
    if _SPAWNERS.isdisjoint(source.said(call.func)):
        return False
    owner = source.said(call.func.value) if isinstance(call.func, ast.Attribute) else []
    return owner in (["mp"], ["multiprocessing"]) or any(w.arg == "nprocs" for w in call.keywords)


def _calls(spec: LaunchSpec) -> list[ast.Call]:
    """Return the calls in the source of `spec`, in its order; none where it cannot be parsed."""
    try:
        calls = [node for node in ast.walk(source.parse(spec)) if isinstance(node, ast.Call)]
    except RecursionError:
        return []
    return sorted(calls, key=lambda call: (call.lineno, call.col_offset))
