"""What a run says of itself when it begins."""

from __future__ import annotations


def title(name: str, exactness: str, replicas: int, ranks: int) -> str:
    """Return what runs: its name, its class, and how many replicas on how many ranks."""
    hosted = f"{_counted(replicas, 'replica')} on {_counted(ranks, 'rank')}"
    return f"lockstep: {name}: {exactness}, {hosted}"


def unset(name: str, replicas: int) -> str:
    """Return what it means that nothing says how many replicas a run on several ranks has."""
    return (
        f"lockstep: {name}: replicas is not set, so that {replicas} ranks mean {replicas} replicas, and "
        f"another number of ranks is another run; replicas={replicas} gives the same result on 1 to "
        f"{replicas} ranks"
    )


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
