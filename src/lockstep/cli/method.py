"""Flags that say how a run trains, for every verb that starts one."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from lockstep.layout.classes import EXCHANGES, PRECISIONS, STRATEGIES

if TYPE_CHECKING:
    from lockstep.launch.method import Method


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


def words(options: argparse.Namespace) -> list[str]:
    """Return the flags as they were given, for a command that starts the run."""
    given = {
        "--strategy": options.strategy,
        "--exchange": options.exchange,
        "--precision": options.precision,
        "--mesh": options.mesh,
        "--sync-every": options.sync_every,
        "--servers": options.servers,
        "--staleness": options.staleness,
    }
    said = [
        word for flag, value in given.items() if value is not None for word in (flag, str(value))
    ]
    if options.exact is not None:
        said.append("--exact" if options.exact else "--no-exact")
    return said
