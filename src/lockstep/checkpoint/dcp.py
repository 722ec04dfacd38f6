"""PyTorch's distributed checkpoints (DCP): its planners, writer and reader, without its collectives.

Who writes what is known beforehand, and who has written what is told in files, so that a checkpoint can
be written by threads of their own while the main threads train, which own the process group.

To import DCP takes a second: this module does so where it is first used, in such a thread.
"""

from __future__ import annotations

import io
import os
import pickle
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lockstep.checkpoint.manifest import DamagedError, Manifest, TensorSpec
from lockstep.errors import CheckpointError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlan
    from torch.distributed.checkpoint.storage import WriteResult

#: The file in which DCP says where each tensor is.
METADATA = ".metadata"

#: Names of each writer's tensors.
Shares = Sequence[Sequence[str]]

_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
_METADATA = "torch.distributed.checkpoint.metadata"
#: Held while DCP is imported. A process that is forked in that second, a DataLoader's worker for one,
#: would find modules that are half imported, and the locks of a thread that it doesn't have.
_importing = threading.RLock()
os.register_at_fork(
    before=_importing.acquire,
    after_in_parent=_importing.release,
    after_in_child=_importing.release,
)

#: All that `.metadata`, a pickle, may name; besides these, types of elements.
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
    """Return type and shape of a tensor."""
    return TensorSpec(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def dtype_of(spec: TensorSpec) -> torch.dtype:
    """Return the type that a manifest names.

    Raises:
        DamagedError: if this torch has no such type.
    """
    dtype = getattr(torch, spec.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise DamagedError(f"it holds elements of type {spec.dtype!r}, unknown to this torch")
    return dtype


def bytes_of(spec: TensorSpec) -> int:
    """Return the size of a tensor's elements.

    Raises:
        DamagedError: if this torch has no such type.
    """
    return prod(spec.shape) * dtype_of(spec).itemsize


def write_part(
    directory: Path,
    part: int,
    shares: Shares,
    specs: Mapping[str, TensorSpec],
    tensors: Mapping[str, Tensor],
) -> list[dict[str, Any]]:
    """Write one writer's file; return what `finish` needs to know of it, as JSON.

    Args:
        directory: where to write.
        part: which writer this is.
        shares: the names of each writer's tensors.
        specs: types and shapes of all tensors.
        tensors: this writer's tensors, on the CPU.

    Raises:
        OSError: if it cannot be written.
    """
    if not shares[part]:
        return []
    load_dcp()
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    writer = _writer(directory)
    plans, _ = _plans(shares, specs)
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), is_coordinator=part == 0)
    plan = planner.finish_plan(writer.prepare_global_plan(plans)[part])
    return [_to_json(result) for result in writer.write_data(plan, planner).wait()]


def finish(
    directory: Path,
    shares: Shares,
    specs: Mapping[str, TensorSpec],
    results: Sequence[Sequence[Mapping[str, Any]]],
) -> None:
    """Write `.metadata`, once all parts are there.

    Args:
        directory: where they are.
        shares: the names of each writer's tensors.
        specs: types and shapes of all tensors.
        results: what `write_part` returned to each writer.

    Raises:
        OSError: if it cannot be written.
    """
    load_dcp()
    _, metadata = _plans(shares, specs)
    _writer(directory).finish(metadata, [[_from_json(one) for one in part] for part in results])


