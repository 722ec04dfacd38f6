"""Sums of gradients over the replicas (data-parallel workers) of a rank, in the order of a fixed tree.

The tree's leaves are all replicas of the run. A rank has one sum for each largest subtree of which it
computes all replicas.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from lockstep.engine.exchange.flat import FlatLayout, as_real
from lockstep.engine.layout.tree import leaves, merges
from lockstep.errors import StepError

#: The elements of a missing gradient in a bucket: `x + -0.0` has the bits of `x`, also if `x` is -0.0,
#: but `x + 0.0` has not (IEEE 754, section 6.3).
NO_GRADIENT = -0.0

#: One tensor per parameter; `None` where the replica did not use the parameter.
Gradients = list[torch.Tensor | None]


def add(left: Gradients, right: Gradients) -> Gradients:
    """Add the gradients `right` to `left` in place, and return `left`; `None` counts as zero."""
    is_complex = any(a is not None and a.is_complex() for a in left)
    if is_complex:
        left[:] = [None if a is None else a.resolve_conj() for a in left]
    both = [(a, b) for a, b in zip(left, right, strict=True) if a is not None and b is not None]
    if both:
        ours, theirs = [a for a, _ in both], [b for _, b in both]
        if is_complex:
            # As pairs of real numbers, like the exchanges: torch multiplies a complex summand by one.
            ours, theirs = [as_real(a) for a in ours], [as_real(b) for b in theirs]
        torch._foreach_add_(ours, theirs)
    if len(both) < len(left):
        left[:] = [b if a is None else a for a, b in zip(left, right, strict=True)]
    return left


def missing_like(parameter: torch.Tensor) -> torch.Tensor:
    """Return a tensor of `NO_GRADIENT` (-0.0), which replaces a missing gradient of `parameter` in sums."""
    value = complex(NO_GRADIENT, NO_GRADIENT) if parameter.is_complex() else NO_GRADIENT
    return torch.full_like(parameter, value)


def write(
    flat: torch.Tensor,
    gradients: Sequence[torch.Tensor | None],
    parts: FlatLayout,
) -> None:
    """Copy `gradients` into the flat tensor `flat` of a bucket; a missing gradient becomes `NO_GRADIENT`.

    `parts`: position and shape of each gradient in the bucket.
    """
    for part, gradient in zip(parts.of(flat), gradients, strict=True):
        if gradient is None:
            part.fill_(NO_GRADIENT)
        else:
            part.copy_(as_real(gradient))


class GradientAccumulation:
    """Sums the gradients of a rank's replicas (data-parallel workers) in the order of a fixed tree.

    `block`: the replicas that this rank computes. `replicas`: number of replicas on all ranks.

    Attributes:
        nodes: partial sums of gradients, the earliest replica first.
        missing: number of this rank's replicas whose gradients were not passed to `push` yet.
    """

    def __init__(self, block: range, replicas: int) -> None:
        self._merges, _ = merges(leaves(block), replicas)
        self.nodes: list[Gradients] = []
        self.missing = len(self._merges)

    @property
    def pending_merges(self) -> int:
        """How many of the latest partial sums the next `push` adds to its argument."""
        return self._merges[len(self._merges) - self.missing]

    def check(self, module: nn.Module, *expected: int) -> None:
        """Raise a `StepError` if `missing`, a number of replicas, is not one of `expected`.

        `missing` counts this rank's replicas without gradients. Another number means that only some
        replicas had a backward pass. If each replica had its own rank, ranks would wait for the missing
        gradients. `module` is for the message.
        """
        if self.missing not in expected:
            raise StepError(
                f"{type(module).__name__} had no backward pass for a replica of this batch, "
                "but had one for others",
                hint="call run.backward for every microbatch; in place of `continue`, or of catching an "
                "exception, to leave out a bad one: "
                "run.backward(loss, weight=len(x) if torch.isfinite(loss) else 0)",
            )

    def push(self, gradients: Gradients) -> None:
        """Add the gradients of this rank's next replica (data-parallel worker) to the sums."""
        self.nodes.append(gradients)
        for _ in range(self.pending_merges):
            right = self.nodes.pop()
            self.nodes[-1] = add(self.nodes[-1], right)
        self.missing -= 1

    def take(self) -> list[Gradients]:
        """Return this rank's partial sums of gradients, and clear them for the next batch.

        There is one sum for each largest subtree of which this rank computes all replicas.
        """
        nodes, self.nodes = self.nodes, []
        self.missing = len(self._merges)
        return nodes


def take_gradients(parameters: Sequence[nn.Parameter]) -> Gradients:
    """Return the gradients of `parameters`, and set each `grad` to `None`."""
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    return gradients
