"""A run goes on, on a different number of ranks, from wherever its state is (A15)."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.engine.recovery.preemption import Preempted
from lockstep.engine.recovery.resume import SavedState, StateSearch, _newest_whole
from lockstep.state.checkpoint.parts import StoredTensor
from lockstep.testing import run_ranks
from lockstep.testing.ranks import RankError
from lockstep.world.rendezvous.rank_rendezvous import RankRendezvous


def train(directory: str, slow: float = 0.0) -> str:
    """Train a small model; return the digest, or `preempted`."""
    try:
        with lockstep.Run("resume", run_dir=Path(directory), progress=False) as run:
            generator = torch.Generator().manual_seed(0)
            labels = torch.randint(0, 3, (54,), generator=generator)
            data = TensorDataset(torch.randn(54, 4, generator=generator), labels)
            net = nn.Sequential(
                nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3)
            )
            model = run.model(net)
            optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
            scheduler = run.scheduler(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20))
            loader = run.loader(data, batch_size=24, shuffle=True)
            for _ in run.epochs(20):
                for x, y in loader:
                    time.sleep(slow)
                    run.backward(F.cross_entropy(model(x), y))
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
        return run.digest()
    except Preempted:
        return "preempted"


def test_a_run_goes_on_with_other_numbers_of_ranks(tmp_path):
    """Asked to end through the store, twice; three, then one, then two ranks: as if nothing had been."""
    replicas = {"LOCKSTEP_REPLICAS": "3", "LOCKSTEP_THREADS": "1"}
    (whole,) = run_ranks(train, 1, str(tmp_path / "whole"), environ=replicas)
    place = str(tmp_path / "run")
    # Slow enough that ranks which only have the store agree before the end.
    first = run_ranks(train, 3, place, 0.02, environ={**replicas, "LOCKSTEP_FAULTS": "term@5"})
    assert first == ["preempted"] * 3
    # The number of replicas is the one that the run began with.
    second = run_ranks(train, 1, place, environ={"LOCKSTEP_FAULTS": "term@45"})
    assert second == ["preempted"]
    assert run_ranks(train, 2, place, environ={}) == [whole, whole]
    recorded = json.loads((tmp_path / "run/run.json").read_text())
    assert recorded["status"] == "finished"
    assert recorded["steps"] == 60
    steps = [generation.get("step", 0) for generation in recorded["generations"]]
    assert steps[0] == 0
    assert 5 < steps[1] < 45
    assert steps[2] == 45


def few(directory: str, batch_size: int, samples: int, later: int) -> tuple[str, int]:
    """Train for two epochs, the second one over `later` samples; return how that ended."""
    try:
        with lockstep.Run("few", run_dir=Path(directory), progress=False) as run:
            model = run.model(nn.Linear(2, 1))
            optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            for epoch in run.epochs(2):
                data = TensorDataset(torch.ones(later if epoch else samples, 2))
                for (x,) in run.loader(data, batch_size=batch_size, shuffle=True):
                    run.backward(model(x).square().mean())
                    optimizer.step()
                    optimizer.zero_grad()
    except Preempted:
        return "preempted", run.step
    return "finished", run.step


def test_the_rest_of_a_loop_over_other_batches_is_refused(tmp_path):
    """Batch 3 of 8 samples would be other samples than batch 3 of 16: some twice, some never."""
    place = str(tmp_path / "run")
    environ = {"LOCKSTEP_REPLICAS": "2", "LOCKSTEP_THREADS": "1"}
    stop = {**environ, "LOCKSTEP_FAULTS": "term@2"}
    assert run_ranks(few, 1, place, 16, 64, 80, environ=stop) == [("preempted", 2)]
    with pytest.raises(RankError) as caught:
        run_ranks(few, 1, place, 8, 64, 80, environ=environ)
    assert "RunDirectoryError" in str(caught.value)
    assert "batch 2 of a loop of epoch 0 over loader 0" in str(caught.value)
    assert "batch_size: 16 recorded, 8 now" in str(caught.value)
    with pytest.raises(RankError, match="samples: 64 recorded, 96 now"):
        run_ranks(few, 2, place, 16, 96, 80, environ=environ)
    # Data of a later epoch is the script's own affair, as in a curriculum.
    assert run_ranks(few, 2, place, 16, 64, 48, environ=environ) == [("finished", 7)] * 2


def test_parts_in_memory_count_where_each_rank_has_its_own():
    """Points, and whether they are of parts: of a node that is lost, some have none."""
    for states, newest in (
        ([[7, True]] * 3, 7),
        ([[7, True], [7, True], [-1, False]], -1),
        ([[7, True], [8, True]], -1),
        ([[7, False], [5, False], [-1, False]], 7),
        ([[-1, False]] * 2, -1),
    ):
        assert _newest_whole(states) == newest


def spread(holder: int) -> list[object]:
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", store=dist.PrefixStore("g", store), rank=rank, world_size=3)
    tensors = {
        "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        "scalar": torch.tensor(7),
        "turned": torch.arange(6.0).view(2, 3).t(),
        "flags": torch.tensor([True, False]),
        "empty": torch.empty(0, 3),
    }
    world = lockstep.World(rank=rank, size=3, local_rank=rank, local_size=3, address="x", port=1)
    rendezvous = RankRendezvous(world=world, store=store, number=0, ours=False)
    search = StateSearch(rendezvous, dist.group.WORLD, None, None)
    stored = {name: StoredTensor.of(tensor) for name, tensor in tensors.items()}
    own = SavedState('{"text": 1}', stored, "memory") if rank == holder else None
    found = search._spread(own)
    same = all(torch.equal(found.tensors[name].read(), tensor) for name, tensor in tensors.items())
    return [found.text, same, list(found.tensors), found.source]


def test_ranks_without_the_state_get_it_from_one_that_holds_it():
    found = run_ranks(spread, 3, 1)
    names = ["half", "scalar", "turned", "flags", "empty"]
    assert [one[:3] for one in found] == [['{"text": 1}', True, names]] * 3
    assert [one[3] for one in found] == ["rank 1", "memory", "rank 1"]
