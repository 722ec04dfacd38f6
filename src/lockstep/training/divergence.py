"""Whether all ranks end with the same bits."""

from __future__ import annotations

import json
from collections.abc import Callable

from lockstep.errors import DivergenceError
from lockstep.world.meet import Meeting


def check_same(
    meeting: Meeting, own: str, parts: Callable[[], dict[str, str]], *, exact: bool
) -> None:
    """Wait until all ranks have come to their end, and compare what they end with.

    Args:
        meeting: with the other ranks.
        own: digest of this rank.
        parts: returns digests of models and registered objects, by name; asked for where ranks differ.
        exact: whether digests have to be the same.

    Raises:
        DivergenceError: if a rank holds other bits.
        PeerError: if a rank does not come to its end.
    """
    found = json.loads(meeting.conclude("digest", own, _first_other, "the end"))
    if found is not None and exact:
        main, rank, digest = found
        raise DivergenceError(
            f"rank 0 ends with {main}, rank {rank} with {digest}: "
            f"{_differing(meeting, parts(), rank)} differ; expected the same bits",
            hint="look for code that changes weights by itself on one rank; "
            "`lockstep verify` names the first step that differs",
        )


def _first_other(digests: list[str]) -> str:
    main = digests[0]
    other = next((rank for rank, digest in enumerate(digests) if digest != main), None)
    return json.dumps(None if other is None else [main, other, digests[other]])


def _differing(meeting: Meeting, own: dict[str, str], other: int) -> str:
    """Return the names of what rank 0 and another rank hold that is not the same."""
    keys = [f"parts/{rank}" for rank in (0, other)]
    meeting.store.set(f"parts/{meeting.world.rank}", json.dumps(own))
    meeting.wait(keys, "the end")
    one, two = (json.loads(meeting.store.get(key)) for key in keys)
    return ", ".join(n for n in {**one, **two} if one.get(n) != two.get(n)) or "the objects"
