"""Define `JobRequest`: the validated description of a job for `lockstep submit`."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRequest:
    """A job to submit: its command, its number of nodes, ranks and cores, and its time limit.

    Raises:
        UsageError: if a value cannot work on any cluster.
    """

    name: str
    command: tuple[str, ...]  # script or module, and its arguments
    run_options: tuple[str, ...] = ()  # of `lockstep run`
    nodes: int = 1
    ranks: int | str | None = None  # on each node; or `cpu`, `gpu`, `auto`
    cpus_per_rank: int | None = None
    gpus_per_node: str | None = None  # such as `4` or `a100:4`
    time_limit: str | None = None
    save_before: int | None = None  # seconds before the time limit
    options: Any = ()  # options of the backend
    directory: Path = field(default_factory=Path.cwd)  # of the job
    python: str = sys.executable

    def __post_init__(self) -> None:
        if self.nodes < 1:
            raise UsageError(f"--nodes is {self.nodes}; expected at least 1")
        if self.cpus_per_rank is not None and self.cpus_per_rank < 1:
            raise UsageError(f"--cpus-per-task is {self.cpus_per_rank}; expected at least 1")
        if self.gpus_per_node is not None and not _GPUS.fullmatch(self.gpus_per_node):
            raise UsageError(
                f"--gpus-per-node is {self.gpus_per_node!r}; expected a number, or one such as a100:4"
            )
        self._check_save_before()
        texts = self.options if isinstance(self.options, tuple) else ()
        for text in (self.name, self.time_limit or "", *texts):
            if not text.isprintable():
                raise UsageError(f"{text!r} is not printable, and cannot stand in a job script")
        if self.cpus_per_rank is not None and self.ranks_per_node is None:
            raise UsageError(
                f"--cpus-per-task with -n {self.ranks}: the number of ranks is not known yet",
                hint="give -n a number; cores are asked for as -n times --cpus-per-task",
            )

    def _check_save_before(self) -> None:
        before, limit = self.save_before, _seconds(self.time_limit or "")
        if before is not None and not 0 < before < 1 << 16:
            raise UsageError(f"--save-before is {before}; expected 1 to {(1 << 16) - 1} seconds")
        if before is not None and limit is not None and before >= limit:
            raise UsageError(
                f"--save-before is {before} s with --time {self.time_limit}; expected less than the limit"
            )

    @property
    def seconds_to_save(self) -> int:
        """Seconds before the time limit at which the job gets the signal to save the run's state."""
        if self.save_before is not None:
            return self.save_before
        limit = _seconds(self.time_limit or "")
        return max(1, min(_SAVE_SECONDS, limit // 4)) if limit else _SAVE_SECONDS

    @property
    def ranks_option(self) -> int | str | None:
        """Value of `-n` for `lockstep run` on each node: `ranks`, or `gpu` if only GPUs are given."""
        return "gpu" if self.ranks is None and self.gpus_per_node else self.ranks

    @property
    def ranks_per_node(self) -> int | None:
        """Number of ranks on each node; `None` if it depends on the devices of the node."""
        if isinstance(self.ranks, int):
            return self.ranks
        if self.gpus_per_node is not None and self.ranks in (None, "gpu", "auto"):
            return int(self.gpus_per_node.rpartition(":")[2])
        return 1 if self.ranks is None else None

    @property
    def cpus_per_node(self) -> int | None:
        """Number of cores for all ranks of a node; `None` if the number of ranks is not known."""
        ranks = self.ranks_per_node
        return None if ranks is None else max(1, ranks) * (self.cpus_per_rank or 1)


#: Seconds before its time limit at which a job gets the signal to save, unless the job is short.
_SAVE_SECONDS = 90
_GPUS = re.compile(r"([\w./-]+:)*[1-9][0-9]{0,3}")


def _seconds(limit: str) -> int | None:
    """Convert a time limit such as `30` (minutes) or `1-12:00` to seconds; `None` for another form."""
    days, dash, rest = limit.rpartition("-")
    words = [days or "0", *rest.split(":")]
    if not all(word.isdecimal() for word in words) or len(words) > 4:
        return None
    numbers = [int(word) for word in words]
    if not dash and len(numbers) < 4:
        numbers.insert(1, 0)  # without days, a number by itself is minutes
    scale = (86400, 3600, 60, 1)
    return sum(number * seconds for number, seconds in zip(numbers, scale, strict=False))
