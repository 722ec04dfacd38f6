"""Which strategies have parameter servers, and how parameters are dealt out to them."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.errors import UsageError

#: More servers than this are a slip of the finger, not a plan.
_MOST = 64


def check(strategy: str | None, servers: int, name: str = "servers") -> None:
    """Refuse servers without the strategy that uses them, and the strategy without servers.

    Args:
        strategy: what is asked for; `None` where it is not known yet.
        servers: how many servers there are.
        name: what that number was given as.

    Raises:
        UsageError: if they don't go together.
    """
    if not 0 <= servers <= _MOST:
        raise UsageError(f"{name} is {servers}; expected 1 to {_MOST} with strategy=ps")
    if strategy == "ps" and not servers:
        raise UsageError(
            "strategy=ps with 0 servers; expected at least 1",
            hint="lockstep run -n WORKERS --servers 1 --strategy ps SCRIPT; under another launcher "
            "LOCKSTEP_SERVERS=1",
        )
    if servers and strategy not in (None, "ps"):
        raise UsageError(
            f"{name} is {servers} with strategy={strategy}, which has no servers; expected strategy=ps",
            hint="--strategy ps, or leave out the servers",
        )


def deal(sizes: Sequence[int], servers: int) -> list[int]:
    """Return the server of each parameter: the largest first, each to who has the least so far.

    Args:
        sizes: of the parameters.
        servers: how many servers there are.
    """
    loads, owners = [0] * servers, [0] * len(sizes)
    for place in sorted(range(len(sizes)), key=lambda place: (-sizes[place], place)):
        owner = min(range(servers), key=lambda server: (loads[server], server))
        owners[place] = owner
        loads[owner] += sizes[place]
    return owners
