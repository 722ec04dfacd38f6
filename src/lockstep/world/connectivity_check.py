"""The survey before a launch: every member tries to reach the others, so that none waits for one later.

The members already meet at a store; that says nothing of the ways between them, which collectives
take. Each opens a listener and posts a card with its interfaces; each tries the others' addresses, and
knows by a token whether the right one answered (172.17.0.1 exists on every host with Docker); each
reports. Member 0 draws the conclusion, the same for all: an interface for each member at which all
others reach it, or which member cannot reach which, and how that failed.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lockstep.errors import LockstepError, UnreachableError
from lockstep.world.network import Interface, interface_towards, interfaces, named
from lockstep.world.probe import Outcome, Prober, Target
from lockstep.world.reachability import (
    Attempt,
    Card,
    Reach,
    Report,
    choose,
    offers,
    problem,
    shown,
)
from lockstep.world.waiting import Check, await_any, go_on

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["Reach", "survey"]

#: Seconds of a first look, which is enough unless a way fails: an interface that leads nowhere would
#: otherwise cost every launch the time until it is given up.
_QUICK = 0.5
#: Members may come to the survey as far apart: all have met by then, but one may be slow, or stopped.
_PATIENCE = 30.0
#: How much longer the others wait for member 0's answer than member 0 waits for them.
_SLACK = 1.5
#: Up to as many members, every pair is tried.
_ALL_PAIRS = 64
_LARGEST = 1 << 22  # bytes of an entry
_HINT = (
    "--interface NAME (or LOCKSTEP_INTERFACE) chooses another interface on a node; look for a firewall "
    "between the two; containers on several hosts need an overlay network or the host's: "
    "docs/manual/several-machines.md"
)


def survey(
    store: dist.Store,
    *,
    index: int,
    labels: Sequence[str],
    interface: str | None = None,
    seconds: float = 3.0,
    patience: float | None = None,
    check: Check = go_on,
) -> tuple[Reach, ...]:
    """Return for each member the interface and address at which all others reach it.

    With more than 64 members, each tries member 0 and those at distances that are powers of two.

    Args:
        store: a store that all members reach, used for this alone: a fresh prefix every time.
        index: which member this is.
        labels: what to call each member in messages, the same everywhere.
        interface: the only one that this member offers; all of them by default.
        seconds: how long an attempt may take.
        patience: how long a member may keep the others waiting, in seconds; 30 by default.
        check: called again and again meanwhile; may raise to end it.

    Raises:
        UnreachableError: on every member the same, if two cannot reach each other, or one did not come.
        UsageError: if this member has no such interface; the others are told.
    """
    with Prober() as prober:
        patience = _PATIENCE if patience is None else patience
        member = _Member(store, prober, index, labels, seconds, patience, check)
        return member.survey(interface)


def partners(index: int, count: int) -> list[int]:
    """Return the members that member `index` of `count` tries to reach, in order."""
    if count <= _ALL_PAIRS:
        return [other for other in range(count) if other != index]
    distances = [1 << power for power in range((count - 1).bit_length())]
    return sorted(({0} | {(index + step) % count for step in distances}) - {index})


class _Member:
    """One member's part in a survey."""

    def __init__(
        self,
        store: dist.Store,
        prober: Prober,
        index: int,
        labels: Sequence[str],
        seconds: float,
        patience: float,
        check: Check,
    ) -> None:
        self._board = _Board(store, labels[index], check)
        self._prober = prober
        self._index = index
        self._labels = labels
        self._seconds = seconds
        self._patience = patience
        self._own = interfaces()
        self._sources: dict[str, str] = {}

    @property
    def _everybody(self) -> range:
        return range(len(self._labels))

    def survey(self, interface: str | None) -> tuple[Reach, ...]:
        self._introduce(interface)
        if self._index == 0:
            self._board.post("cards", self._collect_cards())
        cards = [Card.parse(told) for told in self._heed("cards", self._patience)]
        for number, seconds in enumerate((min(_QUICK, self._seconds), self._seconds)):
            report = self._try_others(cards, seconds)
            self._board.post(f"report/{number}/{self._index}", [one.plain() for one in report])
            if self._index == 0:
                last = seconds == self._seconds
                conclusion = self._conclude(number, cards, seconds, last=last)
                self._board.post(f"conclusion/{number}", conclusion)
            found = self._heed(f"conclusion/{number}", seconds + self._patience)
            if found:
                return tuple(Reach(name, address) for name, address in found)
        raise AssertionError("the second conclusion is the last")

    def _introduce(self, interface: str | None) -> None:
        try:
            offered = offers(self._own) if interface is None else (named(interface),)
        except LockstepError as error:
            self._board.post(f"card/{self._index}", {"error": error.message})
            if self._index == 0:
                self._board.post("cards", {"error": f"{self._labels[0]}: {error.message}"})
            self._part()
            raise
        card = Card(self._prober.token, self._prober.port, offered)
        self._board.post(f"card/{self._index}", card.plain())

    def _part(self) -> None:
        """Say that this member goes; member 0, with whom the store may go, lets the others go first."""
        with contextlib.suppress(UnreachableError):  # there is something worse to tell
            self._board.post(f"heard/{self._index}", True)
            if self._index == 0:
                self._board.gather([f"heard/{one}" for one in self._everybody], _SLACK)

    def _collect_cards(self) -> dict[str, Any]:
        """Return the cards of all, or what is wrong with them."""
        told = self._board.gather([f"card/{one}" for one in self._everybody], self._patience)
        missing = [label for label, card in zip(self._labels, told, strict=True) if card is None]
        if missing:
            return {
                "error": f"{', '.join(missing)} met the others, but did not come to try the network "
                f"within {self._patience:g} s; expected all {len(told)} nodes"
            }
        for label, card in zip(self._labels, told, strict=True):
            wrong = _complaint(card)
            if wrong:
                return {"error": f"{label}: {wrong}"}
        return {"answer": told}

    def _try_others(self, cards: Sequence[Card], seconds: float) -> Report:
        others = partners(self._index, len(cards))
        # First everybody's best interface: of very many, not all are tried at once.
        places = sorted(
            (offer, other) for other in others for offer in range(len(cards[other].offers))
        )
        targets = [Target(cards[o].offers[k].address, cards[o].port) for k, o in places]
        outcomes = self._prober.probe(targets, seconds)
        return [
            self._attempt(other, offer, target.address, outcome, cards)
            for (offer, other), target, outcome in zip(places, targets, outcomes, strict=True)
        ]

    def _attempt(
        self, other: int, offer: int, address: str, outcome: Outcome, cards: Sequence[Card]
    ) -> Attempt:
        failure = outcome.failure or ""
        if outcome.token is not None and outcome.token != cards[other].token:
            failure = f"answered by {self._whose(outcome.token, cards)}"
        if failure and any(one.address == address for one in self._own):
            failure = f"{self._labels[self._index]} has that address itself"
        return Attempt(other, offer, self._source(address), failure)

    def _whose(self, token: str, cards: Sequence[Card]) -> str:
        known = (
            label for label, card in zip(self._labels, cards, strict=True) if card.token == token
        )
        return next(known, "another launch")

    def _source(self, address: str) -> str:
        """Return where the way to `address` begins, in words."""
        if address not in self._sources:
            leaving: Interface | None = interface_towards(address, self._own)
            self._sources[address] = "" if leaving is None else shown(leaving)
        return self._sources[address]

    def _conclude(
        self, number: int, cards: Sequence[Card], seconds: float, *, last: bool
    ) -> dict[str, Any]:
        """Return an interface for each member, nothing yet, or what is wrong."""
        keys = [f"report/{number}/{one}" for one in self._everybody]
        told = self._board.gather(keys, seconds + self._patience)
        missing = [label for label, one in zip(self._labels, told, strict=True) if one is None]
        if missing:
            return {"error": f"{', '.join(missing)} left while the network was tried"}
        try:
            reports = [[Attempt.parse(one, cards) for one in report] for report in told]
        except (TypeError, ValueError):
            return {"error": "a report of what was tried cannot be read; expected one launch here"}
        chosen = choose(cards, reports)
        if chosen is None and last:
            return {"error": problem(cards, reports, self._labels)}
        return {"answer": [[one.interface, one.address] for one in chosen or ()]}

    def _heed(self, key: str, seconds: float) -> Any:
        """Wait for what member 0 says, and do so."""
        (told,) = self._board.gather([key], seconds + _SLACK)
        if told is None:
            raise UnreachableError(
                f"{self._labels[0]} left, or did not come, while the network was tried", hint=_HINT
            )
        if "error" in told:
            self._part()
            raise UnreachableError(told["error"], hint=_HINT)
        return told["answer"]


