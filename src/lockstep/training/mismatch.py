"""What ranks that wait tell each other, and whether they wait for each other in vain."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.errors import MismatchError
from lockstep.training.collective_check import HINT
from lockstep.training.heartbeat import Call

#: Fields of a backward pass's detail that say which batch it belongs to; the models follow.
BATCH = 5
_MODELS_HINT = (
    "let the loss depend on the same models in every batch, on every rank; a model whose output does "
    "not matter can be added with weight 0"
)


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
    the slower one has come to, neither can go on. One that waits in another call because it has got
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
    return text if call == waiting.now else f"{text}, after {_what(call)}"


def _what(call: Call) -> str:
    if not call.detail:
        return call.kind
    loader, _, _, step, *_ = call.detail
    return f"{call.kind} for batch {step} of loader {loader}"


def _models(call: Call) -> str:
    numbers: Sequence[int] = call.detail[BATCH:]
    return " ".join(map(str, numbers)) or "none"
