"""The state of a model that is cut over ranks stays cut: saved in parts, read in other parts."""

from __future__ import annotations

import ctypes
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import lockstep
from lockstep.engine.recovery.preemption import Preempted
from lockstep.errors import CheckpointError
from lockstep.state.checkpoint import catalog, dcp
from lockstep.state.checkpoint.dcp import stored
from lockstep.state.checkpoint.manager import CheckpointManager
from lockstep.state.checkpoint.parts import Sharding
from lockstep.state.checkpoint.shared_memory import Descriptors
from lockstep.state.checkpoint.snapshot import Snapshots
from lockstep.testing import run_ranks
from tests.distributed.jobs import classes, quiet_run

FSDP = {"LOCKSTEP_STRATEGY": "fsdp"}
IDENTITY = {"name": "test"}
TAG = bytes(range(32))
MEBI = 1 << 20
#: Of the model below: parameters and AdamW's averages, of all layers and of one.
STATE, UNIT = 96 * MEBI, 12 * MEBI


def grown(act: Callable[[], object]) -> int:
    """Return by how much resident memory grows at most while `act` runs."""
    ctypes.CDLL(None).malloc_trim(0)  # what is free and resident would hide what is taken
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now
    before = status("VmRSS")
    act()
    return status("VmHWM") - before


def status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def peaks() -> dict[str, int]:
    dcp.load_dcp()
    with quiet_run() as run:
        # Tensors in pages of their own, which go with them: no peak is hidden by memory that is free.
        ctypes.CDLL(None).mallopt(-3, 1 << 20)
        layers = [nn.Linear(1024, 1024, bias=False) for _ in range(8)]
        model = run.model(nn.Sequential(*layers))
        optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
        for x, _ in run.loader(classes(8, (1024,)), batch_size=4):
            run.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()

        def save() -> None:
            run.save()
            run._session._checkpointing._checkpoints.wait()

        return {"checkpoint": grown(save), "digest": grown(run.digest)}


@pytest.mark.wide(beyond=1)
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_needs_memory_for_its_share_and_one_unit(ranks: int) -> None:
    environ = {**FSDP, "LOCKSTEP_REPLICAS": "4"}
    for peak in run_ranks(peaks, ranks, environ=environ):
        assert peak["checkpoint"] <= STATE // ranks + UNIT, peak
        # A tensor has 4 MiB, of which a collective makes copies; all of them have 32.
        assert peak["digest"] <= 6 * 4 * MEBI, peak


def example() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    state = {f"models.0.{n}": torch.randn(n, 5, generator=generator) for n in (1, 2, 7, 64, 3000)}
    return {**state, "empty": torch.empty(4, 0), "half": torch.arange(30).bfloat16().view(10, 3)}


def cut() -> dict[str, Tensor]:
    """The same, each rank with its part; and one that is not cut."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {
        name: distribute_tensor(tensor, mesh, [Shard(number % 2)])
        for number, (name, tensor) in enumerate(example().items())
    }
    return {**state, "whole": torch.arange(100_000)}


def whole() -> dict[str, Tensor]:
    return {**example(), "whole": torch.arange(100_000)}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


def save(directory: str, apart: int) -> int:
    """Write a checkpoint; rank `apart` sees another directory. Return the bytes that were staged."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    place = Path(directory, "elsewhere" if rank == apart else "checkpoints")
    own = dist.PrefixStore("disk", store)
    disk = CheckpointManager(
        catalog.Catalog(place, IDENTITY), rank=rank, size=size, store=own, keep=1
    )
    disk.save(3, cut(), "text", best=None)
    disk.wait()
    staged = sum(tensor.nbytes for tensor in disk._buffers._kept.values())
    disk.close()
    dist.destroy_process_group()
    return staged


@pytest.mark.wide(beyond=1)
@pytest.mark.parametrize("apart", [-1, 2])
def test_each_rank_writes_its_part_or_all_gather_tensor_by_tensor(
    tmp_path: Path, apart: int
) -> None:
    staged = run_ranks(save, 3, str(tmp_path), apart)
    checkpoint = catalog.look(tmp_path / "checkpoints/step-00000003")
    assert same(
        {name: one.read() for name, one in stored(checkpoint.path, checkpoint.manifest).items()},
        whole(),
    )
    total = sum(tensor.nbytes for tensor in whole().values())
    assert sum(staged) == total
    assert (min(staged) > 0) is (apart == -1)


