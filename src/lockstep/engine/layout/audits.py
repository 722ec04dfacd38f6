"""Audits: which steps are audited, which rank computes whose microbatch, and which rank differs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

#: Checksums of the values that a rank computed of a microbatch.
Values = tuple[int, ...]


def is_due(step: int, every: int) -> bool:
    """Return whether step number `step`, from 1, is audited: powers of two first, then each `every`-th."""
    return step % every == 0 or (step < every and step & (step - 1) == 0)


def partner(rank: int, size: int) -> int:
    """Return the rank whose last microbatch `rank` computes once more: the next rank, around."""
    return (rank + 1) % size


@dataclass(frozen=True, slots=True)
class Difference:
    """A microbatch of which two ranks computed different values.

    Attributes:
        host: the rank that computed it as its own.
        auditor: the rank that computed it once more.
        odd: the rank that takes part in all comparisons that differ, while others agree; `None` where
            there is no such rank, or where all comparisons differ.
    """

    host: int
    auditor: int
    odd: int | None


def compare(hosted: Sequence[Values], audited: Sequence[Values]) -> Difference | None:
    """Return the first difference; `None` where all ranks agree.

    A rank that computes wrongly differs twice: as the host, and as the auditor of the next rank. State
    that a script carries from one pass to the next makes all comparisons differ.

    Args:
        hosted: by rank, checksums of its last microbatch.
        audited: by rank, checksums of its partner's last microbatch.
    """
    size = len(hosted)
    pairs = [(partner(rank, size), rank) for rank in range(size)]
    differing = [pair for pair in pairs if hosted[pair[0]] != audited[pair[1]]]
    if not differing:
        return None
    common = set(differing[0]).intersection(*differing[1:])
    is_one_rank = len(common) == 1 and len(differing) < size
    return Difference(*differing[0], odd=common.pop() if is_one_rank else None)
