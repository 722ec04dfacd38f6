"""Write and read PyTorch's distributed checkpoints (DCP) with DCP's planners, but without its collectives.

Each rank computes beforehand which parts it writes, and reports in a file which parts it has written. So
background threads write a checkpoint while the main threads, which own the process group, train.

Importing DCP takes a second: this module imports it at its first use, usually in a background thread.
"""

from __future__ import annotations

import contextlib
import heapq
import io
import os
import pickle
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cache, partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lockstep.errors import CheckpointError
from lockstep.state.checkpoint.catalog import DamagedError, Manifest, TensorSpec
from lockstep.state.checkpoint.parts import Box, Sharding, StoredTensor

if TYPE_CHECKING:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlan, WriteItem
    from torch.distributed.checkpoint.storage import WriteResult

#: The file in which DCP records the position of each tensor.
METADATA = ".metadata"

#: For each writer, the part that it writes of each of its tensors.
Shares = Sequence[Mapping[str, Box]]

_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
_METADATA = "torch.distributed.checkpoint.metadata"
#: Locked while DCP is imported. A process forked in that second, such as a DataLoader's worker, would have
#: half-imported modules, and locks of a thread that does not exist in it.
_importing = threading.RLock()
os.register_at_fork(
    before=_importing.acquire,
    after_in_parent=_importing.release,
    after_in_child=_importing.release,
)

