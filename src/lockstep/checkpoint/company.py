"""What the ranks tell each other about a checkpoint: who can write it, that it is there, or why not.

They talk through the store, from threads of their own, so nothing here waits inside the store.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from lockstep.checkpoint.disk_errors import explained
from lockstep.errors import CheckpointError, PeerError
from lockstep.world.waiting import await_any

if TYPE_CHECKING:
    import torch.distributed as dist

#: How long the main rank waits for the others to hear that a checkpoint is there.
_LINGER_SECONDS = 5.0


class DroppedError(Exception):
    """Nobody waits for the checkpoint any more."""


class Company:
    """The ranks of a run, as one of them hears them.

    Args:
        store: a store that these ranks use for nothing else; `None` for one rank.
        rank: which rank this is.
        size: number of ranks.
        patience: seconds without any news after which somebody is missing.
    """

    def __init__(self, store: dist.Store | None, *, rank: int, size: int, patience: float) -> None:
        self.rank = rank
        self.size = size
        self.patience = patience
        self._dropped = threading.Event()
        # A client of its own: the main thread's may be busy waiting.
        self._store = None if store is None else store.clone()  # type: ignore[attr-defined]

    def drop(self) -> None:
        """End whatever waits."""
        self._dropped.set()

    def check(self) -> None:
        """Raise if nobody waits any more.

        Raises:
            DroppedError: if `drop` was called.
        """
        if self._dropped.is_set():
            raise DroppedError

    def meet(self, make: Callable[[], str], sees: Callable[[str], bool]) -> tuple[str, list[int]]:
        """Agree on the writers; return a token, and the ranks that see what the main rank made.

        Args:
            make: makes something where checkpoints are and returns its name; called on the main rank.
            sees: whether a rank sees it.

        Raises:
            CheckpointError: if the main rank cannot write there, or a rank does not come.
        """
        if self._store is None:
            return make(), [0]
        if self.rank == 0:
            return self._invite(self._store, make)
        self._await(self._store, ["token"], "rank 0")
        token = str(json.loads(self._store.get("token")))
        self._store.set(f"sees/{self.rank}", json.dumps(sees(token)))
        self._await(self._store, ["writers"], "rank 0")
        writers = json.loads(self._store.get("writers"))
        if isinstance(writers, str):
            raise CheckpointError(f"rank 0 cannot write checkpoints: {writers}")
        return token, writers

    def _invite(self, store: dist.Store, make: Callable[[], str]) -> tuple[str, list[int]]:
        token, writers = "", [0]
        said: list[int] | str = "it ended"
        try:
            token = make()
            store.set("token", json.dumps(token))
            others = range(1, self.size)
            self._await(store, [f"sees/{rank}" for rank in others], "sees/")
            writers += [rank for rank in others if json.loads(store.get(f"sees/{rank}"))]
            said = writers
        except Exception as error:
            said = explained(error).message
            raise
        finally:
            # The others are told in any case: they wait.
            store.set("token", json.dumps(token))
            store.set("writers", json.dumps(said))
        return token, writers

    def fail(self, serial: int, error: CheckpointError) -> None:
        """Tell the others why the `serial`-th checkpoint cannot be written, unless they know."""
        key = f"{serial}/failed"
        if self._store is None or self._store.check([key]):
            return
        told = {"rank": self.rank, "reason": error.message, "hint": error.hint}
        self._store.set(key, json.dumps(told))

    def done(self, serial: int) -> None:
        """Tell the others that the checkpoint is there; return when they have heard."""
        if self._store is None:
            return
        heard = [f"{serial}/heard/{rank}" for rank in range(1, self.size)]
        # With the store, those who would hear it are gone; and the checkpoint is there.
        with contextlib.suppress(RuntimeError):
            self._store.set(f"{serial}/done", "")
            await_any(self._store, [heard], _LINGER_SECONDS, self.check)

    def news(self, serial: int) -> CheckpointError | None:
        """Return why somebody cannot write the checkpoint, if that has happened."""
        if self._store is None or not self._store.check([f"{serial}/failed"]):
            return None
        told = json.loads(self._store.get(f"{serial}/failed"))
        return CheckpointError(f"rank {told['rank']}: {told['reason']}", hint=told["hint"])

    def look(self, serial: int) -> None:
        """Look whether somebody has failed.

        Raises:
            CheckpointError: naming who, and why.
            DroppedError: if nobody waits any more.
        """
        self.check()
        if (news := self.news(serial)) is not None:
            raise news

    def follow(self, serial: int, alive: Callable[[], bool]) -> None:
        """Wait until the main rank says that the checkpoint is there.

        Args:
            serial: which checkpoint.
            alive: whether the main rank may still be at it; asked now and then.

        Raises:
            CheckpointError: if somebody failed.
            PeerError: if the main rank is not there any more.
        """
        store, wanted = self._store, [[f"{serial}/failed"], [f"{serial}/done"]]
        assert store is not None, "one rank has nobody to follow"
        while (news := await_any(store, wanted, 1.0, self.check)) is None:
            if not alive():
                raise PeerError("rank 0 left while it wrote a checkpoint")
        if news == 0:
            self.look(serial)
        store.set(f"{serial}/heard/{self.rank}", "")

    def _await(self, store: dist.Store, keys: list[str], who: str) -> None:
        if await_any(store, [keys], self.patience, self.check) is None:
            missing = [key for key in keys if not store.check([key])]
            names = ", ".join(f"rank {key.removeprefix(who)}" for key in missing)
            raise CheckpointError(
                f"{names if who.endswith('/') else who} did not come within {self.patience:g} s "
                "to write a checkpoint together",
                hint="all ranks have to save at the same step",
            )
