"""Gradients of this rank: those of its replicas, reduced to maximal tree nodes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lockstep.engine.exchange.flat import Parts, as_real
from lockstep.engine.layout.tree import leaves, merges

#: The value of a missing gradient in memory: `x + -0.0` is `x` in all its bits, which
#: `x + 0.0` is not when `x` is -0.0 (IEEE 754, section 6.3).
NO_GRADIENT = -0.0

#: One tensor per parameter; `None` where the replica did not use the parameter.
Gradients = list[torch.Tensor | None]


def add(left: Gradients, right: Gradients) -> Gradients:
    """Add `right` into `left` and return it; a missing gradient changes nothing."""
    is_complex = any(a is not None and a.is_complex() for a in left)
    if is_complex:
        left[:] = [None if a is None else a.resolve_conj() for a in left]
    both = [(a, b) for a, b in zip(left, right, strict=True) if a is not None and b is not None]
    if both:
        ours, theirs = [a for a, _ in both], [b for _, b in both]
        if is_complex:
            # As exchanges add complex numbers: to add one as such, torch multiplies it by one.
            ours, theirs = [as_real(a) for a in ours], [as_real(b) for b in theirs]
        torch._foreach_add_(ours, theirs)
    if len(both) < len(left):
        left[:] = [b if a is None else a for a, b in zip(left, right, strict=True)]
    return left


def missing_like(parameter: torch.Tensor) -> torch.Tensor:
    """Return the values that stand for a missing gradient of `parameter`."""
    value = complex(NO_GRADIENT, NO_GRADIENT) if parameter.is_complex() else NO_GRADIENT
    return torch.full_like(parameter, value)


def write(
    flat: torch.Tensor,
    gradients: Sequence[torch.Tensor | None],
    parts: Parts,
) -> None:
    """Copy gradients to their parts of `flat`, `NO_GRADIENT` where there are none."""
    for part, gradient in zip(parts.of(flat), gradients, strict=True):
        if gradient is None:
            part.fill_(NO_GRADIENT)
        else:
            part.copy_(as_real(gradient))


class GradientAccumulation:
    """Sums the gradients of a rank's replicas to maximal tree nodes, siblings as soon as both are there."""

    def __init__(self, block: range, replicas: int) -> None:
        self._merges, _ = merges(leaves(block), replicas)
        self.nodes: list[Gradients] = []
        self._collected = 0

    @property
    def pending_merges(self) -> int:
        """How many nodes the next replica's gradients are merged with."""
        return self._merges[self._collected]

    @property
    def missing(self) -> int:
        """How many of this rank's replicas have no gradients yet."""
        return len(self._merges) - self._collected

    def push(self, gradients: Gradients) -> None:
        """Add the gradients of the next local replica."""
        self.nodes.append(gradients)
        for _ in range(self.pending_merges):
            right = self.nodes.pop()
            self.nodes[-1] = add(self.nodes[-1], right)
        self._collected += 1

    def take(self) -> list[Gradients]:
        """Return the nodes, and reset."""
        nodes, self.nodes = self.nodes, []
        self._collected = 0
        return nodes


def take_gradients(parameters: Sequence[torch.nn.Parameter]) -> Gradients:
    """Take the gradients off `parameters`, which have none afterwards."""
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    return gradients
