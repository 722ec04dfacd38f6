"""Hashes of the bits of tensors, computed on their device and read together."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from lockstep.checkpoint.parts import local

#: Integers as wide as an element; a complex number counts as two.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
#: Elements in a row: sums over rows and over columns need no memory of the tensor's size.
_ROW = 4096


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a hash of what this rank holds of a tensor, of shape `(2,)` and type int64.

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
    rows, rest = divmod(words.numel(), _ROW)
    tail = words[words.numel() - rest :].to(torch.int64) * _weights(_ROW, words.device)[:rest]
    if not rows:
        return torch.stack([tail.sum(), tail.sum()])
    matrix = words[: rows * _ROW].view(rows, _ROW)
    by_row = matrix.sum(1, dtype=torch.int64) * _weights(_length(rows), words.device)[:rows]
    by_column = matrix.sum(0, dtype=torch.int64) * _weights(_ROW, words.device)
    return torch.stack([by_row.sum() + tail.sum(), by_column.sum() + tail.sum()])


def read(hashes: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """Return hashes as numbers, with one wait for each device that they are on."""
    found: list[tuple[int, int]] = [(0, 0)] * len(hashes)
    for device in {one.device for one in hashes}:
        places = [place for place, one in enumerate(hashes) if one.device == device]
        numbers = torch.stack([hashes[place] for place in places]).tolist()
        for place, (first, second) in zip(places, numbers, strict=True):
            found[place] = (first, second)
    return found


def _length(rows: int) -> int:
    """Return a power of two, so that few sizes are kept."""
    return max(_ROW, 1 << (rows - 1).bit_length())


@functools.lru_cache(maxsize=16)
def _weights(count: int, device: torch.device) -> torch.Tensor:
    """Return odd constants that have no pattern, of shape `(count,)`."""
    generator = torch.Generator().manual_seed(0x10C45)
    drawn = torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator, dtype=torch.int64)
    return (drawn | 1).to(device)
