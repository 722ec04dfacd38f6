"""Exchange `server`: each parameter server sums one share of every bucket, in a fixed order.

    worker 0 ──┐ nodes of its share ┌── server 0 ──┐ sums of its share ┌── worker 0
    worker 1 ──┴────────────────────┴── server 1 ──┴───────────────────┴── worker 1

The traffic of a server grows with the number of workers. Gradients are summed and not averaged:
`run.backward` has weighted each replica's loss.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch

from lockstep.engine.exchange.base import Forest, ScratchExchange, Sum, future_on
from lockstep.engine.layout.replicas import share
from lockstep.engine.parameter_server.client import Client, Clients
from lockstep.engine.parameter_server.messages import DTYPES, Kind


@dataclass(frozen=True, slots=True)
class _Pending:
    """A bucket of gradients that was sent to the servers, but whose sum has not been received."""

    number: int
    like: torch.Tensor
    future: Sum


class ServerExchange(ScratchExchange):
    """Exchange that sends buckets of gradients to the parameter servers, which sum them.

    A bucket is sent as soon as it is complete, while the backward pass computes the next one. The call of
    `start` for the last bucket waits for all sums.
    """

    def __init__(self, clients: Clients, forest: Forest) -> None:
        super().__init__(forest)
        self._clients = clients
        self._pending: deque[_Pending] = deque()
        self._number = 0

    def start(self, slots: list[torch.Tensor], *, last: bool, place: int = 0) -> Sum:
        """Send each server its share of `slots`, this rank's sums; return a future of the total.

        `last` and `place` are as in `Exchange.start`.
        """
        self._number += 1
        future = future_on(slots[0].device)
        nodes = [slot.cpu() for slot in slots]
        tag = DTYPES.index(slots[0].dtype)
        for client, part in self._shares(slots[0].numel()):
            parts = [node[part.start : part.stop] for node in nodes]
            client.send(Kind.PUSH, parts, tag=tag, number=self._number, place=place)
        self._pending.append(_Pending(self._number, slots[0], future))
        if last:
            self._finish()
        return future

    def _shares(self, numel: int) -> list[tuple[Client, range]]:
        """Return, for a bucket of `numel` elements, each server's connection and range of elements.

        Servers without elements are left out.
        """
        clients = self._clients.all
        shares = [share(numel, len(clients), index) for index in range(len(clients))]
        return [(client, part) for client, part in zip(clients, shares, strict=True) if part]

    def _finish(self) -> None:
        while self._pending:
            pending = self._pending.popleft()
            numel = pending.like.numel()
            host = torch.empty(0, dtype=pending.like.dtype)
            total = self._scratch.take(host, numel)
            for client, part in self._shares(numel):
                answer = client.receive(Kind.SUM, total[part.start : part.stop])
                if answer.header.number != pending.number:
                    seen, expected = answer.header.number, pending.number
                    raise client.strange(
                        f"sends the sum of bucket {seen}; expected bucket {expected}"
                    )
            pending.future.set_result(total.to(pending.like.device))
        self._scratch.pass_ends()

    def close(self) -> None:
        """Close the connections to the servers."""
        self._clients.close()
