"""Holding a function to the promise: the same value on every layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from lockstep.errors import CheckFailedError
from lockstep.testing.ranks import run_ranks


def assert_same(
    function: Callable[..., Any],
    layouts: Iterable[int],
    *args: Any,
    replicas: int,
    timeout: float = 60.0,
) -> Any:
    """Run `function(*args)` on every number of ranks in `layouts`, and return what all returned.

    Args:
        function: something importable that trains and returns, say, `run.digest()`.
        layouts: numbers of ranks.
        args: its arguments.
        replicas: number of replicas on all layouts.
        timeout: seconds for each layout.

    Raises:
        CheckFailedError: if a rank of a layout returned another value than the first one.
        RankError: if a rank failed.
        RankTimeoutError: if a layout took too long.
    """
    environ = {"LOCKSTEP_REPLICAS": str(replicas)}
    first: list[Any] = []
    for n in layouts:
        values = run_ranks(function, n, *args, timeout=timeout, environ=environ)
        first = first or values[:1]
        for rank, value in enumerate(values):
            if value != first[0]:
                raise CheckFailedError(
                    f"rank {rank} of {n} returned {value!r}; expected {first[0]!r}, as on the "
                    "first layout",
                    hint="`lockstep verify` names the first step of a script that differs",
                )
    return first[0]
