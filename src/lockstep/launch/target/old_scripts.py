"""Support of old scripts: `--local_rank` options, and `torch.multiprocessing.spawn`.

`torch.distributed.launch` gave each process its local rank as an option: `--local_rank=K`, spelled
`--local-rank=K` since torch 2.0. A script whose source declares one of them to `argparse` gets it here as
well. Scripts on `torch.multiprocessing.spawn` are one rank to the launcher and start the others themselves.
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
#: Functions of `torch.multiprocessing` that start a script's own ranks.
_SPAWNERS = ("spawn", "start_processes")


def adapt(spec: LaunchSpec) -> tuple[LaunchSpec, str | None]:
    """Return `spec` with the option by which its script takes the local rank, and the note for the user.

    Only an option `auto` is decided here. A source that cannot be found or parsed takes none: the
    worker reports what is wrong with it.
    """
    if spec.local_rank_option != "auto":
        return spec, None
    option: LocalRankOption = "none"
    if not any(word.partition("=")[0] in SPELLINGS for word in spec.args):
        option = next(filter(None, map(_declared, _calls(spec))), "none")
    note = f"lockstep: {_shown(spec)} takes {option}: each rank gets its own"
    return replace(spec, local_rank_option=option), None if option == "none" else note


def warning(spec: LaunchSpec) -> str | None:
    """Return the warning for several ranks of a script that starts ranks of its own."""
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


def _declared(call: ast.Call) -> LocalRankOption | None:
    """Return the spelling of the option that a call of argparse's `add_argument` declares."""
    words = [one.value for one in call.args if isinstance(one, ast.Constant)]
    declares = source.names(call.func) == ["add_argument"]
    return next((word for word in SPELLINGS if declares and word in words), None)


def _spawns(call: ast.Call) -> bool:
    """Whether `call` is `torch.multiprocessing.spawn(fn, args, nprocs)`."""
    has_number = len(call.args) > 2 or any(word.arg == "nprocs" for word in call.keywords)
    return has_number and not set(_SPAWNERS).isdisjoint(source.names(call.func))


def _calls(spec: LaunchSpec) -> list[ast.Call]:
    """Return the calls in the source of `spec`, in its order; none where it cannot be parsed."""
    calls = [node for node in ast.walk(source.parse(spec)) if isinstance(node, ast.Call)]
    return sorted(calls, key=lambda call: (call.lineno, call.col_offset))
