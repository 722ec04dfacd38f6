"""Audits: steps that are audited, ranks that compute each other's microbatches, and differences found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

#: Checksums of the losses, gradients and settings that a rank computed of one microbatch.
Values = tuple[int, ...]


def is_due(step: int, every: int) -> bool:
    """Return whether to audit step `step` (counted from 1): to compute a microbatch of it twice.

    Audited are the steps that are powers of two below `every`, and the multiples of `every`.
    """
    return step % every == 0 or (step < every and step & (step - 1) == 0)


def partner(rank: int, size: int) -> int:
    """Return the rank whose last microbatch `rank` computes too, for comparison: the next one in a ring."""
    return (rank + 1) % size


@dataclass(frozen=True, slots=True)
class Difference:
    """A microbatch of which two ranks computed different values.

    Attributes:
        host: rank to which the microbatch belongs.
        auditor: rank that computed the microbatch once more, for comparison.
        odd: the rank that probably computes wrongly, if only its own comparisons differ; else `None`.
    """

    host: int
    auditor: int
    odd: int | None


def compare(hosted: Sequence[Values], audited: Sequence[Values]) -> Difference | None:
    """Return the first microbatch of which two ranks have different checksums; `None` if all are equal.

    A rank that computes wrongly differs twice: in its own microbatch, and in the next rank's. If the script
    carries state from one microbatch to the next, all comparisons differ.

    Args:
        hosted: for each rank, checksums of the last microbatch that belongs to it.
        audited: for each rank, checksums of its partner's last microbatch, which it has computed, too.
    """
    size = len(hosted)
    pairs = [(partner(rank, size), rank) for rank in range(size)]
    differing = [pair for pair in pairs if hosted[pair[0]] != audited[pair[1]]]
    if not differing:
        return None
    common = set(differing[0]).intersection(*differing[1:])
    is_one_rank = len(common) == 1 and len(differing) < size
    return Difference(*differing[0], odd=common.pop() if is_one_rank else None)
