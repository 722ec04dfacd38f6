"""Hashes of the bits of tensors, computed on their device and read together."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence

import torch

from lockstep.checkpoint.parts import local

#: Integers as wide as an element; a complex number counts as two.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
#: Elements in a row: sums over rows and over columns need no memory of the tensor's size.
_ROW = 4096
#: Bytes up to which a tensor on the CPU is hashed as they are, which takes fewer calls.
_SMALL = 1 << 14

#: A hash, as two numbers, or as a tensor of shape `(2,)` and type int64 that is still to be read.
Bits = tuple[int, int] | torch.Tensor


def bits(tensor: torch.Tensor) -> Bits:
    """Return a hash of what this rank holds of a tensor.

    Elements are read as integers and laid out in rows. The sums of all rows and of all columns are
    weighted by constants and added, modulo 2^64: a single element that changes always changes both.
    """
    own = local(tensor.detach())
    if own.layout is not torch.strided:
        own = own.to_dense()
    if own.is_complex():
        own = torch.view_as_real(own.resolve_conj())
    words = own.resolve_neg().contiguous().reshape(-1)
    words = words.view(_INTEGERS[words.element_size()])
    if words.device.type == "cpu" and words.nbytes <= _SMALL:
        digest = hashlib.blake2b(words.numpy().tobytes(), digest_size=16).digest()
        return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")
    rows, rest = divmod(words.numel(), _ROW)
    # Weights that no row has, or a row could change places with the rest.
    last = _weights(2 * _ROW, words.device)[_ROW : _ROW + rest]
    tail = words[words.numel() - rest :].to(torch.int64) * last
    if not rows:
        return torch.stack([tail.sum(), tail.sum()])
    matrix = words[: rows * _ROW].view(rows, _ROW)
    by_row = matrix.sum(1, dtype=torch.int64) * _weights(_length(rows), words.device)[:rows]
    by_column = matrix.sum(0, dtype=torch.int64) * _weights(_ROW, words.device)
    return torch.stack([by_row.sum() + tail.sum(), by_column.sum() + tail.sum()])


def read(hashes: Sequence[Bits]) -> list[tuple[int, int]]:
    """Return hashes as numbers, with one wait for each device that they are on."""
    pending = {place: one for place, one in enumerate(hashes) if isinstance(one, torch.Tensor)}
    numbers: dict[int, list[int]] = {}
    for device in {one.device for one in pending.values()}:
        own = {place: one for place, one in pending.items() if one.device == device}
        numbers |= zip(own, torch.stack(list(own.values())).tolist(), strict=True)
    pairs = [numbers.get(place, one) for place, one in enumerate(hashes)]
    return [(int(first), int(second)) for first, second in pairs]


def _length(rows: int) -> int:
    """Return a power of two, so that few sizes are kept."""
    return max(_ROW, 1 << (rows - 1).bit_length())


@functools.lru_cache(maxsize=16)
def _weights(count: int, device: torch.device) -> torch.Tensor:
    """Return odd constants that have no pattern, of shape `(count,)`."""
    generator = torch.Generator().manual_seed(0x10C45)
    drawn = torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator, dtype=torch.int64)
    return (drawn | 1).to(device)
