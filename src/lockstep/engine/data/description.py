"""`Description`: checksums of a loader's data, by which ranks detect that they have different data.

This module fetches no samples, since that may be slow and may change a dataset.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    ConcatDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

#: Maximal numbers of indices, items and elements of a tensor in a checksum, taken at equal distances.
_INDICES, _ITEMS, _ELEMENTS = 4096, 64, 16384


@dataclass(frozen=True, slots=True)
class Description:
    """A dataset and its sampler; their checksums show whether they have changed.

    The methods return the checksums as of the time of the call.
    """

    dataset: Any
    sampler: Any = None  # the script's sampler or batch sampler; `None` for the loader's own order

    def parts(self) -> dict[str, str]:
        """Return text values that describe the dataset and the sampler, by name.

        They are the class (`kind`), the length, and checksums of some of the indices and values.
        """
        found: dict[str, list[Any]] = {}
        for name, value in self._walk():
            found.setdefault(name, []).append(value)
        kinds = " of ".join(found.pop("kind"))
        length = str(len(self.dataset)) if hasattr(self.dataset, "__len__") else "unknown"
        sums = {name: checksum(values) for name, values in found.items()}
        return {"kind": kinds, "length": length, **sums}

    def indices(self) -> str | None:
        """Return a checksum of the indices and weights in torch's Subsets and samplers.

        The result is `None` if there are none. Indices in objects of other classes are left out, since such
        an object may draw new ones during a loop.
        """
        names = {"indices"} | ({"sampler"} if type(self.sampler) is SubsetRandomSampler else set())
        found = [value for name, value in self._walk() if name in names]
        if type(self.sampler) is WeightedRandomSampler:
            found.append(self.sampler.weights)
        return checksum(found) if found else None

    def _walk(self) -> Iterator[tuple[str, Any]]:
        yield from _walk(self.dataset)
        drawn = getattr(self.sampler, "indices", None)
        if isinstance(drawn, (list, tuple, range, np.ndarray, torch.Tensor)):
            yield "sampler", _numbers(_some(drawn, _INDICES))


def _walk(dataset: Any) -> Iterator[tuple[str, Any]]:
    yield "kind", type(dataset).__name__
    if isinstance(dataset, Subset):
        name = "indices" if type(dataset) is Subset else "subset"
        yield name, _numbers(_some(dataset.indices, _INDICES))
        yield from _walk(dataset.dataset)
    elif type(dataset) is ConcatDataset:
        for one in dataset.datasets:
            yield from _walk(one)
    elif type(dataset) is TensorDataset:
        yield "values", [_some(tensor, _ITEMS) for tensor in dataset.tensors]
    elif isinstance(dataset, (list, tuple)):
        yield "values", _some(dataset, _ITEMS)


def _some(values: Any, count: int) -> Any:
    distance = max(1, len(values) // count)
    if isinstance(values, (list, tuple, range, np.ndarray, torch.Tensor)):
        return values[::distance]
    return [values[place] for place in range(0, len(values), distance)]


def _numbers(values: Any) -> Any:
    """Return `values` as an array if it is a list of integers, otherwise return it unchanged.

    An array is faster to hash.
    """
    return np.array(values) if all(type(value) is int for value in values) else values


def checksum(value: object) -> str:
    """Return a checksum of 64 bits in hexadecimal; equal values have the same checksum.

    It covers the bytes of tensors, arrays, images, numbers, text and containers of them. Of other objects
    it covers only the type, since their bytes may contain an address.
    """
    found = hashlib.blake2b(digest_size=8)
    for part in _bytes_of(value):
        found.update(part)
    return found.hexdigest()


def _bytes_of(value: object) -> Iterator[bytes]:
    yield f"{type(value).__qualname__}:".encode()
    if isinstance(value, torch.Tensor):
        yield from _bytes_of_tensor(value)
    elif isinstance(value, range):
        yield repr(value).encode()
    elif isinstance(value, Mapping):
        yield from _bytes_of(list(value.items()))
    elif isinstance(value, (list, tuple)):
        yield len(value).to_bytes(8, "little")
        for one in value:
            yield from _bytes_of(one)
    elif isinstance(value, (set, frozenset)):
        yield "".join(sorted(map(checksum, value))).encode()
    elif isinstance(value, (bool, int, float, complex, str, bytes, type(None))):
        yield repr(value).encode()
    elif isinstance(value, np.ndarray) and value.dtype.hasobject:
        yield from _bytes_of(value.tolist())
    elif callable(getattr(value, "tobytes", None)):  # arrays, their scalars, images
        yield f"{getattr(value, 'dtype', '')}{getattr(value, 'shape', '')}".encode()
        yield bytes(value.tobytes())  # type: ignore[attr-defined]


def _bytes_of_tensor(value: torch.Tensor) -> Iterator[bytes]:
    yield f"{value.dtype}{tuple(value.shape)}".encode()
    if value.layout is torch.strided and not value.is_quantized and not value.is_meta:
        some = _some(value.detach().reshape(-1), _ELEMENTS).cpu().contiguous()
        yield some.resolve_conj().resolve_neg().view(torch.uint8).numpy().tobytes()