def read(directory: Path, manifest: Manifest) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint whose files have been verified.

    Raises:
        DamagedError: if its parts contradict each other.
        CheckpointError: if it cannot be read.
    """
    load_dcp()
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

    if sum(map(bytes_of, manifest.tensors.values())) > sum(
        f.bytes for f in manifest.files.values()
    ):
        raise DamagedError("its files are too small for the tensors that it names")
    state: dict[str, Any] = {
        name: torch.empty(spec.shape, dtype=dtype_of(spec))
        for name, spec in manifest.tensors.items()
    }
    if not state:
        return {}
    reader = _reader(directory, frozenset(manifest.files))
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        metadata = reader.read_metadata()
        planner.set_up_planner(state, metadata, is_coordinator=True)
        reader.set_up_storage_reader(metadata, is_coordinator=True)
        plans = planner.create_global_plan([reader.prepare_local_plan(planner.create_local_plan())])
        plan = planner.finish_plan(reader.prepare_global_plan(plans)[0])
        reader.read_data(plan, planner).wait()
    except (CheckpointError, MemoryError):
        raise
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be read: {error.strerror or error}") from error
    except Exception as error:  # what is wrong with the contents can show itself in any way
        raise DamagedError(f"its parts contradict each other: {error}") from error
    return state


def load_dcp() -> None:
    """Import what the other functions use."""
    with _importing:
        _classes()


def _plans(shares: Shares, specs: Mapping[str, TensorSpec]) -> tuple[list[SavePlan], Metadata]:
    """Return each writer's plan, and the metadata of the whole; the same on every rank."""
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    local = []
    for part, names in enumerate(shares):
        # A plan needs types and shapes alone, and has to be the same whatever device they are on.
        shapes: dict[str, Any] = {
            name: torch.empty(specs[name].shape, dtype=dtype_of(specs[name]), device="meta")
            for name in names
        }
        planner.set_up_planner(shapes, is_coordinator=part == 0)
        local.append(planner.create_local_plan())
    return planner.create_global_plan(local)


def _writer(directory: Path) -> FileSystemWriter:
    writer, _, _ = _classes()
    made: FileSystemWriter = writer(
        directory, single_file_per_rank=True, sync_files=True, thread_count=1
    )
    made.set_up_storage_writer(is_coordinator=True)
    return made


def _reader(directory: Path, files: frozenset[str]) -> FileSystemReader:
    _, reader, _ = _classes()
    made: FileSystemReader = reader(directory, files)
    return made


@cache
def _classes() -> tuple[Any, Any, Any]:
    """Return the writer, the reader and the unpickler: made late, since their bases are imported late."""
    import torch.distributed.checkpoint.default_planner  # besides: all is imported here
    from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
    from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

    class Writer(FileSystemWriter):
        """Writes the same bytes for the same state: neither a path nor a random number is in them."""

        def storage_meta(self) -> StorageMeta | None:
            return StorageMeta()

    class Unpickler(pickle.Unpickler):
        """Makes what describes a checkpoint, and nothing else, whoever wrote the file."""

        def find_class(self, module: str, name: str, /) -> Any:
            is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
            if is_dtype or (module, name) in _ALLOWED:
                return super().find_class(module, name)
            raise DamagedError(f"{METADATA} names {module}.{name}, which no checkpoint needs")

    class Reader(FileSystemReader):
        """Reads a checkpoint that may come from anywhere, from its own files alone."""

        def __init__(self, path: Path, files: frozenset[str]) -> None:
            super().__init__(path)
            self._files = files

        def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
            data = (Path(self.path) / METADATA).read_bytes()
            metadata = Unpickler(io.BytesIO(data)).load()
            if not isinstance(metadata, Metadata):
                raise DamagedError(f"{METADATA} describes no checkpoint")
            for info in metadata.storage_data.values():
                if info.relative_path not in self._files:
                    raise DamagedError(
                        f"{METADATA} names {info.relative_path!r}, no file of its own"
                    )
            return metadata

    return Writer, Reader, Unpickler


def _to_json(result: WriteResult) -> dict[str, Any]:
    info = result.storage_data
    return {
        "name": result.index.fqn,
        "offset": None if result.index.offset is None else list(result.index.offset),
        "index": result.index.index,
        "bytes": result.size_in_bytes,
        "file": info.relative_path,
        "start": info.offset,
        "length": info.length,
    }


def _from_json(told: Mapping[str, Any]) -> WriteResult:
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.storage import WriteResult

    return WriteResult(
        index=MetadataIndex(told["name"], told["offset"], told["index"]),
        size_in_bytes=told["bytes"],
        storage_data=_StorageInfo(told["file"], told["start"], told["length"]),
    )
