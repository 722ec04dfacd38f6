"""The step record: its files, their limit, and what is read again."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from lockstep.state.record import steps
from lockstep.state.record.steps import LOSS, PARAMETERS, Entry, Key, StepRecord, paths, read


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    first, again = StepRecord(tmp_path, 0, 0), StepRecord(tmp_path, 1, 1)
    samples = np.array([3, 1])
    first.add(1, LOSS, lambda: b"abcd", replica=2, samples=samples)
    first.flush()  # the number of the second backward pass follows from entries that are written
    first.add(1, LOSS, lambda: b"efgh", replica=2, samples=samples)
    first.add(1, PARAMETERS, lambda: b"12345678")
    again.add(1, PARAMETERS, lambda: b"87654321")  # after a restart
    for record in (again, first):
        record.flush()
    assert read(tmp_path) == {
        Key(1, LOSS, 2, 0): Entry(b"abcd", zlib.crc32(samples.tobytes())),
        Key(1, LOSS, 2, 1): Entry(b"efgh", zlib.crc32(samples.tobytes())),
        Key(1, PARAMETERS): Entry(b"87654321"),
    }
    path = paths(tmp_path / "steps")[0]
    path.write_bytes(path.read_bytes()[:-1])  # its writer was killed
    assert len(read(tmp_path)) == 3
    assert path.stat().st_mode & 0o077 == 0


def test_losses_of_all_types_and_shapes_keep_their_bits(tmp_path: Path) -> None:
    losses = [
        torch.tensor(number).reshape(shape).to(dtype)
        for number, shape in [
            (0.1, ()),
            (-0.0, (1,)),
            (3.1, (1, 1)),
            (6e-8, ()),
            (float("-inf"), ()),
            (float("nan"), ()),
        ]
        for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.float16)
    ]
    record = StepRecord(tmp_path, 0, 0)
    for step, loss in enumerate(losses, 1):
        record.add(step, LOSS, loss)
    expected = [loss.reshape(1).view(torch.uint8).numpy().tobytes() for loss in losses]
    for loss in losses:
        loss.fill_(7)  # the script may change a loss before it is written
    record.flush()
    assert [entry.value for entry in read(tmp_path).values()] == expected


def test_a_full_file_is_followed_by_another_and_the_oldest_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "_BYTES", 48)
    monkeypatch.setattr(steps, "_FILES", 2)
    record = StepRecord(tmp_path, 0, 0)
    for step in (1, 2):
        record.add(step, PARAMETERS, lambda: b"12345678")
        record.flush()
    assert len(paths(tmp_path / "steps")) == 1
    for step in (3, 4):
        record.add(step, PARAMETERS, lambda: b"12345678")
        record.flush()
    assert {key.step for key in read(tmp_path)} == {1, 2, 3, 4}
    record.add(5, PARAMETERS, lambda: b"12345678")
    record.flush()
    assert {key.step for key in read(tmp_path)} == {3, 4, 5}
