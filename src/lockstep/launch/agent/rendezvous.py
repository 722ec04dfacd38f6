"""Rendezvous of launchers: one on the loopback interface, or several over the network.

Every generation has a store of its own, on a port that the system chooses. Workers of one generation
never see keys of another, not even scripts that know nothing of generations: torchrun 2.13 keeps one
store, and Gloo then hangs on addresses of the dead.

    round 1: generations 0, 1, 2   a launcher comes, or is gone   round 2: generation 3 …
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

from torch.distributed import TCPStore

from lockstep.launch.nodes.client import CoordinatorClient, RoundOverError
from lockstep.launch.nodes.config import port_taken
from lockstep.launch.nodes.coordinator import Policy
from lockstep.launch.nodes.membership import Membership
from lockstep.launch.nodes.membership_rounds import Rounds
from lockstep.launch.plan import Generation
from lockstep.world import network
from lockstep.world.rendezvous.store import host_store
from lockstep.world.waiting import Check, go_on

_HOST_HINT = (
    "launchers that meet in a shared directory survive it: --rdzv-endpoint file:///DIRECTORY"
)


class GenerationRendezvous:
    """Brings this launcher, alone or with others, from one generation to the next.

    Args:
        rounds: of the launchers' rendezvous; `None` for a single launcher.
        port: where this launcher hosts each generation's store; 0 for a port that the system chooses.
        policy: which failures are followed by new workers, if this launcher decides for several.
    """

    def __init__(
        self,
        common: Generation,
        ranks: int,
        rounds: Rounds | None = None,
        port: int = 0,
        policy: Policy = lambda _: None,
    ) -> None:
        self._common = common
        self._port = port
        self._rounds = rounds
        self._alone = Membership.alone(ranks)
        self._policy = policy
        #: Of this generation, where this launcher hosts it.
        self._store: TCPStore | None = None
        #: The other launchers, while a round continues; `None` for a launcher that is alone.
        self.coordinator: CoordinatorClient | None = None
        #: Number of this generation; -1 before the first.
        self.generation = -1

    @property
    def membership(self) -> Membership:
        """The launchers of this round."""
        return self._alone if self._rounds is None else self._rounds.membership

    @property
    def may_leave(self) -> bool:
        """Whether the others continue without this launcher."""
        return self._rounds is not None and not self._rounds.fixed and self.membership.count > 1

    def next_generation(self, check: Check = go_on) -> Generation:
        """Open the store of the next generation, with which the one before ends.

        Args:
            check: called again and again while others are waited for.

        Raises:
            RoundOverError: if the launch ends instead.
            WorldError: if another rendezvous fails.
        """
        self._store = None
        if self._rounds is None:
            self.generation += 1
            port = self._open_store()
        else:
            port = self._enter(self._rounds, check)
        return replace(
            self._common,
            number=self.generation,
            membership=self.membership,
            port=port,
            replicas=None if self._rounds is None else self._rounds.replicas,
        )

    def _open_store(self) -> int:
        """Open a store; return its port, 0 if workers do not need one."""
        if not self._common.listens:
            return 0
        try:
            self._store = host_store(
                self._port, loopback=self.membership.address == network.LOOPBACK
            )
        except OSError as error:
            raise port_taken(self._port, network.reason(error)) from error
        return int(self._store.port)

    def _enter(self, rounds: Rounds, check: Check) -> int:
        """Begin a generation with the others; return the port of its store."""
        while True:
            client = self.coordinator = self._client(rounds)
            self.generation = max(rounds.generation, self.generation + 1)
            try:
                return client.enter(self.generation, self._open_store, check)
            except RoundOverError as over:
                if over.decision.kind != "round":
                    raise

    def _client(self, rounds: Rounds) -> CoordinatorClient:
        """Return the coordinator's client, of the next round if this one is over."""
        client = self.coordinator
        if client is not None:
            decision, lost_coordinator = client.decision, client.has_lost_coordinator
            if decision is None or decision.kind != "round":
                return client
            self._close_round()
            rounds.next(decision.staying, self.generation + 1, lost_coordinator=lost_coordinator)
        return CoordinatorClient(
            rounds.membership,
            rounds.launcher_0,
            number=rounds.number,
            generation=max(rounds.generation, self.generation),
            policy=self._policy,
            least=rounds.least,
            hint=None if rounds.fixed or rounds.survives_host else _HOST_HINT,
        )

    def _close_round(self) -> None:
        if self.coordinator is not None:
            self.coordinator.close()
            self.coordinator = None

    def finish(self) -> None:
        """Leave the others in good order, and end the launch if it is over for all."""
        decision = None if self.coordinator is None else self.coordinator.decision
        self._close_round()
        self._store = None
        over = decision is not None and decision.kind in ("end", "done")
        if over and self._rounds is not None and self.membership.index == 0:
            with contextlib.suppress(RuntimeError):  # the store is gone: the verdict stands
                self._rounds.end()
