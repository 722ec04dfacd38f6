"""Measure how long steps take, and how much of that is spent in the loader and the gradient exchange."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator
from typing import Any, Self, TypeVar

T = TypeVar("T")
#: Seconds that a window lasts, or one step if that takes longer.
_WINDOW = 1.0


class Stopwatch:
    """Context manager that adds the time spent in its `with` blocks to `seconds`."""

    __slots__ = ("_began", "is_used", "seconds")

    def __init__(self) -> None:
        self.seconds = self._began = 0.0
        self.is_used = False  # whether the stopwatch has been started

    def __enter__(self) -> Self:
        self.is_used = True
        self._began = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._began

    def over(self, items: Iterator[T]) -> Iterator[T]:
        """Yield the elements of `items`, and add the time spent waiting for them to `seconds`."""
        began = time.perf_counter()
        for item in items:
            self.seconds += time.perf_counter() - began
            yield item
            began = time.perf_counter()
        self.seconds += time.perf_counter() - began


class Pace:
    """Measures the times of steps, in windows: groups of consecutive steps that take about a second.

    The first step of a process is a window by itself, since warm-up makes it slow. The stopwatch `data`
    runs while the script waits for a loader. The stopwatch `exchange` runs while a backward pass on the CPU
    waits for sums of gradients. `alone` means that there is one rank, whose exchange takes 0 seconds.
    """

    def __init__(self, *, alone: bool = False) -> None:
        self.data, self.exchange = Stopwatch(), Stopwatch()
        self.exchange.is_used = alone  # with one rank the time of the exchange is known to be 0
        self._is_warm = False
        self.begin()

    def exchanging(self, device: str) -> contextlib.AbstractContextManager[object]:
        """Return a context manager that measures how long the CPU takes to exchange gradients.

        On a GPU (`device` is not `cpu`) it measures nothing, since the CPU does not wait for the GPU.
        """
        # On a GPU the host continues: how long it waits is no measure of the exchange.
        return self.exchange if device == "cpu" else contextlib.nullcontext()

    def begin(self) -> None:
        """Begin a new window of steps now; the time since the last step is not counted."""
        self._times: list[float] = []
        self._samples = 0
        self._last = self._since = time.perf_counter()
        self._waited = self.data.seconds, self.exchange.seconds

    def step(self, samples: int) -> bool:
        """Record the end of a step; return whether the window is over.

        `samples` is the number of samples of the step, on all ranks.
        """
        now = time.perf_counter()
        self._times.append(now - self._last)
        self._last = now
        self._samples += samples
        if self._is_warm:
            return now - self._since > _WINDOW
        self._is_warm = True
        return True

    def window(self) -> dict[str, Any] | None:
        """Return counts and seconds of the steps in this window, and begin a new window.

        The fields are `steps`, `samples`, `seconds`, `data`, `exchange`, `median` and `slowest`. The result
        is `None` if the window has no steps.
        """
        times, data, before = self._times, *self._waited
        if not times:
            return None
        exchange = round(self.exchange.seconds - before, 6) if self.exchange.is_used else None
        seen = {
            "steps": len(times),
            "samples": self._samples,
            "seconds": round(sum(times), 6),
            "data": round(self.data.seconds - data, 6),
            "exchange": exchange,
            "median": round(statistics.median(times), 6),
            "slowest": round(max(times), 6),
        }
        self.begin()
        return seen
