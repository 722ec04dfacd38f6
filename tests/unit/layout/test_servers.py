"""Which strategies have servers, and how parameters are dealt out (A3)."""

from __future__ import annotations

import pytest

from lockstep.errors import UsageError
from lockstep.layout.servers import check, deal


@pytest.mark.parametrize(
    ("strategy", "servers"), [("ps", 1), ("ps", 64), ("ddp", 0), (None, 2), (None, 0)]
)
def test_what_goes_together(strategy: str | None, servers: int) -> None:
    check(strategy, servers)


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


def test_the_largest_first_and_each_to_who_has_the_least() -> None:
    assert deal([1, 8, 4, 4, 1], 2) == [0, 0, 1, 1, 1]
    assert deal([5, 5, 5], 1) == [0, 0, 0]
    assert deal([3, 2], 4) == [0, 1]
    assert deal([], 2) == []


def test_loads_differ_by_less_than_the_largest() -> None:
    sizes = [(7 * i * i) % 101 for i in range(40)]
    owners = deal(sizes, 3)
    loads = [sum(s for s, o in zip(sizes, owners, strict=True) if o == k) for k in range(3)]
    assert sum(loads) == sum(sizes)
    assert max(loads) - min(loads) < max(sizes)
