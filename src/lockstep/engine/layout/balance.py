"""Partition of a sequence into contiguous parts of about equal weight."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate

from lockstep.errors import UsageError


def balance(weights: Sequence[int], parts: int) -> list[range]:
    """Split `range(len(weights))` into `parts` contiguous ranges whose largest sum of weights is minimal.

    No range is empty. Among several solutions, the first ranges are as short as possible.

    Raises:
        UsageError: if there are fewer weights than parts.
    """
    count = len(weights)
    if not 1 <= parts <= count:
        raise UsageError(f"{count} things for {parts} pieces; expected at least one in each piece")
    sums = list(accumulate(weights, initial=0))

    @cache
    def lightest(start: int, left: int) -> tuple[int, int]:
        """Split `range(start, len(weights))` into `left` ranges.

        Return the largest sum of weights of a range, which is minimal, and the end of the first range.
        """
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
