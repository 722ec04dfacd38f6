"""Collective check: every call of all ranks begins by comparing which call each rank makes.

Costs one small message per call. Backward passes, which happen in every step, don't ask: the watchdog
compares them when they take too long.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from lockstep.engine.exchange.scatter import gather_texts
from lockstep.engine.training.heartbeat import Call, Heartbeat
from lockstep.errors import LockstepError, MismatchError, PeerError
from lockstep.state.record import stacks
from lockstep.world.model import World
from lockstep.world.rendezvous.rank_rendezvous import RankRendezvous
from lockstep.world.rendezvous.store import TIMEOUT

#: Bytes in which a rank says what it is in.
_LENGTH = 256
#: How long a rank whose peer is gone waits to hear why.
_SECONDS = 1.0
HINT = (
    "every rank must make the same calls in the same order: none of them may stand under an `if` that "
    "depends on the rank or on one rank's values"
)
#: Fields of a backward pass's detail that say which batch it belongs to; the models follow.
BATCH = 5
_MODELS_HINT = (
    "let the loss depend on the same models in every batch, on every rank; a model whose output does "
    "not matter can be added with weight 0"
)


class CollectiveCheck:
    """The calls of this rank that all ranks make together.

    Args:
        heartbeat: where this rank stands.
        group: the process group, or `None` for a single rank.
        rendezvous: rendezvous of the ranks, with the errors of those that have ended.

    Attributes:
        fails: called with the error where ranks do not make the same call.
    """

    def __init__(
        self, heartbeat: Heartbeat, group: dist.ProcessGroup | None, rendezvous: RankRendezvous
    ) -> None:
        self._heartbeat, self._group, self._rendezvous = heartbeat, group, rendezvous
        self.fails: Callable[[BaseException], None] = _ignore

    @contextlib.contextmanager
    def collective(self, kind: str) -> Iterator[None]:
        """Come to the call `kind` with all ranks, and do in the body what it takes.

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
                self.fails(error)
                raise
            yield

    def _compare(self, kind: str, group: dist.ProcessGroup) -> None:
        place = stacks.users(stacks.of(sys._getframe()))
        try:
            told = gather_texts(f"{kind}\n{place}".encode(), _LENGTH, group)
        except RuntimeError as error:
            why = self._rendezvous.failure_of_others(_SECONDS)
            if why is None:
                raise
            raise PeerError(why) from error
        check([one.decode(errors="ignore") for one in told], dist.get_rank(group))


def _ignore(_error: BaseException) -> None:
    """What is done with an error before the run's loop is there."""


class RankOrder:
    """The ranks of a run, one after the other.

    Args:
        world: rank and rendezvous of this process.
        store: where ranks leave notes for each other.
        heartbeat: where this rank says that it waits.
    """

    def __init__(self, world: World, store: dist.Store, heartbeat: Heartbeat) -> None:
        self._world, self._store, self._heartbeat = world, store, heartbeat
        self._taken = 0

    @contextlib.contextmanager
    def first(self) -> Iterator[None]:
        """Let the main rank go first, then one rank per node, then all others."""
        world = self._world
        self._taken += 1
        prefix = f"first/{self._taken}"
        mine = f"{prefix}/{world.node_rank}/{world.local_rank}"
        if not world.is_main:
            leader = 0 if world.local_rank == 0 else world.node_rank
            with self._heartbeat.collective("run.main_process_first"):
                self._wait(f"{prefix}/{leader}/0", leader)
        else:
            self._heartbeat.pass_by("run.main_process_first")
        yield
        self._store.set(mine, "done")

    def _wait(self, key: str, node: int) -> None:
        try:
            self._store.wait([key], TIMEOUT)
        except dist.DistError as error:
            raise PeerError(
                f"the first rank of node {node} did not leave run.main_process_first() within {TIMEOUT}"
            ) from error


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


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingRank:
    """A rank that stands still in a call that all ranks make.

    Attributes:
        rank: which one.
        looks: how often it has been seen there in a row.
        place: the line of its script.
        recent: the calls that it has come to; it is in the last one.
    """

    rank: int
    looks: int
    place: str
    recent: tuple[Call, ...]

    def dump(self) -> str:
        """Return it as text."""
        return json.dumps([self.rank, self.looks, self.place, self.recent])

    @staticmethod
    def load(text: str | bytes) -> WaitingRank:
        """Return what `dump` has made text of."""
        rank, looks, place, recent = json.loads(text)
        calls = tuple(Call(number, kind, tuple(detail)) for number, kind, detail in recent)
        return WaitingRank(rank=rank, looks=looks, place=place, recent=calls)

    @property
    def now(self) -> Call:
        """The call that it is in."""
        return self.recent[-1]

    def at(self, number: int) -> Call | None:
        """Return its call `number`, if that is still known."""
        return next((call for call in self.recent if call.number == number), None)


def mismatch(own: WaitingRank, other: WaitingRank) -> MismatchError | None:
    """Return why two ranks that wait do so in vain; `None` where they don't, as far as one can tell.

    Each waits for all others in its own call. Where the calls differ now, and differed at the place that
    the slower one has come to, neither can continue. One that waits in another call because it has got
    there by the same way is only further, and waits for a third rank.
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
        f"{_tell(own, mine)}, {_tell(other, theirs)}; expected the same call on all ranks",
        hint=HINT,
    )


def _tell(waiting: WaitingRank, call: Call) -> str:
    text = f"rank {waiting.rank} is in {_what(waiting.now)} at {waiting.place}"
    return text if call[1:] == waiting.now[1:] else f"{text}, after {_what(call)}"


def _what(call: Call) -> str:
    if not call.detail:
        return call.kind
    loader, _, _, step, *_ = call.detail
    return f"{call.kind} for batch {step} of loader {loader}"


def _models(call: Call) -> str:
    numbers: Sequence[int] = call.detail[BATCH:]
    return " ".join(map(str, numbers)) or "none"
