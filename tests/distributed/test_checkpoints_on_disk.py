"""Checkpoints that several processes write together, and any number reads (A15)."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.errors import LockstepError
from lockstep.state.checkpoint import dcp
from lockstep.state.record.error_report import errnos
from lockstep.testing import RankError, run_ranks

pytestmark = pytest.mark.ranks(3)

IDENTITY = {"name": "test", "seed": 0}


def state(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {f"models.0.{k}.weight": torch.randn(1000, generator=generator) for k in range(7)}


def checkpoints(directory: str, **settings: Any) -> Any:
    """What a rank of `run_ranks` sees."""
    import torch.distributed as dist

    from lockstep.state.checkpoint.catalog import Catalog
    from lockstep.state.checkpoint.manager import CheckpointManager

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = None
    if size > 1:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.PrefixStore("disk", dist.TCPStore(address, port, is_master=False))
    settings = {"keep": 3, **settings}
    return CheckpointManager(
        Catalog(Path(directory), IDENTITY), rank=rank, size=size, store=store, **settings
    )


def read(directory: str) -> tuple[int, str, bool]:
    """Return the newest checkpoint's step and text, and whether its tensors are right."""
    mine = checkpoints(directory)
    found = mine.catalog.newest()
    tensors = dcp.stored(found.path, found.manifest)
    mine.close()
    right = state(found.manifest.step)
    same = all(torch.equal(tensors[name].read(), right[name]) for name in right)
    return found.manifest.step, found.manifest.text, same


def write(directory: str, steps: int) -> list[tuple[int, str, bool]]:
    mine = checkpoints(directory)
    for step in range(1, steps + 1):
        mine.save(step, state(step), f"text {step}", best=None)
    mine.wait()
    seen = read(directory) if os.environ["WORLD_SIZE"] == "1" else newest(mine)
    mine.close()
    return [seen]


def newest(mine: Any) -> tuple[int, str, bool]:
    found = mine.catalog.newest()
    return found.manifest.step, found.manifest.text, True


def test_written_by_three_and_read_by_one(tmp_path: Path) -> None:
    seen = run_ranks(write, 3, str(tmp_path / "a"), 5)
    assert seen == [[(5, "text 5", True)]] * 3
    parts = sorted(path.name for path in (tmp_path / "a/step-00000005").glob("*.distcp"))
    assert parts == ["__0_0.distcp", "__1_0.distcp", "__2_0.distcp"]
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [
        "step-00000003",
        "step-00000004",
        "step-00000005",
    ]
    assert run_ranks(read, 1, str(tmp_path / "a")) == [(5, "text 5", True)]


def fail(directory: str, how: str) -> str:
    """Rank 1 fails in the middle of its part of the second checkpoint."""
    from lockstep.state.checkpoint import dcp

    mine = checkpoints(directory, patience=2.0)
    mine.save(1, state(1), "text 1", best=None)
    mine.wait()
    write_part = dcp.write_part

    def fails(place: Path, part: int, *rest: Any) -> Any:
        if part != 1:
            return write_part(place, part, *rest)
        (place / "__1_0.distcp").write_text("begun")
        if how == "dies":
            os._exit(9)
        raise OSError(28, "No space left on device")

    dcp.write_part = fails
    mine.save(2, state(2), "", best=None)
    begin = time.monotonic()
    try:
        mine.wait()
    except LockstepError as error:
        numbers = errnos(error)
        seconds = time.monotonic() - begin < 10
        return f"{type(error).__name__} {numbers} after {seconds}: {error.message}"
    finally:
        mine.close()
    return "written"


def test_disk_full_on_one_of_three(tmp_path: Path) -> None:
    seen = run_ranks(fail, 3, str(tmp_path), "raises")
    assert all("step-00000002 cannot be written: " in said for said in seen)
    assert all("rank 1: No space left on device" in seen[rank] for rank in (0, 2))
    # Whichever rank reports first, the launcher knows that the disk was full.
    assert all(said.startswith("CheckpointError [28]") for said in seen)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_one_of_three_dies_while_it_writes(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="rank 1: died with exit code 9"):
        run_ranks(fail, 3, str(tmp_path), "dies")
    assert run_ranks(read, 1, str(tmp_path))[0][0] == 1
    run_ranks(write, 2, str(tmp_path), 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]
