"""Calls that all ranks make together: each begins by asking whether all of them are in the same one.

Costs one small message per call. Backward passes, which happen in every step, don't ask: the watch
compares them when they take too long.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from lockstep.errors import MismatchError, PeerError
from lockstep.record import stacks
from lockstep.training.heartbeat import Heartbeat
from lockstep.world.meet import Meeting

#: Bytes in which a rank says what it is in.
_LENGTH = 256
#: How long a rank whose peer is gone waits to hear why.
_SECONDS = 1.0
HINT = (
    "every rank must make the same calls in the same order: none of them may stand under an `if` that "
    "depends on the rank or on one rank's values"
)


class CollectiveCheck:
    """The calls of this rank that all ranks make together.

    Args:
        standing: where this rank stands.
        group: the process group, or `None` for a single rank.
        meeting: with the other ranks, which may have told why they are gone.
    """

    def __init__(
        self, standing: Heartbeat, group: dist.ProcessGroup | None, meeting: Meeting
    ) -> None:
        self._standing, self._meeting = standing, meeting
        self._group = group if group is not None and _has_cpu(group) else None

    @contextlib.contextmanager
    def meeting(self, kind: str) -> Iterator[None]:
        """Come to the call `kind` with all ranks, and do in the body what it takes.

        Raises:
            MismatchError: if another rank is in another call.
        """
        if self._group is None:
            yield
            return
        with self._standing.meeting(kind):
            self._compare(kind, self._group)
            yield

    def _compare(self, kind: str, group: dist.ProcessGroup) -> None:
        place = stacks.users(stacks.of(sys._getframe()))
        said = f"{kind}\n{place}".encode()[:_LENGTH].ljust(_LENGTH, b"\0")
        own = torch.frombuffer(bytearray(said), dtype=torch.uint8)
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        try:
            dist.all_gather(parts, own, group=group)
        except RuntimeError as error:
            told = self._meeting.heard(_SECONDS)
            if told is None:
                raise
            raise PeerError(told) from error
        calls = [part.numpy().tobytes().rstrip(b"\0").decode(errors="ignore") for part in parts]
        check(calls, dist.get_rank(group))


def check(calls: Sequence[str], rank: int) -> None:
    """Refuse calls, one for each rank as `kind`, a line feed and its place, that are of several kinds.

    Raises:
        MismatchError: naming this rank's call, and the first that is another one.
    """
    kinds = [call.partition("\n")[0] for call in calls]
    other = next((r for r, kind in enumerate(kinds) if kind != kinds[rank]), None)
    if other is None:
        return
    here, there = (f"rank {r} is in {calls[r].replace(chr(10), ' at ')}" for r in (rank, other))
    raise MismatchError(f"{here}, {there}; expected the same call on all ranks", hint=HINT)


def _has_cpu(group: dist.ProcessGroup) -> bool:
    """Whether the group moves tensors of the processor: one that the script has made may not."""
    try:
        group._get_backend(torch.device("cpu"))
    except RuntimeError:
        return False
    return True
