"""Command-line flags that only torchrun has, and torchrun's `PET_*` environment variables."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from lockstep.cli import setting_flags
from lockstep.cli.parser import Parser
from lockstep.settings import TABLE

#: Variables of Lockstep that take precedence over torchrun's variable for a flag.
_WINS = {
    "max_restarts": TABLE["max_restarts"].variable,
    "local_addr": "LOCKSTEP_INTERFACE",
    "rdzv_conf": "LOCKSTEP_JOIN_TIMEOUT",
}
#: Flags of torchrun that `lockstep run` has itself.
_SHARED = (
    "nnodes",
    "nproc_per_node",
    "rdzv_endpoint",
    "rdzv_id",
    "node_rank",
    "master_addr",
    "master_port",
    "max_restarts",
    "module",
    "log_dir",
    "redirects",
    "tee",
    "local_ranks_filter",
)
#: Flags that only torchrun has, and that torchrun also reads from `PET_*` variables.
_OWN = (
    "rdzv_backend",
    "rdzv_conf",
    "standalone",
    "monitor_interval",
    "start_method",
    "event_log_handler",
    "role",
    "no_python",
    "run_path",
    "duplicate_stdout_filters",
    "duplicate_stderr_filters",
    "local_addr",
    "signals_to_handle",
    "shutdown_timeout",
    "virtual_local_rank",
)
_FILTERS = ("--duplicate-stdout-filters", "--duplicate-stderr-filters")
#: Flags without a value.
_SWITCHES = ("module", "standalone", "no_python", "run_path", "virtual_local_rank")


def add_flags(parser: Parser) -> None:
    """Add to the parser of `lockstep run` the flags that only torchrun has."""
    group = parser.add_argument_group(
        "torchrun",
        "Further flags of torchrun. Any flag of torchrun may be spelled with underscores, and set by PET_* "
        "variables. Ignored: --monitor-interval, --event-log-handler. Refused: --logs-specs, "
        "--duplicate-stdout-filters, --duplicate-stderr-filters, --virtual-local-rank.",
    )
    add = group.add_argument
    before = {action.dest for action in parser._actions}
    _add_own(group)
    # Flags without effect or with an error, see `lockstep.launch.torchrun`; the help lists their names.
    add("--monitor-interval", type=float, help=argparse.SUPPRESS)
    for flag in ("--event-log-handler", "--logs-specs", *_FILTERS):
        add(flag, help=argparse.SUPPRESS)
    add("--virtual-local-rank", action="store_true", help=argparse.SUPPRESS)
    after = {action.dest for action in parser._actions}
    parser.abbreviated = {"n", *_SHARED, *(after - before)}


def _add_own(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--standalone", action="store_true", help="single node, whatever the environment says")
    add("--rdzv-backend", metavar="NAME", help="c10d or static")
    add("--rdzv-conf", metavar="K=V,…", help="keys join_timeout and last_call_timeout, in seconds")
    add(
        "--local-addr",
        metavar="ADDRESS",
        help="address of the network interface, in place of --interface",
    )
    add("--start-method", metavar="M", help="spawn, fork or forkserver; see --start")
    add("--no-python", action="store_true", help="SCRIPT is an executable, not a Python script")
    add(
        "--run-path", action="store_true", help="run SCRIPT in Lockstep's interpreter (the default)"
    )
    add(
        "--role",
        default="default",
        metavar="NAME",
        help="value of ROLE_NAME on the ranks (default: default)",
    )
    add(
        "--numa-binding",
        choices=("node", "socket", "exclusive", "core-complex"),
        help="the same as --bind cores",
    )
    add(
        "--signals-to-handle",
        metavar="NAME,…",
        help="signals, beside TERM, INT and HUP, that end the launch and are forwarded to the ranks",
    )
    setting_flags.add_group(group, "torchrun")


def words(environ: Mapping[str, str]) -> list[str]:
    """Return the values of `PET_*` variables as command-line flags."""
    found = []
    for name in (*_SHARED, *_OWN):
        value = environ.get(f"PET_{name.upper()}", "")
        if not value or _WINS.get(name, "") in environ:
            continue
        flag = "--" + name.replace("_", "-")
        if name not in _SWITCHES:
            found.append(f"{flag}={value}")
        elif value != "0":
            found.append(flag)
    return found


def with_environment(given: Sequence[str], environ: Mapping[str, str]) -> Sequence[str]:
    """Return a `lockstep run` command line with flags from `PET_*` variables before its own flags."""
    return [*given[:1], *words(environ), *given[1:]] if given[:1] == ["run"] else given
