"""Plain weights: what other programs write is read, and what is written they can read (A15)."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.errors import CheckpointError, ModelError, UsageError
from lockstep.state.checkpoint import weights_only

SUFFIXES = [".pt", ".pth", ".bin", ".safetensors"]


def weights() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return dict(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).state_dict())


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_what_is_written_is_read(tmp_path: Path, suffix: str) -> None:
    state = {**weights(), "t": torch.randn(3, 4).t(), "half": torch.randn(3).bfloat16()}
    state["shared"] = state["t"]
    path = tmp_path / f"model{suffix}"
    weights_only.write_weights(path, state)
    assert same(weights_only.read_weights(path), state)
    assert list(tmp_path.iterdir()) == [path]


def test_pytorch_and_safetensors_read_it(tmp_path: Path) -> None:
    import safetensors.torch

    weights_only.write_weights(tmp_path / "model.pt", weights())
    weights_only.write_weights(tmp_path / "model.safetensors", weights())
    assert same(torch.load(tmp_path / "model.pt", weights_only=True), weights())
    assert same(safetensors.torch.load_file(tmp_path / "model.safetensors"), weights())


@pytest.mark.parametrize("key", ["state_dict", "model_state_dict", "model"])
def test_weights_inside_a_larger_file(tmp_path: Path, key: str) -> None:
    torch.save({key: weights(), "epoch": 3, "optimizer": {"lr": 0.1}}, tmp_path / "a.pt")
    assert same(weights_only.read_weights(tmp_path / "a.pt"), weights())


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_module_before_every_name_is_taken_off(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    weights_only.write_weights(
        path, {f"module.{name}": tensor for name, tensor in weights().items()}
    )
    assert same(weights_only.read_weights(path), weights())
    some = {"module.a": torch.zeros(1), "b": torch.zeros(1)}
    weights_only.write_weights(path, some)
    assert same(weights_only.read_weights(path), some)


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("evil",)


def test_a_file_that_is_a_program_is_not_run(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for content in (Evil(), {"model": Evil()}, nn.Linear(1, 1)):
        torch.save(content, "a.pt")
        with pytest.raises(CheckpointError, match="is not weights-only") as caught:
            weights_only.read_weights(Path("a.pt"))
        assert "state_dict" in (caught.value.hint or "")
    assert not Path("evil").exists()


@pytest.mark.parametrize("content", [3, [torch.zeros(1)], {"a": 1}, {"a": torch.zeros(1), "b": 2}])
def test_files_without_weights(tmp_path: Path, content: Any) -> None:
    torch.save(content, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="holds no weights; expected tensors by name"):
        weights_only.read_weights(tmp_path / "a.pt")


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("keep", [0, 10, 400])
def test_a_truncated_file(tmp_path: Path, suffix: str, keep: int) -> None:
    path = tmp_path / f"a{suffix}"
    weights_only.write_weights(path, weights())
    os.truncate(path, keep)
    with pytest.raises(CheckpointError, match=r"a\.(pt|safetensors)"):
        weights_only.read_weights(path)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="are not there; expected a file"):
        weights_only.read_weights(tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="expected a file"):
        weights_only.read_weights(tmp_path.with_suffix(".pt"))
    with pytest.raises(CheckpointError, match="cannot be written: No such file or directory"):
        weights_only.write_weights(tmp_path / "no/a.pt", weights())


@pytest.mark.parametrize("name", ["a", "a.txt", "a.pt.gz"])
def test_suffixes_that_say_nothing(tmp_path: Path, name: str) -> None:
    for act in (weights_only.read_weights, lambda path: weights_only.write_weights(path, {})):
        with pytest.raises(UsageError, match=r"has the suffix .*; expected \.pt, \.pth"):
            act(tmp_path / name)


def test_without_safetensors(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(UsageError, match="safetensors cannot be imported") as caught:
        weights_only.write_weights(tmp_path / "a.safetensors", weights())
    assert "torch-lockstep[safetensors]" in (caught.value.hint or "")


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "a.pt"
    weights_only.write_weights(path, weights())

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match="cannot be written: No space left on device"):
        weights_only.write_weights(path, {})
    assert same(weights_only.read_weights(path), weights())
    assert list(tmp_path.iterdir()) == [path]


def test_weights_of_another_precision_fit() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    doubled = {name: tensor.double() for name, tensor in weights().items()}
    weights_only.check_fit("Sequential", module.state_dict(), doubled)


def test_weights_of_another_model_don_t_fit() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    other = {
        **weights(),
        "0.weight": torch.zeros(4, 5),
        **{f"x{i}": torch.zeros(1) for i in range(7)},
    }
    del other["0.bias"]
    with pytest.raises(ModelError) as caught:
        weights_only.check_fit("Sequential", module.state_dict(), other)
    assert caught.value.message == (
        "the weights don't fit Sequential: missing: 0.bias; unexpected: x0, x1, x2, x3, x4 and 2 more; "
        "of a different shape: 0.weight ((4, 5), expected (4, 3))"
    )
