"""`RecordSettings`: the settings of a run's records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordSettings:
    """What a run is asked to record."""

    name: str
    run_dir: Path | None  # `None` for a new one
    fresh: bool  # a run that is found there is overwritten
    progress: bool  # the main rank shows it
    trace: Path | None  # its directory
    device: torch.device
    loggers: tuple[Any, ...] = ()  # names, or objects with `log`
    generation: int = 0  # how many times the processes of this run were started before
    launch: str | None = None
    restarted: bool = False  # this launch has recorded the run before
    repeats: bool = False  # another rank has the same microbatches, and records them
    before: Path | None = None  # directory of the run that the script has made before this one
    method: Mapping[str, str] = field(default_factory=dict)  # names of strategy and exchange