def snap(directory: str) -> None:
    dist.init_process_group("gloo")
    files = [os.open(Path(directory, name), os.O_RDWR) for name in "cab"]
    memory = Descriptors(files[0], files[0], (files[1], files[2]))
    rank, size = dist.get_rank(), dist.get_world_size()
    snapshots = Snapshots(memory, tag=TAG, part=rank, parts=size)
    snapshots.write(2, "text", cut())
    snapshots.write(3, "text", {name: tensor + 1 for name, tensor in cut().items()})
    dist.destroy_process_group()


@pytest.mark.wide(beyond=1)
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_parts_make_a_snapshot_that_any_number_of_ranks_reads(tmp_path: Path, ranks: int) -> None:
    files = []
    for name in "cab":
        (tmp_path / name).touch()
        files.append(os.open(tmp_path / name, os.O_RDWR))
    run_ranks(snap, ranks, str(tmp_path))
    memory = Descriptors(files[0], files[0], (files[1], files[2]))
    left = Snapshots(memory, tag=TAG, part=0, parts=2).found
    assert left is not None
    assert left.text == "text"
    assert same(left.tensors, {name: tensor + 1 for name, tensor in whole().items()})
    for file in files:
        os.close(file)


def snap_apart(directory: str) -> None:
    """Two launchers have two ranks each."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    own = Path(directory, str(rank // 2))
    files = [os.open(own / name, os.O_RDWR) for name in "cab"]
    memory = Descriptors(files[0], files[0], (files[1], files[2]))
    first = rank - rank % 2
    snapshots = Snapshots(memory, tag=TAG, part=rank % 2, parts=2, first=first, size=4)
    assert snapshots.missing(cut()) is None
    snapshots.write(2, "text", cut())
    dist.destroy_process_group()


def test_each_launcher_has_the_parts_of_its_ranks(tmp_path: Path) -> None:
    for node in "01":
        (tmp_path / node).mkdir()
        for name in "cab":
            (tmp_path / node / name).touch()
    run_ranks(snap_apart, 4, str(tmp_path))
    for node in (0, 1):
        files = [os.open(tmp_path / str(node) / name, os.O_RDWR) for name in "cab"]
        memory = Descriptors(files[0], files[0], (files[1], files[2]))
        left = Snapshots(memory, tag=TAG, part=0, parts=2).found
        assert left is not None
        assert (left.ranks, left.size, left.is_whole) == (range(2 * node, 2 * node + 2), 4, False)
        stored = left.stored()
        assert torch.equal(stored["whole"].read(), torch.arange(100_000))
        for number, (name, tensor) in enumerate(example().items()):
            for rank in range(4):
                box = Sharding(number % 2, 4).box(tuple(tensor.shape), rank)
                if rank // 2 == node or not box.numel:
                    assert torch.equal(stored[name].fetch(box), box.of(tensor))
                else:
                    with pytest.raises(CheckpointError, match="another launcher has a part of"):
                        stored[name].fetch(box)
        for file in files:
            os.close(file)


def train(directory: str, slow: float) -> str:
    """Train a small model; return the digest, or `preempted`."""
    try:
        with lockstep.Run("train", run_dir=Path(directory), progress=False) as run:
            net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 4))
            model = run.model(net, wrap=[nn.Linear])
            optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
            for _ in run.epochs(20):
                for x, y in run.loader(classes(40, (6,)), batch_size=16, shuffle=True):
                    time.sleep(slow)
                    run.backward(F.cross_entropy(model(x), y))
                    optimizer.step()
                    optimizer.zero_grad()
        return run.digest()
    except Preempted:
        return "preempted"


def test_saved_on_four_ranks_and_continued_on_three_and_one(tmp_path: Path) -> None:
    """And between, torch's own tool reads it."""
    environ = {"LOCKSTEP_REPLICAS": "4", "LOCKSTEP_THREADS": "1"}
    (expected,) = run_ranks(train, 1, str(tmp_path / "whole"), 0.0, environ=environ)
    place = str(tmp_path / "run")
    for ranks, fault in ((4, "term@3"), (3, "term@30")):
        stop = {**environ, **FSDP, "LOCKSTEP_FAULTS": fault}
        assert run_ranks(train, ranks, place, 0.1, environ=stop) == (["preempted"] * ranks)
        newest = catalog.Catalog(tmp_path / "run/checkpoints", None).newest()
        assert newest is not None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp_to_torch_save(newest.path, tmp_path / "plain.pt")
        tensors = torch.load(tmp_path / "plain.pt", weights_only=True)
        assert same(
            tensors,
            {name: one.read() for name, one in stored(newest.path, newest.manifest).items()},
        )
        weights = newest.path / "__2_0.distcp"
        assert weights.exists(), "the third rank wrote a part"
    assert run_ranks(train, 1, place, 0.0, environ={**environ, **FSDP}) == [expected]
