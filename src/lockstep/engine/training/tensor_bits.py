"""Hashes of the bits of tensors, computed on each tensor's device and read from there all at once."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence

import torch

from lockstep.state.checkpoint.parts import local

#: Words of eight bytes in a row: sums over rows and over columns need no memory of the tensor's size.
_ROW = 1024
#: Size in bytes up to which a tensor on the CPU is hashed by `hashlib`, which takes fewer calls.
_SMALL = 1 << 14

#: A hash of two numbers, or a tensor of shape `(2,)` and type int64 with them, which `read` converts.
Bits = tuple[int, int] | torch.Tensor


def bits(tensor: torch.Tensor) -> Bits:
    """Return a hash of a tensor's bits; of a tensor that is sharded over ranks, of this rank's shard.

    Words of eight bytes are read as integers and arranged in a matrix. The hash is a weighted sum of row
    sums, and one of column sums, modulo 2^64: a single bit that changes always changes both. CPU tensors of
    at most 16 KiB are hashed with BLAKE2b.
    """
    data = _bytes(local(tensor).detach())
    if data.device.type == "cpu" and len(data) <= _SMALL:
        digest = hashlib.blake2b(data.numpy().data, digest_size=16).digest()
        return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")
    rows = len(data) // (8 * _ROW)
    matrix = data[: rows * 8 * _ROW].view(torch.int64).view(rows, _ROW)
    rest = data[rows * 8 * _ROW :].to(torch.int64)
    # Weights that no row has, or a row could change places with the rest.
    length = max(_ROW, 1 << (rows - 1).bit_length())  # a power of two: few sizes are cached
    weights = _weights(length + 8 * _ROW, data.device)
    tail = (rest * weights[-8 * _ROW :][: len(rest)]).sum()
    by_row = (matrix.sum(1) * weights[:rows]).sum() + tail
    by_column = (matrix.sum(0) * weights[:_ROW]).sum() + tail
    return torch.stack([by_row, by_column])


def _bytes(own: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor's elements, in the elements' order, as a tensor of one dimension."""
    if own.layout is not torch.strided:
        own = own.to_dense()
    own = own.resolve_conj().resolve_neg().contiguous().reshape(-1)
    if own.storage_offset() * own.element_size() % 8:
        own = own.clone()  # so that eight bytes can be read at once
    return own.view(torch.uint8)


def read(hashes: Sequence[Bits]) -> list[tuple[int, int]]:
    """Return the hashes that `bits` computed, each as two integers; wait only once for each device."""
    pending = {place: one for place, one in enumerate(hashes) if isinstance(one, torch.Tensor)}
    numbers: dict[int, list[int]] = {}
    for device in {one.device for one in pending.values()}:
        own = {place: one for place, one in pending.items() if one.device == device}
        numbers |= zip(own, torch.stack(list(own.values())).tolist(), strict=True)
    pairs = [numbers.get(place, one) for place, one in enumerate(hashes)]
    return [(int(first), int(second)) for first, second in pairs]


@functools.lru_cache(maxsize=16)
def _weights(count: int, device: torch.device) -> torch.Tensor:
    """Return `count` random odd integers, the same in every call: the weights in `bits`."""
    generator = torch.Generator().manual_seed(0x10C45)
    drawn = torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator, dtype=torch.int64)
    return (drawn | 1).to(device)