#: The classes and functions that `.metadata`, a pickle, may name, besides dtypes.
_ALLOWED = {
    *(
        (_METADATA, name)
        for name in (
            "Metadata",
            "MetadataIndex",
            "TensorStorageMetadata",
            "TensorProperties",
            "ChunkStorageMetadata",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    (_FILESYSTEM, "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
}


def spec_of(tensor: Tensor) -> TensorSpec:
    """Return the dtype and shape of a tensor."""
    return TensorSpec(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def dtype_of(spec: TensorSpec) -> torch.dtype:
    """Return the `torch.dtype` of a tensor that a checkpoint's manifest describes.

    Raises:
        DamagedError: if this torch has no such type.
    """
    dtype = getattr(torch, spec.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise DamagedError(f"it holds elements of type {spec.dtype!r}, unknown to this torch")
    return dtype


def bytes_of(spec: TensorSpec) -> int:
    """Return the number of bytes of all elements of a tensor.

    Raises:
        DamagedError: if this torch has no such type.
    """
    return prod(spec.shape) * dtype_of(spec).itemsize


def share_out(
    specs: Mapping[str, TensorSpec], writers: int, cuts: Mapping[str, Sharding] | None = None
) -> list[dict[str, Box]]:
    """Return, for each writer of a checkpoint, the boxes of the tensors that it writes, by tensor name.

    `specs` has all tensors of the checkpoint. `cuts` has those that are sharded over ranks: writer `k`,
    which is rank `k` in this case, writes its own part of each. All other tensors are assigned one by one,
    the largest first, to the writer with the fewest bytes so far. The result is the same on every rank.
    """
    cuts = cuts or {}
    loads = [(0, writer) for writer in range(writers)]
    owner: dict[str, int] = {}
    for name in sorted(specs.keys() - cuts.keys(), key=lambda n: (-bytes_of(specs[n]), n)):
        load, writer = heapq.heappop(loads)
        owner[name] = writer
        # Even an empty tensor is some work.
        heapq.heappush(loads, (load + bytes_of(specs[name]) + 1, writer))
    shares: list[dict[str, Box]] = [{} for _ in range(writers)]
    for name, spec in specs.items():
        if name not in cuts:
            shares[owner[name]][name] = Box.whole(spec.shape)
            continue
        for part in range(cuts[name].count):
            box = cuts[name].box(spec.shape, part)
            if box.numel:
                shares[part][name] = box
    return shares


def write_part(
    directory: Path,
    part: int,
    shares: Shares,
    specs: Mapping[str, TensorSpec],
    tensors: Mapping[str, Tensor],
) -> list[dict[str, Any]]:
    """Write the file of writer number `part`, if `shares` gives it any parts of tensors.

    Args:
        directory: directory of the checkpoint.
        part: number of the writer.
        shares: for each writer, the box (rectangular part) that it writes of each tensor.
        specs: types and shapes of all tensors.
        tensors: the elements of the boxes in `shares[part]`, on the CPU, by tensor name.

    Returns:
        DCP's write results, as JSON values, for `finish`.

    Raises:
        OSError: if the file cannot be written.
    """
    if not shares[part]:
        return []
    load_dcp()
    writer = _writer(directory)
    plans, _ = _plans(shares, specs)
    planner = _writing()[1](tensors)
    plan = planner.finish_plan(writer.prepare_global_plan(plans)[part])
    return [asdict(result) for result in writer.write_data(plan, planner).wait()]


def finish(
    directory: Path,
    shares: Shares,
    specs: Mapping[str, TensorSpec],
    results: Sequence[Sequence[Mapping[str, Any]]],
) -> None:
    """Write DCP's index file `.metadata`, after all writers have written their files.

    `shares` and `specs` are those given to `write_part`. `results` has the return values of `write_part`,
    one for each writer.

    Raises:
        OSError: if the file cannot be written.
    """
    load_dcp()
    _, metadata = _plans(shares, specs)
    _writer(directory).finish(
        metadata, [[_from_json(result) for result in part] for part in results]
    )


def stored(directory: Path, manifest: Manifest) -> dict[str, StoredTensor]:
    """Return the tensors of a checkpoint by name; each one is read from disk when it is used.

    Any number of ranks may read it: a tensor is put together from the files of all ranks that wrote parts
    of it. The caller has verified the files of the checkpoint in `directory`.

    Raises:
        DamagedError: if files and manifest name different tensors, here or when a tensor is read.
        CheckpointError: if the checkpoint cannot be read, here or when a tensor is read.
    """
    load_dcp()
    with _readable(directory):
        wanted = sum(map(bytes_of, manifest.tensors.values()))
        if wanted > sum(file.bytes for file in manifest.files.values()):
            raise DamagedError("its files are too small for the tensors that it names")
        if not manifest.tensors:
            return {}
        contents = _Contents(directory, manifest)
        return {
            name: StoredTensor(torch.Size(spec.shape), dtype_of(spec), partial(contents.read, name))
            for name, spec in manifest.tensors.items()
        }


@contextlib.contextmanager
def _readable(directory: Path) -> Iterator[None]:
    """Turn each error in the `with` block into a `CheckpointError` that names `directory`.

    A `MemoryError` is raised unchanged.
    """
    try:
        yield
    except MemoryError:
        raise
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint {directory} cannot be read: {error.strerror or error}"
        ) from error
    except Exception as error:  # damaged contents may raise any error
        why = f"its parts contradict each other: {error}"
        why = error.message if isinstance(error, DamagedError) else why
        raise DamagedError(f"the checkpoint {directory} cannot be read: {why}") from error


class _Contents:
    """Reads parts of the tensors of a checkpoint from its files."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self._directory = directory
        self._specs = manifest.tensors
        self._reader = _reading()[0](directory, frozenset(manifest.files))
        metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        self._there = {name: metadata.state_dict_metadata[name] for name in manifest.tensors}

    def read(self, name: str, box: Box) -> Tensor:
        """Return the elements in `box` of the tensor `name`, as a new tensor on the CPU.

        Raises:
            DamagedError: if the files do not contain exactly these elements.
            CheckpointError: if the files cannot be read.
        """
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
        from torch.distributed.checkpoint.planner import LoadPlan
        from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

        target = torch.empty(box.sizes, dtype=dtype_of(self._specs[name]))
        if not box.numel:
            return target
        with _readable(self._directory):
            there = self._there[name]
            if tuple(there.size) != self._specs[name].shape:
                raise DamagedError(
                    f"its parts contradict each other: {name} has shape {tuple(there.size)}"
                )
            wanted = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
            items = create_read_items_for_chunk_list(name, there, [wanted])
            if sum(prod(item.lengths) for item in items) != box.numel:
                raise DamagedError(f"parts of {name} are missing")
            self._reader.read_data(LoadPlan(items), _reading()[1](target)).wait()
        return target


def load_dcp() -> None:
    """Import PyTorch's distributed checkpoint package, which takes about a second."""
    with _importing:
        _writing()
        _reading()


def _plans(shares: Shares, specs: Mapping[str, TensorSpec]) -> tuple[list[SavePlan], Metadata]:
    """Return DCP's `SavePlan` for each writer, and the `Metadata` of the whole checkpoint.

    `shares` has the boxes of tensors that each writer writes, `specs` the dtypes and shapes of the tensors.
    The results are the same on every rank.
    """
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.planner import SavePlan

    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    return planner.create_global_plan(
        [
            SavePlan([_write_item(name, specs[name], box) for name, box in share.items()])
            for share in shares
        ]
    )


def _write_item(name: str, spec: TensorSpec, box: Box) -> WriteItem:
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        MetadataIndex,
        TensorProperties,
    )
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    # Only dtypes and shapes: a plan must not depend on the devices of tensors.
    shape = torch.empty(spec.shape, dtype=dtype_of(spec), device="meta")
    offsets = torch.Size(box.offsets)
    return WriteItem(
        index=MetadataIndex(name, offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets, torch.Size(box.sizes)),
            properties=TensorProperties.create_from_tensor(shape),
            size=shape.size(),
        ),
    )


def _writer(directory: Path) -> FileSystemWriter:
    make, _ = _writing()
    made: FileSystemWriter = make(
        directory, single_file_per_rank=True, sync_files=True, thread_count=1
    )
    made.set_up_storage_writer(is_coordinator=True)
    return made


@cache
def _writing() -> tuple[Any, Any]:
    """Import DCP, and return subclasses of its `FileSystemWriter` and `DefaultSavePlanner`."""
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta

    class Writer(FileSystemWriter):
        """DCP file writer that writes equal files for equal states: it stores no path and no random ID."""

        def storage_meta(self) -> StorageMeta | None:
            return StorageMeta()

    class Planner(DefaultSavePlanner):
        """DCP save planner that takes the values to write from a mapping, by tensor name."""

        def __init__(self, parts: Mapping[str, Tensor]) -> None:
            super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
            self._parts = parts

        def lookup_object(self, index: MetadataIndex) -> Tensor:
            return self._parts[index.fqn]

    return Writer, Planner


@cache
def _reading() -> tuple[Any, Any]:
    """Import DCP, and return subclasses of its `FileSystemReader` and `DefaultLoadPlanner`."""
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

    class Reader(FileSystemReader):
        """DCP file reader that raises `DamagedError` if `.metadata` names a file that is not in `files`.

        An untrusted checkpoint could otherwise name files outside of its directory.
        """

        def __init__(self, path: Path, files: frozenset[str]) -> None:
            super().__init__(path)
            self._files = files

        def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
            data = (Path(self.path) / METADATA).read_bytes()
            metadata = _Unpickler(io.BytesIO(data)).load()
            if not isinstance(metadata, Metadata):
                raise DamagedError(f"{METADATA} describes no checkpoint")
            for info in metadata.storage_data.values():
                if info.relative_path not in self._files:
                    raise DamagedError(
                        f"{METADATA} names {info.relative_path!r}, no file of its own"
                    )
            return metadata

    class Planner(DefaultLoadPlanner):
        """DCP load planner that reads one part of one tensor into the tensor `target`."""

        def __init__(self, target: Tensor) -> None:
            super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
            self._target = target

        def lookup_tensor(self, index: MetadataIndex) -> Tensor:
            return self._target

    return Reader, Planner


class _Unpickler(pickle.Unpickler):
    """Unpickles DCP's file `.metadata`; only the classes and functions that it needs are allowed.

    Any other class or function raises `DamagedError`, since a checkpoint may be untrusted.
    """

    def find_class(self, module: str, name: str, /) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in _ALLOWED:
            return super().find_class(module, name)
        raise DamagedError(f"{METADATA} names {module}.{name}, which no checkpoint needs")


def _from_json(result: Mapping[str, Any]) -> WriteResult:
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.storage import WriteResult

    index, info = MetadataIndex(**result["index"]), _StorageInfo(**result["storage_data"])
    return WriteResult(index, result["size_in_bytes"], info)
