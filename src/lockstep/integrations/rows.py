"""Encode predictions as one row of bytes per sample, the form in which `run.gather` collects them.

A row has the sample's numbers (such as its loss), then for each predicted tensor its type, shape, values.
So predictions of different shapes fit into one result, in the dataset's order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from lockstep.errors import UsageError

#: Value that pads shorter arrays, as in transformers, which ignores labels of this value.
PADDING = -100
#: Types of tensors that a row can have, by number.
_TYPES = (
    np.float32,
    np.int64,
    np.float64,
    np.int32,
    np.float16,
    np.bool_,
    np.uint8,
    np.int16,
    np.int8,
)


def pack(floats: Sequence[float], tree: Any, rows: int) -> torch.Tensor:
    """Return one row of bytes for each of `rows` samples: `floats`, and the sample's part of each tensor.

    Args:
        floats: numbers that are the same for all samples of the microbatch.
        tree: tensors, in nested containers, whose first dimension counts the samples.
        rows: number of samples.

    Raises:
        UsageError: for a tensor whose first dimension is not `rows`.
    """
    parts = [_bytes(np.tile(np.array(floats, np.float64), (rows, 1)))]
    arrays = [
        _array(leaf, rows) for leaf in tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor)
    ]
    for array in arrays:
        kind = [np.dtype(own) for own in _TYPES].index(array.dtype)
        header = np.array([kind, array.ndim - 1, *array.shape[1:]], np.int64)
        parts += [_bytes(np.tile(header, (rows, 1))), _bytes(array)]
    return torch.from_numpy(np.concatenate(parts, axis=1))


def unpack(rows: torch.Tensor, floats: int, like: Any) -> tuple[np.ndarray[Any, Any], Any]:
    """Return the floats and the predictions that are in rows of bytes from `pack`.

    Args:
        rows: result of `pack`, one row per sample.
        floats: number of floats in each row.
        like: the tree of tensors of one microbatch, as it was given to `pack`.

    Returns:
        The floats, of shape `(samples, floats)`, and a tree like `like` with an array over all samples
        in place of each tensor.
    """
    data = rows.numpy()
    numbers = np.frombuffer(data[:, : 8 * floats].tobytes(), np.float64).reshape(len(data), floats)
    leaves, shape = tree_flatten(like)
    tensors = [isinstance(leaf, torch.Tensor) for leaf in leaves]
    samples = [_read(row, 8 * floats, sum(tensors)) for row in data]
    joined = iter([_join(column) for column in zip(*samples, strict=True)])
    merged = [next(joined) if own else leaf for own, leaf in zip(tensors, leaves, strict=True)]
    return numbers, tree_unflatten(merged, shape)


def _array(tensor: torch.Tensor, rows: int) -> np.ndarray[Any, Any]:
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.float()
    if tensor.dim() == 0 or len(tensor) != rows:
        raise UsageError(
            f"the model returned a tensor of shape {tuple(tensor.shape)} for {rows} samples; expected one "
            "row per sample, which can be put in the order of the dataset",
            hint="ignore_keys=[…] of evaluate() and predict() leaves outputs of the model out",
        )
    array: np.ndarray[Any, Any] = tensor.contiguous().numpy()
    return array


def _bytes(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    rows = len(array)
    flat = np.ascontiguousarray(array).reshape(rows, -1)
    return flat.view(np.uint8) if flat.size else np.zeros((rows, 0), np.uint8)


def _read(row: np.ndarray[Any, Any], start: int, count: int) -> list[np.ndarray[Any, Any]]:
    found = []
    for _ in range(count):
        kind, dimensions = np.frombuffer(row[start : start + 16].tobytes(), np.int64)
        start += 16 + 8 * int(dimensions)
        shape = np.frombuffer(row[start - 8 * int(dimensions) : start].tobytes(), np.int64)
        dtype = np.dtype(_TYPES[kind])
        end = start + int(np.prod(shape)) * dtype.itemsize
        found.append(np.frombuffer(row[start:end].tobytes(), dtype).reshape(shape))
        start = end
    return found


def _join(arrays: Sequence[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """Stack the arrays of all samples into one array; pad smaller ones with -100 to the largest shape."""
    shape = tuple(np.max([array.shape for array in arrays], axis=0).astype(int))
    if all(array.shape == shape for array in arrays):
        return np.stack(arrays)
    joined = np.full((len(arrays), *shape), PADDING, arrays[0].dtype)
    for whole, array in zip(joined, arrays, strict=True):
        whole[tuple(slice(size) for size in array.shape)] = array
    return joined
