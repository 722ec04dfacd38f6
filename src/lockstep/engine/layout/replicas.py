"""Division of replicas over ranks, and of samples over replicas, into contiguous, nearly equal shares."""

from __future__ import annotations

from lockstep.errors import UsageError


def share(total: int, parts: int, part: int) -> range:
    """Return share number `part`, from 0, of `range(total)` divided into `parts` contiguous shares.

    Sizes differ by at most one, and earlier shares are larger. A share may be empty.
    """
    size, extra = divmod(total, parts)
    start = part * size + min(part, extra)
    return range(start, start + size + (part < extra))


def block(replicas: int, ranks: int, rank: int) -> range:
    """Return the replicas that `rank` computes when `replicas` are divided over `ranks` ranks.

    Raises:
        UsageError: if there are fewer replicas than ranks, since a rank would have none.
    """
    if replicas < ranks:
        raise UsageError(
            f"{ranks} ranks for {replicas} replicas; expected at most one rank per replica",
            hint=f"start at most {replicas} ranks; a new run may have replicas={ranks}, which changes its "
            "result",
        )
    return share(replicas, ranks, rank)
