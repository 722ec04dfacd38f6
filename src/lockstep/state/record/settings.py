"""`RecordSettings`: the settings of a run's records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordSettings:
    """Settings of a run's records: its directory, trace, loggers, progress display, hashes and so on."""

    name: str
    run_dir: Path | None  # `None` for a new directory
    fresh: bool  # whether an existing run in the directory is overwritten
    progress: bool  # whether the main rank shows progress
    trace: Path | None  # directory of the trace
    device: torch.device
    loggers: tuple[Any, ...] = ()  # names, or objects with `log`
    generation: int = 0  # number of times that the processes of this run were restarted
    chosen: Mapping[str, Any] = field(default_factory=dict)  # settings, to start the run again
    number: int = 0  # of the run in the script
    hash_every: int | None = None  # steps between two hashes of parameters; 0: no step record
    #: results of audits that earlier starts have recorded
    audits: Mapping[str, Any] = field(default_factory=dict)
    launch: str | None = None
    restarted: bool = False  # whether this launch has recorded the run before
    repeats: bool = False  # whether another rank has the same microbatches and records them
    before: Path | None = None  # directory of the script's previous run
    method: Mapping[str, str] = field(default_factory=dict)  # names of strategy and exchange
