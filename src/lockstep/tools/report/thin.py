"""Downsampling of curves: the lowest and the highest point of each interval."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

#: A point: where, and how much.
Point = tuple[float, float | None]
_DIGITS = 6


def thin(points: Sequence[Point], most: int) -> list[Point]:
    """Return at most `most` of `points`, in order: with the first, the last, the lowest and the highest.

    A value may be `None` or NaN, which is a gap; `most` is at least 4.
    """
    assert most >= 4, "a stretch has a lowest and a highest point, a curve a first and a last one"
    if len(points) <= most:
        return list(points)
    count = (most - 2) // 2
    inner = range(1, len(points) - 1)
    cuts = [1 + len(inner) * k // count for k in range(count + 1)]
    chosen = {0, len(points) - 1}
    for begin, end in pairwise(cuts):
        chosen.update(_extremes(points, range(begin, end)))
    return [points[k] for k in sorted(chosen)]


def _extremes(points: Sequence[Point], places: range) -> tuple[int, ...]:
    """Return where the lowest and the highest value are; of a stretch of gaps one place."""
    known = [k for k in places if _is_number(points[k][1])]
    if not known:
        return (places[0],)
    return min(known, key=lambda k: points[k][1] or 0.0), max(
        known, key=lambda k: points[k][1] or 0.0
    )


def _is_number(value: float | None) -> bool:
    return value is not None and not math.isnan(value)


def envelope(lines: Sequence[Sequence[Point]], most: int = 300) -> dict[str, list[Point]]:
    """Return the lowest, the median and the highest value of many lines, in at most `most` stretches."""
    known = [(x, y) for points in lines for x, y in points if y is not None and not math.isnan(y)]
    first, last = min(x for x, _ in known), max(x for x, _ in known)
    width = (last - first) / most or 1.0
    stretches: defaultdict[int, list[float]] = defaultdict(list)
    for x, y in known:
        stretches[min(int((x - first) / width), most - 1)].append(y)
    return {
        name: [(first + (k + 0.5) * width, of(stretches[k])) for k in sorted(stretches)]
        for name, of in (("highest", max), ("median", statistics.median), ("lowest", min))
    }


def rounded(value: float | None) -> float | None:
    """Return `value` with as many digits as a chart can show: short to write."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{_DIGITS}g}")
