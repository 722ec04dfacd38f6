"""Where a model lives in unit tests: on one rank, which hosts all replicas."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from lockstep.engine.exchange.base import Forest
from lockstep.engine.strategies.model_context import ModelContext


def model_context(replicas: int = 1, **more: Any) -> ModelContext:
    """Return a context; `more` are attributes that are to be others."""
    own: dict[str, Any] = {
        "number": 0,
        "device": torch.device("cpu"),
        "block": range(replicas),
        "replicas": replicas,
        "forest": Forest.of(replicas, 1, 0),
        "group": None,
        "mesh": None,
        "store": dist.HashStore(),
        "exchange": "none",
        "sync_every": None,
        "exact": True,
        "say": print,
        "warn": print,
    }
    return ModelContext(**(own | more))
