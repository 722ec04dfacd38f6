"""Combinations of ranks, strategy and exchange that a script is measured on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.errors import UsageError
from lockstep.launch.command import parse_names
from lockstep.launch.devices.gpus import Gpu, list_gpus, visible
from lockstep.registry import EXCHANGES, STRATEGIES
from lockstep.tools.quantities import counted

#: The strategy of one rank with several GPUs.
(DATA_PARALLEL,) = STRATEGIES.where(lambda one: one.scatters)


@dataclass(frozen=True, slots=True)
class Combination:
    """One way to run the script."""

    ranks: int  # with `dp`: GPUs, all of one rank
    strategy: str | None = None  # `None` leaves it to the script
    exchange: str | None = None  # the same; `None` on one rank, too

    @property
    def processes(self) -> int:
        """How many ranks `lockstep run` starts."""
        return 1 if self.strategy == DATA_PARALLEL else self.ranks

    def environ(self, gpus: Sequence[Gpu]) -> dict[str, str]:
        """Return the variables that give the launch its GPUs, where that is not one for each rank."""
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
    """Refuse DataParallel over more GPUs than there are.

    Raises:
        UsageError: naming how many there are.
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
    """Return all combinations, each once: on one rank the exchanges are all the same."""
    found = [
        Combination(count, strategy, exchange if count > 1 else None)
        for strategy in strategies
        for exchange in exchanges
        for count in ranks
    ]
    return list(dict.fromkeys(found))


def parse_counts(flag: str, text: str) -> list[int]:
    """Return the numbers of ranks in the value of a flag, such as `1,2,4`, the smallest first.

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


def choose_exchanges(one: str | None, several: str | None) -> Sequence[str | None]:
    """Return the exchanges of each layout; `None` leaves it to the script.

    Raises:
        UsageError: if they don't go together, or one has a name that no exchange has.
    """
    if one is not None and several is not None:
        raise UsageError(
            f"--exchange {one} beside --exchanges {several}; expected one of them",
            hint="--exchanges E,… runs each layout with each of its exchanges, --exchange E with one",
        )
    if several is None:
        return [one]
    example = "for example --exchanges tree,shared-memory"
    return parse_names("--exchanges", several, EXCHANGES.names(), example)
