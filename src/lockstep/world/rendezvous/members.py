"""`Members`: numbered processes that gather a value of each, and get one result from member 0.

The processes use a store together. They may be ranks, launchers, or one process per node.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

from lockstep.errors import LockstepError, WorldError
from lockstep.world.waiting import Check, await_any, go_on

if TYPE_CHECKING:
    import torch.distributed as dist

#: Seconds that other members wait for the result longer than member 0 waits for their values.
_SLACK = 15.0
#: Seconds that member 0, which may host the store, waits until all members have read an error.
_LINGER_SECONDS = 3.0
_PAUSE = 0.005


@dataclass(frozen=True, slots=True)
class Members:
    """Numbered processes that gather a value of each over a store, and get one result from member 0.

    Attributes:
        store: a store for this object alone.
        index: number of this process, from 0.
        labels: names of the members, by index, in messages.
        kind: class of the errors that the methods raise.
        hint: hint of the error if a member is missing.
        check: called repeatedly during waits; may raise to end them.
    """

    store: dist.Store
    index: int
    labels: Sequence[str]
    _: KW_ONLY
    kind: type[WorldError] = WorldError
    hint: str
    check: Check = go_on

    def ask(
        self, question: str, own: Any, answer: Callable[[list[Any]], Any], seconds: float
    ) -> Any:
        """Gather the value `own` of each member; return the result of `answer` on all members.

        All members call this method, with a `question` (a key of the store) that no other call uses, and
        with JSON values. Only member 0 calls `answer`, with the list of values by member; `None` stands for
        a member that wrote none within `seconds`. If `answer` raises a `LockstepError`, all members get the
        error.

        Raises:
            WorldError: of class `kind`; the same on all members.
        """
        try:
            self.store.set(f"{question}/{self.index}", json.dumps(own))
            if self.index == 0:
                self._answer(question, answer, seconds)
            patience = seconds + _SLACK
            if await_any(self.store, [[f"{question}/answer"]], patience, self.check) is None:
                raise self.kind(
                    f"{self.labels[0]} did not answer within {patience:g} s", hint=self.hint
                )
            found = json.loads(self.store.get(f"{question}/answer"))
            if "error" in found:
                self._linger(question)
        except RuntimeError as error:
            why = str(error).partition("\n")[0]
            raise self.kind(
                f"{self.labels[0]} is gone, or the store is: {why}", hint=self.hint
            ) from error
        if "error" in found:
            raise self.kind(found["error"], hint=found["hint"])
        return found["answer"]

    def refuse(self, question: str, error: LockstepError) -> None:
        """Let `ask` raise `error` on all members for `question`, unless a result exists already."""
        self._post(question, {"error": error.message, "hint": error.hint})

    def read(self, question: str, index: int) -> Any:
        """Return the value that member `index` gave to `ask` for this `question`; `None` if none yet.

        Raises:
            WorldError: if the value is invalid JSON.
        """
        if not self.store.check([f"{question}/{index}"]):
            return None
        try:
            return json.loads(self.store.get(f"{question}/{index}"))
        except (ValueError, RecursionError):
            raise self._unreadable(self.labels[index]) from None

    def _answer(self, question: str, answer: Callable[[list[Any]], Any], seconds: float) -> None:
        members = range(len(self.labels))
        keys = [f"{question}/{index}" for index in members]
        if await_any(self.store, [[f"{question}/answer"], keys], seconds, self.check) == 0:
            return  # an error
        try:
            found = {"answer": answer([self.read(question, index) for index in members])}
        except LockstepError as error:
            self.refuse(question, error)
        except (AttributeError, KeyError, IndexError, TypeError, ValueError):
            self.refuse(question, self._unreadable("a member"))
        else:
            self._post(question, found)

    def _post(self, question: str, answer: dict[str, Any]) -> None:
        if self.store.add(f"{question}/answers", 1) == 1:
            self.store.set(f"{question}/answer", json.dumps(answer))

    def _unreadable(self, label: str) -> WorldError:
        text = f"the value of {label} cannot be read; expected one launch here"
        return self.kind(text, hint=self.hint)

    def _linger(self, question: str) -> None:
        self.store.add(f"{question}/heard", 1)
        if self.index > 0:
            return
        keys = (f"{question}/{index}" for index in range(len(self.labels)))
        came = sum(self.store.check([key]) for key in keys)
        deadline = time.monotonic() + _LINGER_SECONDS
        while self.store.add(f"{question}/heard", 0) < came and time.monotonic() < deadline:
            time.sleep(_PAUSE)
