"""Digests of state: equal if and only if every bit is."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch


def digest(states: Iterable[Mapping[str, Any]]) -> str:
    """Return the SHA-256 of all tensors in `states`: names, types, shapes and bits."""
    hasher = hashlib.sha256()
    for state in states:
        _update(hasher, "", state)
    return f"sha256:{hasher.hexdigest()}"


def _update(hasher: Any, path: str, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        hasher.update(f"{path}:{value.dtype}:{tuple(value.shape)}\0".encode())
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        hasher.update(data.numpy().data)
    elif isinstance(value, Mapping):
        for key in value:
            _update(hasher, f"{path}/{key}", value[key])
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for index, item in enumerate(value):
            _update(hasher, f"{path}/{index}", item)
    else:
        hasher.update(f"{path}:{value!r}\0".encode())
