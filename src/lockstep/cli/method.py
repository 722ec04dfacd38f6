"""Flags that say how a run trains, for every verb that starts one."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lockstep.layout.classes import EXCHANGES, PRECISIONS, STRATEGIES

if TYPE_CHECKING:
    from lockstep.launch.method import Method

#: The flags that only a strategy with servers takes, and all of them.
OF_SERVERS = ("servers", "staleness")
NAMES = ("strategy", "exchange", "precision", "mesh", "sync_every", "exact", *OF_SERVERS)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags to a verb."""
    group = parser.add_argument_group(
        "training", "Each wins over what the script says to lockstep.Run."
    )
    group.add_argument(
        "--strategy", metavar="S", help=f"how models are held: {', '.join(STRATEGIES)}"
    )
    group.add_argument(
        "--exchange", metavar="E", help=f"how gradients meet: {', '.join(EXCHANGES)}"
    )
    group.add_argument("--precision", metavar="P", help=f"{', '.join(PRECISIONS)}")
    group.add_argument(
        "--mesh",
        metavar="DATAxMODEL",
        help="how many models, and over how many ranks each is spread, such as 2x2",
    )
    group.add_argument(
        "--sync-every",
        type=int,
        metavar="H",
        help="steps that ranks train by themselves, for the exchanges local-sgd (default: 16) and "
        "diloco (default: 50)",
    )
    group.add_argument(
        "--exact",
        action=argparse.BooleanOptionalAction,
        help="refuse what makes the result depend on the layout (the default)",
    )
    group.add_argument(
        "--servers",
        type=int,
        metavar="S",
        help="parameter servers beside the ranks, for strategy ps",
    )
    group.add_argument(
        "--staleness",
        type=int,
        metavar="K",
        help="for strategy ps: servers update, and workers go on with parameters that lack at most K "
        "updates",
    )


def read(options: argparse.Namespace) -> Method:
    """Return what the flags say.

    Raises:
        UsageError: for a name that nothing has.
    """
    from lockstep.launch.method import Method

    return Method(
        strategy=options.strategy,
        exchange=options.exchange,
        precision=options.precision,
        mesh=options.mesh,
        sync_every=options.sync_every,
        exact=options.exact,
        servers=options.servers,
        staleness=options.staleness,
    )


def words(options: argparse.Namespace, names: Sequence[str] = NAMES) -> list[str]:
    """Return the flags of these names as they were given, for a command that starts the run."""
    said = []
    for name in names:
        flag, value = name.replace("_", "-"), getattr(options, name)
        if isinstance(value, bool):
            said.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            said += [f"--{flag}", str(value)]
    return said
