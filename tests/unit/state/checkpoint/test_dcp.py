"""Files of DCP: read by PyTorch's own tools, and by Lockstep whatever is in them."""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.errors import CheckpointError
from lockstep.state.checkpoint import dcp
from lockstep.state.checkpoint.catalog import DamagedError, FileSpec, Manifest, TensorSpec
from lockstep.state.checkpoint.dcp import share_out
from lockstep.state.checkpoint.manager import Buffers
from lockstep.state.checkpoint.parts import Sharding

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.bool]


def example() -> dict[str, Tensor]:
    """Tensors of many types and shapes."""
    generator = torch.Generator().manual_seed(1)
    state = {
        f"models.0.{dtype}": torch.randn(3, 4, generator=generator).to(dtype) for dtype in DTYPES
    }
    state["steps"] = torch.tensor(7)
    state["empty"] = torch.empty(0, 3)
    state["complex"] = torch.randn(2, dtype=torch.complex64, generator=generator)
    state["big"] = torch.randn(1000, generator=generator)
    return state


def write(
    directory: Path,
    state: dict[str, Tensor],
    writers: int = 1,
    cuts: dict[str, Sharding] | None = None,
) -> Manifest:
    """Write a checkpoint as several ranks would."""
    directory.mkdir(exist_ok=True)
    specs = {name: dcp.spec_of(tensor) for name, tensor in state.items()}
    shares = share_out(specs, writers, cuts)
    results = [
        dcp.write_part(
            directory, part, shares, specs, {n: box.of(state[n]) for n, box in share.items()}
        )
        for part, share in enumerate(shares)
    ]
    dcp.finish(directory, shares, specs, results)
    files = {path.name: FileSpec.of(path) for path in directory.iterdir()}
    return Manifest(identity={}, step=1, best=None, text="", tensors=specs, files=files)


def read(directory: Path, told: Manifest) -> dict[str, Tensor]:
    """Read all of a checkpoint."""
    return {name: one.read() for name, one in dcp.stored(directory, told).items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


@pytest.mark.parametrize("writers", [1, 3, 40])
def test_what_any_number_of_ranks_wrote_comes_back(tmp_path: Path, writers: int) -> None:
    told = write(tmp_path, example(), writers)
    assert same(read(tmp_path, told), example())
    parts = [name for name in told.files if name.endswith(".distcp")]
    assert len(parts) == min(writers, len(example()))


def test_the_same_state_gives_the_same_bytes(tmp_path: Path) -> None:
    first, second = (write(tmp_path / name, example(), 2) for name in "ab")
    assert first.files == second.files


def test_no_tensor_at_all(tmp_path: Path) -> None:
    told = write(tmp_path, {}, 2)
    assert read(tmp_path, told) == {}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_plain_pytorch_reads_it(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as plain
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    write(tmp_path / "a", example(), 2)
    state: dict[str, Any] = {name: torch.zeros_like(t) for name, t in example().items()}
    plain.load(state, checkpoint_id=tmp_path / "a", no_dist=True)
    assert same(state, example())
    dcp_to_torch_save(tmp_path / "a", tmp_path / "a.pt")
    assert same(torch.load(tmp_path / "a.pt", weights_only=True), example())


def test_tensors_are_read_whatever_their_strides(tmp_path: Path) -> None:
    state = {"t": torch.arange(12.0).reshape(3, 4).t(), "part": torch.arange(100)[10:20:3]}
    buffers = Buffers()
    buffers.prepare({name: dcp.spec_of(tensor) for name, tensor in state.items()})
    told = write(tmp_path, buffers.copy(state.items()))
    assert same(read(tmp_path, told), state)


def cut(state: dict[str, Tensor], count: int) -> dict[str, Sharding]:
    """Every tensor that can be cut is, along its last dimension."""
    return {n: Sharding(t.dim() - 1, count) for n, t in state.items() if t.dim() and t.numel()}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("writers", [1, 2, 3, 5])
def test_parts_of_tensors_are_written_by_their_ranks(tmp_path: Path, writers: int) -> None:
    import torch.distributed.checkpoint as plain

    told = write(tmp_path, example(), writers, cut(example(), writers))
    assert same(read(tmp_path, told), example())
    state: dict[str, Any] = {name: torch.zeros_like(t) for name, t in example().items()}
    plain.load(state, checkpoint_id=tmp_path, no_dist=True)
    assert same(state, example())
    sizes = [spec.bytes for name, spec in told.files.items() if name.endswith(".distcp")]
    assert len(sizes) == writers


@pytest.mark.parametrize("readers", [1, 2, 4, 7])
def test_any_part_is_read_whoever_wrote_which(tmp_path: Path, readers: int) -> None:
    state = example()
    told = write(tmp_path, state, 3, cut(state, 3))
    for name, stored in dcp.stored(tmp_path, told).items():
        for dimension in range(state[name].dim()):
            for part in range(readers):
                box = Sharding(dimension, readers).box(tuple(stored.shape), part)
                assert torch.equal(stored.fetch(box), box.of(state[name]))


def test_a_part_that_is_missing(tmp_path: Path) -> None:
    state = {"w": torch.arange(10.0), "x": torch.arange(10.0)}
    told = write(tmp_path, state, 2, cut(state, 2))
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())  # noqa: S301 - ours
    del metadata.state_dict_metadata["w"].chunks[1]
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(DamagedError, match="parts of w are missing"):
        read(tmp_path, told)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 12])
