"""Display of a run on a terminal, as a renderable of Rich."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from lockstep.tools.quantities import binary_size, counted, seconds
from lockstep.tools.watch.view import RankView, RunView

_percent = "{:.0%}".format
_COLOURS = {"running": "green", "finished": "green", "preempted": "yellow"}
#: Lines reserved on a short terminal for events and for the log.
_MOMENTS, _LOG = 6, 8
#: Lines besides those for ranks, events and the log: headings, the bar, rules, the footer.
_FRAME = 9


class Screen:
    """Renderable of Rich that displays the run in a `RunView`, cut to the terminal's height."""

    def __init__(self, view: RunView, keys: str = "") -> None:
        self._view, self._keys = view, keys

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the displayed parts: status, progress, ranks, events and log."""
        height = options.height or console.height
        room = max(0, height - _FRAME)
        ranks = min(len(self._view.ranks), max(2, room - _MOMENTS - _LOG))
        moments = min(len(self._view.moments), _MOMENTS, max(0, room - ranks - 2))
        lines = max(0, room - ranks - moments)
        yield self._head()
        yield self._progress()
        yield self._ranks(ranks)
        yield from self._moments(moments)
        yield from self._log(lines)
        if self._keys:
            yield Text(self._keys, style="dim", no_wrap=True, overflow="ellipsis")

    def _head(self) -> RenderableType:
        view = self._view
        colour = _COLOURS.get(view.status, "red")
        text = Text(no_wrap=True, overflow="ellipsis")
        text.append(view.name, "bold").append("  ").append(view.status, f"bold {colour}")
        text.append(f"  {view.layout}")
        if view.restarts:
            text.append(f"  {counted(view.restarts, 'restart')}", "yellow")
        text.append(f"  {view.directory}", "dim")
        return text if view.end is None else Group(text, Text(view.end, colour))

    def _progress(self) -> RenderableType:
        view = self._view
        parts = [view.epoch, None if view.step is None else f"step {view.step:,}"]
        parts.append(None if view.rate is None else f"{view.rate:,.0f} samples/s")
        parts += [f"{name} {value:.4g}" for name, value in view.values.items()]
        left = view.seconds_left
        parts.append(None if left is None else f"{_clock(left)} left")
        words = Text(
            "  ".join(part for part in parts if part) or "no step yet", overflow="ellipsis"
        )
        if view.done is None:
            return words
        bar = Table.grid(padding=(0, 1), expand=True)
        bar.add_column(ratio=1)
        bar.add_column(justify="right")
        bar.add_row(ProgressBar(total=1.0, completed=view.done), f"{view.done:.0%}")
        return Group(words, bar)

    def _ranks(self, count: int) -> RenderableType:
        view = self._view
        shown = dict(list(view.ranks.items())[:count])
        on_gpu = any(rank.measured("machine", "device") is not None for rank in view.ranks.values())
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        table.add_column("rank", no_wrap=True)
        heads = ["step", "step time", "data", "exchange", "cores", "memory"]
        heads += ["GPU memory", "GPU busy"] * on_gpu + ["last event"] * (view.status == "running")
        for head in heads:
            table.add_column(head, justify="right", no_wrap=True)
        for number, rank in shown.items():
            table.add_row(str(number), *self._cells(rank, on_gpu=on_gpu))
        left = len(view.ranks) - len(shown)
        return Group(table, Text(f"and {left} more ranks", "dim")) if left else table

    def _cells(self, rank: RankView, *, on_gpu: bool) -> list[str]:
        kinds: list[tuple[Any, Callable[[Any], str]]] = [
            (rank.step, lambda step: f"{step:,}"),
            (rank.measured("pace", "median"), seconds),
            (rank.share("data"), _percent),
            (rank.share("exchange"), _percent),
            (rank.measured("machine", "cpu"), lambda cores: f"{cores:.2f}"),
            (rank.measured("machine", "host"), binary_size),
        ]
        if on_gpu:
            kinds.append((rank.measured("machine", "device"), binary_size))
            kinds.append((rank.measured("machine", "busy"), _percent))
        cells = ["" if value is None else form(value) for value, form in kinds]
        if self._view.status == "running":
            heard = f"{_clock(self._view.time - rank.time)} ago"
            cells.append(heard if rank.time else "never")
        return cells

    def _moments(self, count: int) -> RenderResult:
        if count:
            yield Rule("what happened", style="dim", align="left")
            for moment in self._view.moments[-count:]:
                text = Text(no_wrap=True, overflow="ellipsis").append(
                    f"{time.strftime('%H:%M:%S', time.localtime(moment.time))}  ", "dim"
                )
                yield text.append(moment.text, "red" if moment.is_bad else "")

    def _log(self, count: int) -> RenderResult:
        lines = self._view.lines[-count:] if count else ()
        if lines:
            yield Rule("log", style="dim", align="left")
            for line in lines:
                yield Text(line, no_wrap=True, overflow="ellipsis")


def _clock(seconds: float) -> str:
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole} s"
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"
