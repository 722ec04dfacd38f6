"""Downsample curves: keep the lowest and the highest point of each interval."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

#: A point: its position, and its value; `None` is a gap.
Point = tuple[float, float | None]


def thin(points: Sequence[Point], most: int) -> list[Point]:
    """Return at most `most` of `points`, in order, with the first, last, lowest and highest among them.

    A value may be `None` or NaN, which is a gap; `most` is at least 4.
    """
    assert most >= 4, "a stretch has a lowest and a highest point, a curve a first and a last one"
    if len(points) <= most:
        return list(points)
    values = np.array([math.nan if y is None else y for _, y in points])
    chosen = {0, len(points) - 1}
    for part in np.array_split(np.arange(1, len(points) - 1), (most - 2) // 2):
        known = part[~np.isnan(values[part])]
        ends = (
            (known[values[known].argmin()], known[values[known].argmax()])
            if known.size
            else part[:1]
        )
        chosen.update(map(int, ends))
    return [points[k] for k in sorted(chosen)]


def envelope(lines: Sequence[Sequence[Point]], most: int = 300) -> dict[str, list[Point]]:
    """Return three lines, `highest`, `median` and `lowest`, over the values of many lines.

    The range of x is divided into at most `most` intervals; each gives one point per line.
    """
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
