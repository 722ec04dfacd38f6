"""Launcher 0's look at the rendezvous store: launchers that have joined, and that have lost it."""

from __future__ import annotations

import contextlib
import threading
import time

from lockstep.errors import WorldError
from lockstep.launch.nodes.keys import Card, RendezvousKeys
from lockstep.launch.nodes.server import CoordinatorServer

_LOOK_SECONDS = 0.5


class StoreWatch:
    """A thread of launcher 0 that reads the store during a round, and just before: others may ask then.

    `room` is how many more launchers may take part.
    """

    def __init__(
        self, keys: RendezvousKeys, number: int, server: CoordinatorServer, *, room: int
    ) -> None:
        self._keys, self._number, self._server, self._room = keys, number, server, room
        self._answered = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lockstep-watch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(_LOOK_SECONDS):
            # A shared directory may be out of reach for a while: the round continues meanwhile.
            with contextlib.suppress(RuntimeError, OSError, ValueError, WorldError):
                self._look()

    def _look(self) -> None:
        # A launcher whose own thread is stuck gives no answer: another round begins without it.
        lost = (
            [] if self._server.is_silent else self._keys.answer_losses(self._number, self._answered)
        )
        self._answered += len(lost)
        superseded = self._keys.newest()[0] > self._number
        waiting: list[Card] = []
        with contextlib.suppress(WorldError):  # a newcomer has another Lockstep
            waiting = self._keys.cards(self._number + 1)[: self._room] if self._room else []
        with self._server.locked(self._number) as coordinator:
            if coordinator is None:
                return
            if superseded:
                coordinator.supersede()
            coordinator.note(lost, [card.launcher.name for card in waiting], time.monotonic())

    def close(self) -> None:
        """Stop watching."""
        self._stop.set()
        self._thread.join(2 * _LOOK_SECONDS)
