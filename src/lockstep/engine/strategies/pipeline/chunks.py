"""Division of a call's tensors into chunks (microbatches of a pipeline), and merging of the outputs.

Tensors with one row per sample are divided. The user names them by `chunk_inputs`, since another tensor may
have the length of the batch by chance.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch

from lockstep.engine.layout.replicas import share
from lockstep.engine.strategies.pipeline.p2p import assemble, dismantle
from lockstep.errors import ModelError


@dataclass(frozen=True, slots=True)
class Split:
    """Division of the tensors of one call of a model into chunks.

    Attributes:
        sizes: number of samples of each chunk, at least 1.
        cut: indices of the tensors that are cut along their first dimension; each chunk has the
            other tensors whole.
    """

    sizes: list[int]
    cut: frozenset[int]

    def part(self, place: int, tensor: torch.Tensor, chunk: int) -> torch.Tensor:
        """Return the part of `tensor` that belongs to chunk number `chunk`.

        `place`: index of the tensor among those of the call. A tensor that is not cut is returned whole.
        """
        if place not in self.cut:
            return tensor
        # Through `data` each chunk has its own `_version`: if a stage changes its input in place, autograd
        # must not report that for other chunks.
        return tensor.data.narrow(0, sum(self.sizes[:chunk]), self.sizes[chunk])

    def gradient(
        self, place: int, parts: Sequence[torch.Tensor | None], whole: torch.Tensor
    ) -> torch.Tensor | None:
        """Return the gradient of one tensor of the call, combined from its chunks' gradients.

        `place`: index of the tensor. `parts`: gradient of each chunk. `whole`: the tensor. The result is
        `None` if no chunk has a gradient.
        """
        found = [part for part in parts if part is not None]
        if not found:
            return None
        if place in self.cut:
            pairs = zip(parts, torch.split(whole, self.sizes), strict=True)
            return torch.cat(
                [torch.zeros_like(own) if part is None else part for part, own in pairs]
            )
        return reduce(torch.add, found)


def split(
    tensors: Sequence[torch.Tensor],
    arguments: Sequence[str],
    chunks: int,
    named: Collection[str] | None,
) -> Split:
    """Return a division of the tensors of a call into chunks.

    `arguments`: for each tensor, the argument of `forward` that contains it. `chunks`: number of chunks; a
    batch of fewer samples has one chunk per sample. `named`: arguments whose tensors have one row per
    sample; `None` for the only tensor of the call.

    Raises:
        ModelError: if `named` is missing for several tensors, or the named tensors differ in
            length.
    """
    if chunks == 1:
        return Split([1], frozenset())
    places = [place for place, tensor in enumerate(tensors) if tensor.dim()]
    if named is None and len(places) > 1:
        names = ", ".join(dict.fromkeys(arguments[place] for place in places))
        raise ModelError(
            f"the model is called with {len(places)} tensors ({names}) and chunks={chunks}; expected "
            "to be told which have one row per sample",
            hint=f"chunk_inputs=[{arguments[places[0]]!r}] cuts these, others go to each chunk whole; or "
            "chunks=1",
        )
    if named is not None:
        places = [place for place in places if arguments[place] in named]
    lengths = {len(tensors[place]): arguments[place] for place in places}
    if len(lengths) > 1:
        found = ", ".join(f"{name} has {length}" for length, name in lengths.items())
        raise ModelError(
            f"chunk_inputs names tensors of different lengths: {found} rows; expected one row per sample",
            hint="name those alone that have one row per sample: others go to each chunk whole",
        )
    batch = next(iter(lengths), 1)
    count = max(1, min(chunks, batch))
    return Split([len(share(batch, count, n)) for n in range(count)], frozenset(places))


def merge(outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Return one output of the model, concatenated from the outputs of all chunks.

    `sizes`: number of samples of each chunk. Outputs without one row per sample, or with different
    structures, raise a `ModelError`.
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
