"""`RecordSettings`: the settings of a run's records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordSettings:
    """What a run is asked to record.

    Attributes:
        name: the run's name.
        run_dir: its directory; `None` for a new one.
        fresh: whether a run that is found there is overwritten.
        progress: whether the main rank shows how the run gets on.
        trace: where the trace goes; `None` for no trace.
        device: what the rank computes on.
        loggers: names of loggers, or objects with `log`.
        generation: how many times the processes of this run were started before.
        launch: name of the launch; `None` where none is given.
        restarted: whether this launch has recorded the run before.
        repeats: whether another rank sees the same microbatches, and records them.
        before: directory of the run that the script has made before this one.
        method: names of the strategy and the exchange.
    """

    name: str
    run_dir: Path | None
    fresh: bool
    progress: bool
    trace: Path | None
    device: torch.device
    loggers: tuple[Any, ...] = ()
    generation: int = 0
    launch: str | None = None
    restarted: bool = False
    repeats: bool = False
    before: Path | None = None
    method: Mapping[str, str] = field(default_factory=dict)
