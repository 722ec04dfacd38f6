"""Audits: on some steps ranks recompute each other's microbatches, and the checksums are compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

#: Checksums of the losses, gradients and settings that a rank computed of one microbatch.
Values = tuple[int, ...]


def is_due(step: int, every: int) -> bool:
    """Return whether step `step` (counted from 1) is audited: a microbatch of each rank is computed twice.

    True for the multiples of `every`, and for the powers of two below `every`.
    """
    return step % every == 0 or (step < every and step & (step - 1) == 0)


def partner(rank: int, size: int) -> int:
    """Return the rank that follows `rank` in a ring of `size` ranks.

    In an audit `rank` recomputes the last microbatch of the rank that follows.
    """
    return (rank + 1) % size


@dataclass(frozen=True, slots=True)
class AuditDifference:
    """A microbatch for which two ranks computed different values.

    Attributes:
        host: rank to which the microbatch belongs.
        auditor: rank that recomputed the microbatch, for comparison.
        odd: rank that is involved in all differences, and so probably computes wrongly; `None` if
            there is no such rank.
    """

    host: int
    auditor: int
    odd: int | None


def compare(hosted: Sequence[Values], audited: Sequence[Values]) -> AuditDifference | None:
    """Return the first microbatch for which two ranks have different checksums; `None` if all are equal.

    A rank that computes wrongly differs twice: in its own microbatch, and in the next rank's. If the script
    carries state from one microbatch to the next, all comparisons differ.

    Args:
        hosted: for each rank, its checksums of its own last microbatch.
        audited: for each rank, its checksums of its partner's last microbatch (see `partner`).
    """
    size = len(hosted)
    pairs = [(partner(rank, size), rank) for rank in range(size)]
    differing = [pair for pair in pairs if hosted[pair[0]] != audited[pair[1]]]
    if not differing:
        return None
    common = set(differing[0]).intersection(*differing[1:])
    is_one_rank = len(common) == 1 and len(differing) < size
    return AuditDifference(*differing[0], odd=common.pop() if is_one_rank else None)
