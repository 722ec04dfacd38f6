"""The fixed binary reduction tree over replicas: the order of every sum.

`tree(lo, hi)` splits at `lo` plus the largest power of two below `hi - lo`. Its shape depends on the
number of replicas alone, so a sum taken along it has the same bits however the replicas are spread.

A block of neighbouring leaves is reduced with a stack, as a binary counter adds one: push a value,
then merge the two topmost values as often as they are siblings in the tree. What remains on the
stack are the *maximal nodes* of the block. Pushing the maximal nodes of all blocks, in order,
gives the root: the same additions, wherever they happen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

Interval = tuple[int, int]
Value = TypeVar("Value")


def split(lo: int, hi: int) -> int:
    """Return where the node over the replicas `[lo, hi)` splits; `hi - lo` is at least 2."""
    return lo + (1 << ((hi - lo - 1).bit_length() - 1))


def are_siblings(left: Interval, right: Interval, replicas: int) -> bool:
    """Return whether the two neighbouring intervals are the two children of one node."""
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
    """Return how many merges follow each push of `intervals`, and the nodes that remain at the end."""
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
    """Return the leaf intervals of a block of replicas."""
    return [(replica, replica + 1) for replica in block]


def nodes(block: range, replicas: int) -> list[Interval]:
    """Return the maximal nodes of a block: at most about `2 * log2(replicas)` of them."""
    return merges(leaves(block), replicas)[1]


def fold(
    values: Sequence[Value], counts: Sequence[int], add: Callable[[Value, Value], Value]
) -> list[Value]:
    """Push `values` with the merges that `counts` asks for, and return what remains on the stack."""
    stack: list[Value] = []
    for value, count in zip(values, counts, strict=True):
        stack.append(value)
        for _ in range(count):
            right = stack.pop()
            stack[-1] = add(stack[-1], right)
    return stack


def total(values: Sequence[Value], add: Callable[[Value, Value], Value]) -> Value:
    """Return the sum of one value per replica, in tree order."""
    counts, _ = merges(leaves(range(len(values))), len(values))
    (root,) = fold(values, counts, add)
    return root
