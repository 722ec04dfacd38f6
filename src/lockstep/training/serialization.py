"""What ranks send each other besides gradients: bytes that need no unpickling."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence

import torch
import torch.distributed as dist

_LENGTH = struct.Struct("<I")


def gather_bytes(data: bytes, group: dist.ProcessGroup) -> list[bytes]:
    """Return what every rank has given, in rank order."""
    size = dist.get_world_size(group)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([len(data)]), group=group)
    longest = max(int(length) for length in lengths)
    own = torch.zeros(longest, dtype=torch.uint8)
    own[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    parts = [torch.zeros_like(own) for _ in range(size)]
    dist.all_gather(parts, own, group=group)
    return [
        part[: int(length)].numpy().tobytes() for part, length in zip(parts, lengths, strict=True)
    ]


def pack(tensors: Sequence[torch.Tensor]) -> bytes:
    """Return `tensors` as bytes: a JSON header with types and shapes, and the elements."""
    kinds = [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in tensors]
    header = json.dumps(kinds).encode()
    return b"".join([_LENGTH.pack(len(header)), header, *map(_elements, tensors)])


def unpack(data: bytes) -> list[torch.Tensor]:
    """Return the tensors that `pack` has made bytes of."""
    (length,) = _LENGTH.unpack_from(data)
    offset = _LENGTH.size + length
    tensors = []
    for name, shape in json.loads(data[_LENGTH.size : offset]):
        dtype = getattr(torch, name)
        size = torch.Size(shape).numel() * dtype.itemsize
        tensor = torch.empty(shape, dtype=dtype)
        if size:
            part = torch.frombuffer(bytearray(data[offset : offset + size]), dtype=torch.uint8)
            tensor.view(-1).copy_(part.view(dtype))
        tensors.append(tensor)
        offset += size
    return tensors


def _elements(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
