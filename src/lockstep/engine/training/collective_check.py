"""Collective check: in every collective call of a run, ranks first compare which call each of them makes.

The comparison costs one small message per call. Backward passes send no message: the watchdog compares
backward passes, and calls that take too long, with the function `mismatch`.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from lockstep.engine.exchange.scatter import gather_texts
from lockstep.engine.training.first_error import FirstError
from lockstep.engine.training.heartbeat import Call, Heartbeat
from lockstep.errors import LockstepError, MismatchError, PeerError
from lockstep.state.record import stacks
from lockstep.world.model import World
from lockstep.world.rendezvous.rank_rendezvous import RankRendezvous
from lockstep.world.rendezvous.store import TIMEOUT

#: Bytes of a message: the name of the call, a text of the call, and the line of the script, which is cut.
_LENGTH = 256
#: Characters of the text, at most.
_TEXT = 150
#: Seconds that a rank waits for the reason why another rank has ended.
_SECONDS = 1.0
HINT = (
    "every rank must make the same calls in the same order: none of them may stand under an `if` that "
    "depends on the rank or on one rank's values"
)
#: Number of fields in the detail of a backward pass that identify its batch; models follow.
BATCH = 5
_MODELS_HINT = (
    "let the loss depend on the same models in every batch, on every rank; a model whose output does "
    "not matter can be added with weight 0"
)


class CollectiveCheck:
    """Checks at each collective call of a run that all ranks make the same call; else raises an error."""

    def __init__(
        self,
        heartbeat: Heartbeat,
        group: dist.ProcessGroup | None,
        rendezvous: RankRendezvous,
        first_error: FirstError,
    ) -> None:
        self._heartbeat, self._group = heartbeat, group
        self._rendezvous, self._first_error = rendezvous, first_error

    @contextlib.contextmanager
    def collective(self, kind: str, text: str = "") -> Iterator[list[str]]:
        """Return a context for the collective call named `kind`, such as `run.mean`.

        Ranks first compare which call each of them makes. The context returns the `text` of every rank, one
        line of at most 150 ASCII characters, which is sent with the name of the call.

        Raises:
            MismatchError: if another rank makes a different call.
            PeerError: if another rank has failed.
        """
        if self._group is None:
            yield [text]
            return
        assert len(text) <= _TEXT, "the line of the script stands behind it"
        with self._heartbeat.collective(kind):
            try:
                texts = self._compare(kind, text, self._group)
            except LockstepError as error:
                self._first_error.keep(error)
                raise
            yield texts

    def _compare(self, kind: str, text: str, group: dist.ProcessGroup) -> list[str]:
        place = stacks.users(stacks.of(sys._getframe()))
        try:
            messages = gather_texts(f"{kind}\n{text}\n{place}".encode(), _LENGTH, group)
        except RuntimeError as error:
            why = self._rendezvous.failure_of_others(_SECONDS)
            if why is None:
                raise
            raise PeerError(why) from error
        parts = [message.decode(errors="ignore").split("\n", 2) for message in messages]
        ranks = [
            WaitingRank.of_call(rank, kind, place) for rank, (kind, _, place) in enumerate(parts)
        ]
        own = ranks[dist.get_rank(group)]
        for other in ranks:
            if (difference := mismatch(own, other)) is not None:
                raise difference
        return [text for _, text, _ in parts]


class RankOrder:
    """Implementation of `run.main_process_first`: a `with` body runs on rank 0 before the other ranks."""

    def __init__(self, world: World, store: dist.Store, heartbeat: Heartbeat) -> None:
        self._world, self._store, self._heartbeat = world, store, heartbeat
        self._taken = 0

    @contextlib.contextmanager
    def first(self) -> Iterator[None]:
        """Return a context whose body runs on rank 0 first, then on one rank per node, then on the rest."""
        world = self._world
        self._taken += 1
        prefix = f"first/{self._taken}"
        leader = 0 if world.local_rank == 0 else world.node_rank
        with self._heartbeat.collective("run.main_process_first"):
            try:
                if not world.is_main:
                    self._store.wait([f"{prefix}/{leader}/0"], TIMEOUT)
            except dist.DistError as error:
                raise PeerError(
                    f"the first rank of node {leader} did not leave run.main_process_first() "
                    f"within {TIMEOUT}"
                ) from error
        yield
        self._store.set(f"{prefix}/{world.node_rank}/{world.local_rank}", "done")


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingRank:
    """Record of a rank that waits in a collective call; other ranks compare their own calls with it."""

    rank: int
    looks: int  # number of consecutive readings at which the watchdog found the rank in this call
    place: str  # line of the script in which the rank is
    recent: tuple[Call, ...]  # the rank's latest collective calls; it waits in the last one

    @staticmethod
    def of_call(rank: int, kind: str, place: str) -> WaitingRank:
        """Return the record of rank `rank`, which waits in the collective call `kind` at `place`."""
        return WaitingRank(rank=rank, looks=0, place=place, recent=(Call(0, kind, ()),))

    def dump(self) -> str:
        """Return this record of a waiting rank as JSON, for the key-value store that ranks share."""
        return json.dumps([self.rank, self.looks, self.place, self.recent])

    @staticmethod
    def load(text: str | bytes) -> WaitingRank:
        """Return the record of a waiting rank from the JSON that `dump` returned."""
        rank, looks, place, recent = json.loads(text)
        calls = tuple(Call(number, kind, tuple(detail)) for number, kind, detail in recent)
        return WaitingRank(rank=rank, looks=looks, place=place, recent=calls)

    @property
    def now(self) -> Call:
        """The collective call in which the rank waits."""
        return self.recent[-1]

    def at(self, number: int) -> Call | None:
        """Return the rank's call number `number`; `None` if it is not among the latest calls."""
        return next((call for call in self.recent if call.number == number), None)


def mismatch(own: WaitingRank, other: WaitingRank) -> MismatchError | None:
    """Return an error if two ranks wait in different collective calls; `None` if they may continue to wait.

    Each rank numbers its calls. Let n be the lower of the numbers of the two current calls. If the calls
    number n of the two ranks differ, neither rank can continue. If these calls are equal, the rank with the
    higher number waits for a third rank.
    """
    number = min(own.now.number, other.now.number)
    mine, theirs = own.at(number), other.at(number)
    if own.now[1:] == other.now[1:] or mine is None or theirs is None or mine[1:] == theirs[1:]:
        return None
    if mine.kind == theirs.kind and mine.detail[:BATCH] == theirs.detail[:BATCH]:
        return MismatchError(
            f"rank {own.rank} computes gradients of the run's models {_models(mine)}, "
            f"rank {other.rank} of {_models(theirs)} in the same batch (counted from 0)",
            hint=_MODELS_HINT,
        )
    return MismatchError(
        f"{_described(own, mine)}, {_described(other, theirs)}; expected the same call on all ranks",
        hint=HINT,
    )


def _described(waiting: WaitingRank, call: Call) -> str:
    text = f"rank {waiting.rank} is in {_named(waiting.now)} at {waiting.place}"
    return text if call[1:] == waiting.now[1:] else f"{text}, after {_named(call)}"


def _named(call: Call) -> str:
    if not call.detail:
        return call.kind
    loader, _, _, step, *_ = call.detail
    return f"{call.kind} for batch {step} of loader {loader}"


def _models(call: Call) -> str:
    numbers: Sequence[int] = call.detail[BATCH:]
    return " ".join(map(str, numbers)) or "none"
