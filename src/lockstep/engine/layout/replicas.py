"""Replicas over ranks, samples over replicas: contiguous shares whose sizes differ by at most one."""

from __future__ import annotations

from lockstep.errors import UsageError


def share(total: int, parts: int, part: int) -> range:
    """Return the `part`-th of `parts` contiguous shares of `range(total)`.

    Sizes differ by at most one; the earlier shares are the larger ones. A share may be empty.
    """
    size, extra = divmod(total, parts)
    start = part * size + min(part, extra)
    return range(start, start + size + (part < extra))


def block(replicas: int, ranks: int, rank: int) -> range:
    """Return the replicas that `rank` hosts, when `ranks` ranks host `replicas` replicas.

    Raises:
        UsageError: if there are fewer replicas than ranks, since a rank would host none.
    """
    if replicas < ranks:
        raise UsageError(
            f"{ranks} ranks for {replicas} replicas; expected at most one rank per replica",
            hint=f"start at most {replicas} ranks, or set replicas={ranks} (which changes the result)",
        )
    return share(replicas, ranks, rank)
