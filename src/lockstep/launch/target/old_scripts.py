"""Support of old scripts: `--local_rank` options, and `torch.multiprocessing.spawn`.

`torch.distributed.launch` passed each process its local rank as an option: `--local_rank=K`, spelled
`--local-rank=K` since torch 2.0. A script that declares either option to `argparse` gets the option from
Lockstep, too. Scripts with `torch.multiprocessing.spawn` start their ranks themselves, and are launched
as one rank.
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

#: The two spellings of the local-rank option.
SPELLINGS: tuple[LocalRankOption, ...] = ("--local_rank", "--local-rank")
#: Functions of `torch.multiprocessing` that start a script's own ranks.
_SPAWNERS = ("spawn", "start_processes")


def adapt(spec: LaunchSpec) -> tuple[LaunchSpec, str | None]:
    """Return `spec` with the local-rank option that its script declares, and a message about the option.

    Only `local_rank_option="auto"` is replaced. A script whose source is missing or invalid gets the
    option `none`; the worker will report the error.
    """
    if spec.local_rank_option != "auto":
        return spec, None
    option: LocalRankOption = "none"
    if not any(word.partition("=")[0] in SPELLINGS for word in spec.args):
        option = next(filter(None, map(_declared, _calls(spec))), "none")
    note = f"lockstep: {_shown(spec)} takes {option}: each rank gets its own"
    return replace(spec, local_rank_option=option), None if option == "none" else note


def warning(spec: LaunchSpec) -> str | None:
    """Return a warning for a launch with several ranks if its script itself starts ranks; else `None`."""
    line = next((call.lineno for call in _calls(spec) if _spawns(call)), None)
    if line is None:
        return None
    return (
        f"lockstep: {_shown(spec)} starts ranks of its own (line {line}), and so may each rank "
        "of this launch; such a script runs with -n 1"
    )


@contextlib.contextmanager
def kept_port(port: int = 0) -> Iterator[int]:
    """Context manager: reserve a TCP port on which the script may host a store.

    The port is bound with `SO_REUSEADDR` and never listens. On Linux, a process that names the port can
    then bind it too, as torch's stores do, while the system assigns it to no other process. A launch of
    one rank needs such a port if the script itself starts further ranks, as by `mp.spawn`.

    Raises:
        UsageError: if the port is in use.
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
    """Return the local-rank option that a call of `add_argument` declares, if any."""
    words = [one.value for one in call.args if isinstance(one, ast.Constant)]
    declares = source.names(call.func) == ["add_argument"]
    return next((word for word in SPELLINGS if declares and word in words), None)


def _spawns(call: ast.Call) -> bool:
    """Whether a call is `torch.multiprocessing.spawn(…)` with a number of processes."""
    has_number = len(call.args) > 2 or any(word.arg == "nprocs" for word in call.keywords)
    return has_number and not set(_SPAWNERS).isdisjoint(source.names(call.func))


def _calls(spec: LaunchSpec) -> list[ast.Call]:
    """Return the calls in the script's source, in source order.

    The list is empty if the source is missing or invalid.
    """
    calls = [node for node in ast.walk(source.parse(spec)) if isinstance(node, ast.Call)]
    return sorted(calls, key=lambda call: (call.lineno, call.col_offset))
