"""Choosing GPUs on a machine that has some; elsewhere these tests are skipped, and say so."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch

from lockstep.launch.devices import machine
from lockstep.launch.devices.gpus import list_gpus
from lockstep.world.devices import device_identity

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
]

SHOW = """
import json, os, torch
from lockstep.world import detect
from lockstep.world.devices import choose_device, device_identity
device = choose_device("auto", detect())
with open(f"rank-{os.environ['RANK']}.json", "w") as file:
    json.dump([str(device), torch.cuda.device_count(), device_identity(device)], file)
"""


@pytest.fixture
def uuids() -> list[str]:
    """Ids of the whole GPUs that torch sees."""
    if shutil.which("nvidia-smi") is None:
        pytest.skip("needs nvidia-smi")
    if os.environ.get("CUDA_VISIBLE_DEVICES"):
        pytest.skip("CUDA_VISIBLE_DEVICES hides some of the GPUs that are listed")
    listing = list_gpus()
    assert listing.problem is None
    if any(gpu.parent for gpu in listing.gpus):
        pytest.skip("a GPU of this machine is split into MIG devices")
    return [gpu.uuid for gpu in listing.gpus if gpu.uuid]


def test_the_launchers_count_is_torchs(uuids: list[str]) -> None:
    assert machine.look().gpus == torch.cuda.device_count() == len(uuids)


def test_cuda_counts_the_same_in_a_child() -> None:
    assert machine.count_in_a_child() == torch.cuda.device_count()


def test_identities_are_the_ids_that_are_listed(uuids: list[str]) -> None:
    found = [device_identity(torch.device("cuda", k)) for k in range(len(uuids))]
    assert sorted(map(str, found)) == sorted(uuids)


@pytest.mark.parametrize("start", ["fork", "exec"])
def test_a_rank_gets_the_gpu_that_was_named(lockstep, uuids: list[str], start: str) -> None:
    script = lockstep.script(SHOW)
    for name in (str(len(uuids) - 1), uuids[-1], uuids[-1][:12]):
        done = lockstep("run", "--devices", name, "--start", start, script)
        assert done.code == 0, done.err
        told = json.loads((lockstep.directory / "rank-0.json").read_text())
        assert told == ["cuda:0", 1, uuids[-1]]


def test_two_ranks_get_two_gpus(lockstep, uuids: list[str]) -> None:
    if len(uuids) < 2:
        pytest.skip("this machine has fewer than 2 GPUs")
    done = lockstep("run", "--devices", "1,0", lockstep.script(SHOW))
    assert done.code == 0, done.err
    told = [json.loads((lockstep.directory / f"rank-{k}.json").read_text()) for k in (0, 1)]
    assert told == [["cuda:0", 2, uuids[1]], ["cuda:1", 2, uuids[0]]]
