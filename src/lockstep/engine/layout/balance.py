"""Partition of a sequence into contiguous parts of about equal weight."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from lockstep.errors import UsageError


def balance(weights: Sequence[int], parts: int) -> list[range]:
    """Return `parts` neighbouring pieces of `range(len(weights))`, the heaviest as light as it can be.

    No piece is empty. Of several such ways it is the one whose early pieces are short.

    Raises:
        UsageError: if there are fewer things than pieces.
    """
    count = len(weights)
    if not 1 <= parts <= count:
        raise UsageError(f"{count} things for {parts} pieces; expected at least one in each piece")
    sums = [0]
    for weight in weights:
        sums.append(sums[-1] + weight)

    @cache
    def lightest(start: int, left: int) -> tuple[int, int]:
        """Return the weight of the heaviest of `left` pieces from `start` on, and where the first ends."""
        if left == 1:
            return sums[count] - sums[start], count
        ends = range(start + 1, count - left + 2)
        return min((max(sums[end] - sums[start], lightest(end, left - 1)[0]), end) for end in ends)

    pieces, start = [], 0
    for left in range(parts, 0, -1):
        end = lightest(start, left)[1]
        pieces.append(range(start, end))
        start = end
    return pieces
