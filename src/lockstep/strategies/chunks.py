"""Parts of a batch: how many samples each has, and putting together what has become of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lockstep.errors import ModelError
from lockstep.strategies.p2p import assemble, dismantle


def sizes_of(tensors: Sequence[torch.Tensor], chunks: int) -> list[int]:
    """Return how many samples each chunk has: no chunk is empty, whatever the batch."""
    batch = next((len(tensor) for tensor in tensors if tensor.dim()), 1)
    count = max(1, min(chunks, batch))
    size, extra = divmod(batch, count)
    return [size + (place < extra) for place in range(count)]


def merge(outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Put the outputs of all chunks together.

    Raises:
        ModelError: if they don't have one row per sample, or differ in form.
    """
    columns: list[list[torch.Tensor]] = []
    parts = None
    for output in outputs:
        tensors: list[torch.Tensor] = []
        own = dismantle(output, tensors)
        parts = own if parts is None else parts
        if own != parts:
            raise ModelError("chunks of one batch have outputs of different forms")
        columns.append(tensors)
    merged = []
    for row in zip(*columns, strict=True):
        if any(not t.dim() or len(t) != size for t, size in zip(row, sizes, strict=True)):
            raise ModelError(
                f"the model's output has shape {tuple(row[0].shape)} for a chunk of {sizes[0]} "
                "samples; expected one row per sample, to put the chunks together",
                hint="chunks=1 gives the model whole batches",
            )
        merged.append(torch.cat([t.detach() for t in row]).requires_grad_(row[0].requires_grad))
    return assemble(parts, merged)


def put_together(parts: Sequence[torch.Tensor | None], whole: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient of a tensor of the call from those of its chunks."""
    found = [part for part in parts if part is not None]
    if not found:
        return None
    if len(found) == 1 and found[0].shape == whole.shape:
        return found[0]
    if whole.dim() and sum(map(len, found)) == len(whole) and len(found) == len(parts):
        return torch.cat(found)
    total = found[0]
    for part in found[1:]:
        total = total + part
    return total