def _complaint(card: Any) -> str:
    """Return what is wrong on the side of a card's member; empty if nothing is."""
    if isinstance(card, dict) and isinstance(card.get("error"), str):
        return str(card["error"])
    try:
        Card.parse(card)
    except ValueError:
        return "what it said of itself cannot be read; expected one launch here"
    return ""


class _Board:
    """JSON entries in a store, read with bounds on time and size."""

    def __init__(self, store: dist.Store, label: str, check: Check) -> None:
        self._store = store
        self._label = label
        self._check = check

    def post(self, key: str, value: Any) -> None:
        try:
            self._store.set(key, json.dumps(value))
        except RuntimeError as error:
            raise self._lost(error) from error

    def gather(self, keys: list[str], seconds: float) -> list[Any]:
        """Return the entries of all keys, `None` for those that are not there after `seconds`."""
        try:
            await_any(self._store, [keys], seconds, self._check)
            return [self._read(key) for key in keys]
        except RuntimeError as error:
            raise self._lost(error) from error

    def _read(self, key: str) -> Any:
        if not self._store.check([key]):
            return None
        text = self._store.get(key)
        try:
            return json.loads(text if len(text) <= _LARGEST else b"")
        except (ValueError, RecursionError):
            return {"error": f"{key} is {len(text)} bytes that cannot be read"}

    def _lost(self, error: Exception) -> UnreachableError:
        why = str(error).partition("\n")[0]
        return UnreachableError(
            f"{self._label} lost the store at which the nodes meet: {why}", hint=_HINT
        )