@pytest.mark.parametrize("shape", [(7, 3), (3, 7), (1, 1), (12, 2)])
def test_tensors_are_cut_as_torch_does_it(shape: tuple[int, int], count: int) -> None:
    tensor = torch.arange(shape[0] * shape[1]).view(shape)
    for dimension in (0, 1):
        boxes = [Sharding(dimension, count).box(shape, part) for part in range(count)]
        parts = [box.of(tensor) for box in boxes]
        expected = list(tensor.chunk(count, dimension))
        assert all(part.numel() == 0 for part in parts[len(expected) :])
        assert all(map(torch.equal, parts, expected))


class Evil:
    """Runs a program where it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("evil",)


@pytest.mark.parametrize("content", [Evil(), OrderedDict(a=Evil()), print])
def test_a_pickle_that_is_a_program_is_not_run(tmp_path: Path, monkeypatch, content: Any) -> None:
    monkeypatch.chdir(tmp_path)
    told = write(tmp_path / "a", example())
    (tmp_path / "a/.metadata").write_bytes(pickle.dumps(content))
    with pytest.raises(DamagedError, match=r"\.metadata names .*which no checkpoint needs"):
        read(tmp_path / "a", told)
    assert not (tmp_path / "evil").exists()


def test_tensors_that_are_programs_are_not_run(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    told = write(tmp_path / "a", {"w": torch.zeros(1000)})
    torch.save(Evil(), tmp_path / "a/__0_0.distcp")
    with pytest.raises(DamagedError, match="contradict each other"):
        read(tmp_path / "a", told)
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize("data", [b"", b"nonsense", pickle.dumps(3), pickle.dumps({"a": 1})])
def test_metadata_that_describes_nothing(tmp_path: Path, data: bytes) -> None:
    told = write(tmp_path, example())
    (tmp_path / ".metadata").write_bytes(data)
    with pytest.raises(DamagedError):
        read(tmp_path, told)


def test_files_that_the_manifest_does_not_name_are_not_read(tmp_path: Path) -> None:
    told = write(tmp_path, example())
    files = {name: told.files[name] for name in (".metadata",)}
    with pytest.raises(DamagedError, match=r"names '__0_0\.distcp', no file of its own"):
        read(tmp_path, replace(told, files={**files, "other": FileSpec(1 << 20, "")}))


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (TensorSpec("float32", (3, 5)), "contradict each other"),
        (TensorSpec("nonsense", (3, 4)), "elements of type 'nonsense'"),
        (TensorSpec("load", (3, 4)), "elements of type 'load'"),
        (TensorSpec("float32", (1 << 40,)), "too small for the tensors"),
    ],
)
def test_a_manifest_of_other_tensors(tmp_path: Path, spec: TensorSpec, said: str) -> None:
    told = write(tmp_path, example())
    tensors = {**told.tensors, "models.0.torch.float32": spec}
    with pytest.raises(DamagedError, match=said):
        read(tmp_path, replace(told, tensors=tensors))
    with pytest.raises(DamagedError, match="contradict"):
        read(tmp_path, replace(told, tensors={"nowhere": TensorSpec("float32", (1,))}))


def test_a_file_that_cannot_be_opened(tmp_path: Path) -> None:
    told = write(tmp_path, example())
    (tmp_path / ".metadata").unlink()
    (tmp_path / ".metadata").mkdir()
    with pytest.raises(CheckpointError, match="Is a directory"):
        read(tmp_path, told)


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_process_is_not_forked_while_modules_are_half_imported() -> None:
    begun, seconds = threading.Event(), 0.2

    def load() -> None:
        with dcp._importing:
            begun.set()
            time.sleep(seconds)

    thread = threading.Thread(target=load)
    before = time.monotonic()
    thread.start()
    begun.wait()
    child = os.fork()
    if child == 0:
        dcp.load_dcp()  # it has the lock of no other thread
        os._exit(0)
    assert time.monotonic() - before >= seconds
    assert os.waitpid(child, 0) == (child, 0)
    thread.join()


def test_shares_are_even_and_whole() -> None:
    specs = {f"t{i}": TensorSpec("float32", (1 + i * 37 % 101, 5)) for i in range(60)}
    for writers in (1, 2, 3, 7, 60, 100):
        shares = share_out(specs, writers)
        assert sorted(name for names in shares for name in names) == sorted(specs)
        loads = [sum(dcp.bytes_of(specs[name]) for name in names) for names in shares]
        assert max(loads) - min(loads) <= max(dcp.bytes_of(spec) for spec in specs.values())
        assert share_out(dict(reversed(specs.items())), writers) == shares
    assert share_out({}, 2) == [{}, {}]


def test_buffers_are_used_again() -> None:
    buffers, state = Buffers(), example()
    specs = {name: dcp.spec_of(tensor) for name, tensor in state.items()}
    buffers.prepare(specs)
    first = buffers.copy(state.items())
    assert same(first, state)
    places = {name: tensor.data_ptr() for name, tensor in first.items()}
    state["big"] += 1
    buffers.prepare(specs)
    second = buffers.copy(state.items())
    assert same(second, state)
    assert {name: tensor.data_ptr() for name, tensor in second.items()} == places
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in second.values())
    state["big"] = state["big"].reshape(10, 100)
    del state["empty"]
    buffers.prepare({name: dcp.spec_of(tensor) for name, tensor in state.items()})
    assert same(buffers.copy(state.items()), state)
