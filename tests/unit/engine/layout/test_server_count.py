"""Which strategies have servers (A3)."""

from __future__ import annotations

import pytest

from lockstep.engine.layout.server_count import check
from lockstep.errors import UsageError


@pytest.mark.parametrize(
    ("strategy", "servers"), [("ps", 1), ("ps", 64), ("ddp", 0), (None, 2), (None, 0)]
)
def test_what_goes_together(strategy: str | None, servers: int) -> None:
    check(strategy, servers)
    with pytest.raises(UsageError, match="which has no servers"):
        check("dp", servers or 1)


@pytest.mark.parametrize(
    ("strategy", "servers", "message"),
    [
        ("ps", 0, "strategy=ps with 0 servers; expected at least 1"),
        ("ddp", 2, "--servers is 2 with strategy=ddp, which has no servers; expected strategy=ps"),
        ("auto", 1, "--servers is 1 with strategy=auto"),
        ("ps", 65, "--servers is 65; expected 1 to 64"),
        (None, -1, "--servers is -1; expected 1 to 64"),
    ],
)
def test_what_does_not(strategy: str | None, servers: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check(strategy, servers, "--servers")
