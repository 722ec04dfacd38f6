"""Collective check: every call of all ranks begins by comparing which call each rank makes.

Costs one small message per call. The watchdog compares, by the same function, calls that take too long,
and backward passes, which send no message.
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

#: Bytes of a message: kind of the call, and the line of the script.
_LENGTH = 256
#: How long a rank whose peer is gone waits for the reason.
_SECONDS = 1.0
HINT = (
    "every rank must make the same calls in the same order: none of them may stand under an `if` that "
    "depends on the rank or on one rank's values"
)
#: Fields of a backward pass's detail that name its batch; those after them name models.
BATCH = 5
_MODELS_HINT = (
    "let the loss depend on the same models in every batch, on every rank; a model whose output does "
    "not matter can be added with weight 0"
)


class CollectiveCheck:
    """Compares the calls that all ranks make together."""

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
    def collective(self, kind: str) -> Iterator[None]:
        """Compare with all ranks that they are in the call `kind`, whose body follows.

        Raises:
            MismatchError: if another rank is in another call.
        """
        if self._group is None:
            yield
            return
        with self._heartbeat.collective(kind):
            try:
                self._compare(kind, self._group)
            except LockstepError as error:
                self._first_error.keep(error)
                raise
            yield

    def _compare(self, kind: str, group: dist.ProcessGroup) -> None:
        place = stacks.users(stacks.of(sys._getframe()))
        try:
            texts = gather_texts(f"{kind}\n{place}".encode(), _LENGTH, group)
        except RuntimeError as error:
            why = self._rendezvous.failure_of_others(_SECONDS)
            if why is None:
                raise
            raise PeerError(why) from error
        ranks = [WaitingRank.of_call(number, text) for number, text in enumerate(texts)]
        own = ranks[dist.get_rank(group)]
        for other in ranks:
            if (difference := mismatch(own, other)) is not None:
                raise difference


class RankOrder:
    """Runs a body on the main rank first, for `run.main_process_first`."""

    def __init__(self, world: World, store: dist.Store, heartbeat: Heartbeat) -> None:
        self._world, self._store, self._heartbeat = world, store, heartbeat
        self._taken = 0

    @contextlib.contextmanager
    def first(self) -> Iterator[None]:
        """Run the body on the main rank, then on one rank per node, then on all others."""
        world = self._world
        self._taken += 1
        prefix = f"first/{self._taken}"
        mine = f"{prefix}/{world.node_rank}/{world.local_rank}"
        if not world.is_main:
            leader = 0 if world.local_rank == 0 else world.node_rank
            with self._heartbeat.collective("run.main_process_first"):
                try:
                    self._store.wait([f"{prefix}/{leader}/0"], TIMEOUT)
                except dist.DistError as error:
                    raise PeerError(
                        f"the first rank of node {leader} did not leave run.main_process_first() "
                        f"within {TIMEOUT}"
                    ) from error
        else:
            self._heartbeat.enter("run.main_process_first")
            self._heartbeat.leave()
        yield
        self._store.set(mine, "done")


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingRank:
    """A rank that waits in a collective call.

    Attributes:
        looks: how often in a row the watchdog has seen it there.
        place: the line of its script.
        recent: its latest calls; it is in the last one.
    """

    rank: int
    looks: int
    place: str
    recent: tuple[Call, ...]

    @staticmethod
    def of_call(rank: int, text: bytes) -> WaitingRank:
        """Return a rank in its one call, given as the kind, a line feed, and the line of the script."""
        kind, _, place = text.decode(errors="ignore").partition("\n")
        return WaitingRank(rank=rank, looks=0, place=place, recent=(Call(0, kind, ()),))

    def dump(self) -> str:
        """Return the rank as JSON."""
        return json.dumps([self.rank, self.looks, self.place, self.recent])

    @staticmethod
    def load(text: str | bytes) -> WaitingRank:
        """Return the rank that `dump` has written."""
        rank, looks, place, recent = json.loads(text)
        calls = tuple(Call(number, kind, tuple(detail)) for number, kind, detail in recent)
        return WaitingRank(rank=rank, looks=looks, place=place, recent=calls)

    @property
    def now(self) -> Call:
        """The call that the rank waits in."""
        return self.recent[-1]

    def at(self, number: int) -> Call | None:
        """Return call number `number`, if that is one of the latest."""
        return next((call for call in self.recent if call.number == number), None)


def mismatch(own: WaitingRank, other: WaitingRank) -> MismatchError | None:
    """Return the error of two ranks that wait in different calls; `None` if they may still continue.

    A rank waits in its call for all others. Where the latest calls differ, and so do those of the same
    number, which the slower rank is in, neither can continue. Where the calls of that number agree, one
    rank is only further, and waits for a third.
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
