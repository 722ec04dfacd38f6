"""Orders of an epoch's samples; `ShuffledOrder` is a keyed permutation, computed at any position in O(1).

A Feistel network over the smallest power of two that is at least `length` is a bijection with any round
function (Luby and Rackoff, 1988). A result outside of `range(length)` is permuted again until it is inside
("cycle walking": Black and Rogaway, 2002), fewer than two times on average. The round function is the
finaliser of SplitMix64 (Steele, Lea and Flood, 2014).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lockstep.engine.layout.keys import derive

Indices = NDArray[np.int64]
_Words = NDArray[np.uint64]

_ROUNDS = 24  # with 12 the orders of five elements are not equally frequent (chi-square test)
_MAX_LENGTH = 1 << 62


def _mix(words: _Words) -> _Words:
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


@dataclass(frozen=True, slots=True)
class ShuffledOrder:
    """A random permutation of `range(length)`, for a length up to 2**62, that is determined by `key`."""

    length: int
    key: int
    _round_keys: tuple[np.uint64, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0 <= self.length <= _MAX_LENGTH:
            raise ValueError(f"length is {self.length}; expected 0 to 2**62")
        keys = (np.uint64(derive(self.key, "round", i)) for i in range(_ROUNDS))
        object.__setattr__(self, "_round_keys", tuple(keys))

    def __len__(self) -> int:
        return self.length

    def __call__(self, start: int, stop: int) -> Indices:
        """Return the indices at the positions `[start, stop)`, shape `(stop - start,)`."""
        words = self._permute(np.arange(start, stop, dtype=np.uint64))
        outside = words >= np.uint64(self.length)
        while outside.any():
            words[outside] = self._permute(words[outside])
            outside = words >= np.uint64(self.length)
        return words.astype(np.int64)

    def _permute(self, words: _Words) -> _Words:
        bits = max(1, (self.length - 1).bit_length())
        low_bits = np.uint64((bits + 1) // 2)
        low_mask = (np.uint64(1) << low_bits) - np.uint64(1)
        high_mask = (np.uint64(1) << np.uint64(bits // 2)) - np.uint64(1)
        high, low = words >> low_bits, words & low_mask
        for i, key in enumerate(self._round_keys):
            if i % 2:
                high = high ^ (_mix(low + key) & high_mask)
            else:
                low = low ^ (_mix(high + key) & low_mask)
        return (high << low_bits) | low


@dataclass(frozen=True, slots=True)
class SequentialOrder:
    """The order of the dataset itself: index `i` at position `i`."""

    length: int

    def __len__(self) -> int:
        return self.length

    def __call__(self, start: int, stop: int) -> Indices:
        """Return the indices at the positions `[start, stop)`, shape `(stop - start,)`."""
        return np.arange(start, stop, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class ArrayOrder:
    """The order of an epoch's samples as an array of indices, which a sampler of the script has drawn."""

    indices: Indices

    def __len__(self) -> int:
        return len(self.indices)

    def __call__(self, start: int, stop: int) -> Indices:
        """Return the indices at the positions `[start, stop)`, shape `(stop - start,)`."""
        return self.indices[start:stop]


Order = ShuffledOrder | SequentialOrder | ArrayOrder
