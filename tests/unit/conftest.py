"""Fixtures of the unit tests: runs in this process, and a process that is left as it was found.

torch is imported where it is needed only, since tests of the launcher live here too.
"""

from __future__ import annotations

import itertools
import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def torch_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep random states, threads, gradients' mode and the excepthook from leaving the test."""
    import numpy as np
    import torch

    for name in list(os.environ):
        if name.startswith("LOCKSTEP_") or name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)
    # Some parts of torch set this one for good when they are first used.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/tmp/torchinductor")
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    threads, hook = torch.get_num_threads(), sys.excepthook
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])
    sys.excepthook = hook
    assert torch.is_grad_enabled()


@pytest.fixture
def make_run(tmp_path: Path, torch_state: None) -> Callable[..., Any]:
    """Make a quiet `Run` of one rank on the CPU, each in a directory of its own."""
    numbers = itertools.count()

    def make(name: str = "test", **settings: Any) -> Any:
        from lockstep import Run

        directory = tmp_path / f"run-{next(numbers)}"
        return Run(
            name,
            **{
                "threads": 1,
                "devices": "cpu",
                "progress": False,
                "run_dir": directory,
                **settings,
            },
        )

    return make


@pytest.fixture
def lone_group(torch_state: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A process group of one rank, so that a run in this process takes the way of several."""
    import torch.distributed as dist

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `torch.cuda`, of which a test replaces functions, be the accelerator of this torch."""
    import torch

    from lockstep.world import accelerator

    monkeypatch.setattr(accelerator, "kind", lambda: "cuda")
    monkeypatch.setattr(accelerator, "module", lambda: torch.cuda)
