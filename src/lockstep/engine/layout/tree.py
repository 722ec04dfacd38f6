"""The fixed binary tree over replicas that gives the order of additions in every sum ("tree order").

`tree(lo, hi)` splits at `lo` plus the largest power of two below `hi - lo`. The shape of the tree depends
only on the number of replicas, so a sum in tree order has the same bits on every layout.

A block of neighbouring leaves is reduced with a stack, as a binary counter adds one: push a value, then
add the two topmost values as long as their nodes are siblings in the tree. The values that remain on the
stack belong to the *maximal nodes* of the block. Pushing the maximal nodes of all blocks, in order, gives
the root by the same additions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

Interval = tuple[int, int]
Value = TypeVar("Value")


def split(lo: int, hi: int) -> int:
    """Return where the tree node over replicas `[lo, hi)` splits: the first replica of its right child.

    `hi - lo` is at least 2.
    """
    return lo + (1 << ((hi - lo - 1).bit_length() - 1))


def are_siblings(left: Interval, right: Interval, replicas: int) -> bool:
    """Return whether the intervals `left` and `right` of replicas are the children of one tree node."""
    if left[1] != right[0]:
        return False
    lo, hi = 0, replicas
    while (lo, hi) != (left[0], right[1]):
        if hi - lo < 2:
            return False
        middle = split(lo, hi)
        if right[1] <= middle:
            hi = middle
        elif left[0] >= middle:
            lo = middle
        else:
            return False
    return split(lo, hi) == left[1]


def merges(intervals: Iterable[Interval], replicas: int) -> tuple[list[int], list[Interval]]:
    """Return how many additions `fold` must make after each value, and the tree nodes of the final sums.

    `intervals`: the tree node of each value, in order, as an interval of replicas: the first one, and the
    one after the last. Two values are added if their nodes are the children of one node of the tree, whose
    left child has the largest power of two of its replicas that is less than all.
    """
    counts: list[int] = []
    stack: list[Interval] = []
    for interval in intervals:
        stack.append(interval)
        count = 0
        while len(stack) > 1 and are_siblings(stack[-2], stack[-1], replicas):
            right = stack.pop()
            stack[-1] = (stack[-1][0], right[1])
            count += 1
        counts.append(count)
    return counts, stack


def leaves(block: range) -> list[Interval]:
    """Return the intervals of the tree's leaves, one for each replica in the range `block`."""
    return [(replica, replica + 1) for replica in block]


def nodes(block: range, replicas: int) -> list[Interval]:
    """Return the intervals of the largest subtrees whose leaves all lie in the range of replicas `block`.

    They number about `2 * log2(replicas)` at most.
    """
    return merges(leaves(block), replicas)[1]


def fold(
    values: Sequence[Value], counts: Sequence[int], add: Callable[[Value, Value], Value]
) -> list[Value]:
    """Push `values` on a stack; after value `i`, `counts[i]` times, `add` the two topmost values.

    The sum replaces the two values. Returns the final stack.
    """
    stack: list[Value] = []
    for value, count in zip(values, counts, strict=True):
        stack.append(value)
        for _ in range(count):
            right = stack.pop()
            stack[-1] = add(stack[-1], right)
    return stack


def total(values: Sequence[Value], add: Callable[[Value, Value], Value]) -> Value:
    """Return the sum of `values`, one per replica, with additions in the order of the reduction tree."""
    counts, _ = merges(leaves(range(len(values))), len(values))
    (root,) = fold(values, counts, add)
    return root
