"""SHA-256 digests of state: two states have the same digest if and only if all of their bits are equal.

A state is hashed entry by entry, depth first: path, type and shape, which give the number of bytes, then
the bytes. Keys that look like a path are quoted, so that different states have different entries. Types
that `state/checkpoint/state_codec.py` cannot save raise an error, since the text of such an object may
contain its address in memory.

All ranks gather tensors that are sharded over ranks, one at a time, in the order in which they are hashed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np
import torch

from lockstep.errors import ModelError
from lockstep.state.checkpoint.parts import whole

#: Types whose `repr` determines all bits of the value.
_NUMBERS_AND_TEXT = (int, float, complex, str, type(None), torch.dtype, torch.device)
_LISTS = ("list", "tuple", "deque", "Size")
#: A key that contains one of the first characters, or begins with one of the second, is quoted in a path.
_SEPARATORS, _QUOTES = "/:\0", ("'", '"', "(")


def digest(states: Iterable[Mapping[str, Any]]) -> str:
    """Return the SHA-256 digest of `states`: of the path, type, shape and bits of each entry.

    It is a collective call if tensors are sharded over ranks.

    Raises:
        ModelError: if a state has a value of an unknown type.
    """
    hasher = hashlib.sha256()
    for state in states:
        _hash_items(hasher, "", state)
    return f"sha256:{hasher.hexdigest()}"


def _hash_items(hasher: Any, path: str, items: Mapping[Any, Any]) -> None:
    for key, value in items.items():
        _hash(hasher, f"{path}/{_part(key)}", value)


def _hash(hasher: Any, path: str, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_quantized:
            raise _unknown(path, value)
        hasher.update(f"{path}:{value.dtype}:{tuple(value.shape)}\0".encode())
        plain = whole(value).cpu().resolve_conj().resolve_neg().contiguous()
        hasher.update(plain.reshape(-1).view(torch.uint8).numpy().data)
    elif isinstance(value, np.ndarray | np.generic):
        if value.dtype.hasobject:
            raise _unknown(path, value)
        kind = "array" if isinstance(value, np.ndarray) else "scalar"
        hasher.update(f"{path}:{kind} {value.dtype.str} {value.shape}\0".encode() + value.tobytes())
    elif isinstance(value, _NUMBERS_AND_TEXT):
        hasher.update(f"{path}:{value!r}\0".encode())
    elif isinstance(value, bytes):
        hasher.update(f"{path}:bytes {len(value)}\0".encode() + value)
    else:
        _hash_container(hasher, path, value)


def _hash_container(hasher: Any, path: str, value: Any) -> None:
    if isinstance(value, AbstractSet):
        # Sorted by digests, since the order of a set depends on hashes that differ between processes.
        parts = sorted(_digest_of(path, item) for item in value)
        hasher.update(f"{path}:set {len(parts)}\0".encode() + b"".join(parts))
        return
    is_list = type(value).__name__ in _LISTS
    if not is_list and not isinstance(value, Mapping):
        raise _unknown(path, value)
    if not value:
        hasher.update(f"{path}:{'[]' if is_list else '{}'}\0".encode())
    elif is_list:
        for index, item in enumerate(value):
            _hash(hasher, f"{path}/{index}", item)
    else:
        _hash_items(hasher, path, value)


def _digest_of(path: str, value: Any) -> bytes:
    hasher = hashlib.sha256()
    _hash(hasher, path, value)
    return hasher.digest()


def _part(key: Any) -> str:
    """Return the text that stands for a mapping's key in a path such as `optimizer.state.0`.

    Different keys have different texts.
    """
    if not isinstance(key, str):
        return f"({_digest_of('', key).hex()})"
    is_plain = key and not key.startswith(_QUOTES) and not any(c in key for c in _SEPARATORS)
    return key if is_plain and not key.isdecimal() and key.isprintable() else repr(key)


def _unknown(path: str, value: Any) -> ModelError:
    return ModelError(
        f"the state {path} is a {type(value).__name__}; expected dense tensors, arrays, numbers, text, "
        "None, or containers of them",
        hint="let its state_dict() return what those say, and load_state_dict() make it again",
    )
