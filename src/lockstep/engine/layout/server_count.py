"""Check of the number of parameter servers against the strategy."""

from __future__ import annotations

from lockstep.errors import UsageError
from lockstep.registry import WITH_SERVERS

#: Maximal number of servers; a larger number is taken for a typing error.
_MOST = 64


def check(strategy: str | None, servers: int, name: str = "servers") -> None:
    """Raise `UsageError` for servers without strategy `ps`, too many servers, or `ps` without servers.

    `strategy`: `None` if it is not known yet. `name`: the flag or argument that gave the number.
    """
    if not 0 <= servers <= _MOST:
        raise UsageError(f"{name} is {servers}; expected 1 to {_MOST} with strategy=ps")
    if strategy == WITH_SERVERS and not servers:
        raise UsageError(
            "strategy=ps with 0 servers; expected at least 1",
            hint="lockstep run -n WORKERS --servers 1 --strategy ps SCRIPT; under another launcher "
            "LOCKSTEP_SERVERS=1",
        )
    if servers and strategy not in (None, WITH_SERVERS):
        raise UsageError(
            f"{name} is {servers} with strategy={strategy}, which has no servers; expected strategy=ps",
            hint="--strategy ps, or leave out the servers",
        )
