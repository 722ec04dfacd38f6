"""Combinations of ranks, strategy and exchange on which a benchmark measures a script."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.errors import UsageError
from lockstep.launch.devices.gpus import Gpu, list_gpus, visible
from lockstep.registry import STRATEGIES
from lockstep.tools.bench.projection import Link
from lockstep.tools.bench.traffic import Layout
from lockstep.tools.quantities import counted

#: The strategy of one rank with several GPUs.
(DATA_PARALLEL,) = STRATEGIES.where(lambda one: one.scatters)


@dataclass(frozen=True, slots=True)
class Combination:
    """A number of ranks, a strategy and an exchange for launches of the benchmarked script."""

    ranks: int  # with `dp`: GPUs, all of one rank
    strategy: str | None = None  # `None` leaves it to the script
    exchange: str | None = None  # `None` leaves it to the script; always `None` on one rank

    @property
    def processes(self) -> int:
        """Number of ranks that `lockstep run` starts: 1 with DataParallel, else `ranks`."""
        return 1 if self.strategy == DATA_PARALLEL else self.ranks

    def environ(self, gpus: Sequence[Gpu]) -> dict[str, str]:
        """Return `CUDA_VISIBLE_DEVICES` with several of `gpus` for DataParallel; else an empty dict."""
        if self.processes == self.ranks:
            return {}
        return {"CUDA_VISIBLE_DEVICES": ",".join(gpu.entry for gpu in gpus[: self.ranks])}

    def __str__(self) -> str:
        if self.processes < self.ranks:
            return f"{self.ranks} GPUs of one rank with {self.strategy}"
        strategy = "" if self.strategy is None else f" with {self.strategy}"
        exchange = "" if self.exchange is None else f" over {self.exchange}"
        return f"{counted(self.ranks, 'rank')}{strategy}{exchange}"


def visible_gpus() -> Sequence[Gpu]:
    """Return the GPUs that this process may use."""
    return visible(list_gpus().gpus, os.environ).gpus


def check_gpus(combinations: Sequence[Combination], gpus: Sequence[Gpu]) -> None:
    """Raise an error if a combination with DataParallel has more GPUs than there are in `gpus`.

    Raises:
        UsageError: naming the number of GPUs.
    """
    for one in combinations:
        if one.processes < one.ranks and len(gpus) < one.ranks:
            raise UsageError(
                f"strategy dp on {one.ranks} GPUs: {len(gpus)} can be used here; dp is one rank whose "
                "threads compute on a GPU each",
                hint="leave dp out of --strategies, or measure it with --ranks 1",
            )


def combine(
    ranks: Sequence[int], strategies: Sequence[str | None], exchanges: Sequence[str | None]
) -> list[Combination]:
    """Return each combination of ranks, strategy and exchange once.

    With one rank the exchange is `None`, since one rank exchanges nothing.
    """
    found = [
        Combination(count, strategy, exchange if count > 1 else None)
        for strategy in strategies
        for exchange in exchanges
        for count in ranks
    ]
    return list(dict.fromkeys(found))


def parse_counts(flag: str, text: str) -> list[int]:
    """Parse `text`, the value of the option `flag`, such as `1,2,4`; return the numbers of ranks, sorted.

    Raises:
        UsageError: for a word that is no number of ranks.
    """
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if not word.isdecimal() or int(word) < 1:
            raise UsageError(
                f"{flag} names {word!r}; expected integers of at least 1",
                hint=f"for example {flag} 1,2,4",
            )
    return sorted({int(word) for word in words})


def parse_layouts(flag: str, text: str, link: Link) -> list[Layout]:
    """Parse `text`, the value of the option `flag`, such as `8,64,8x8`; return the layouts, sorted.

    `8x8` means 8 hosts of 8 ranks each. A plain number N means N hosts of one rank each if `link` has a
    speed between hosts, else N ranks on one host.

    Raises:
        UsageError: for a word that is no layout, or for several hosts if `link` has no bandwidth.
    """
    linked = (link.bandwidth, link.latency) != (None, None)
    found = set()
    for word in (word.strip() for word in text.split(",")):
        layout = _LAYOUT.fullmatch(word)
        if layout is None:
            raise UsageError(
                f"{flag} names {word!r}; expected numbers of ranks, or hosts x ranks, of at least 1",
                hint=f"for example {flag} 8,64,8x8",
            )
        first, second = int(layout[1]), layout[2]
        if second is None:
            found.add(Layout(first, 1) if linked else Layout(1, first))
            continue
        if first > 1 and link.bandwidth is None:
            raise UsageError(
                f"{flag} names {word}, {first} hosts; expected --bandwidth, the speed of each host's link",
                hint=f"for example {flag} {word} --bandwidth 25Gbit/s --latency 20us",
            )
        found.add(Layout(first, int(second)))
    return sorted(found, key=lambda one: (one.ranks, one.hosts))


_LAYOUT = re.compile(r"([1-9][0-9]{0,5})(?:x([1-9][0-9]{0,5}))?")
