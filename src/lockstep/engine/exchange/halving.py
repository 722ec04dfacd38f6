"""`HalvingExchange`: all-reduce by recursive halving and doubling, in the order of the reduction tree.

The sum is over 2^k members (ranks of different hosts), if the replicas of each member are one subtree, and
all subtrees have equal size. In round i a member exchanges half of its remaining elements with the member
whose number differs in bit i, and adds the received half to the half that it has kept: the two members'
sums belong to neighbouring subtrees. After k rounds each member has the total of one share of the elements,
and in k more rounds all members get all shares. So 2 k messages replace the 2 (2^k - 1) of `TreeExchange`,
with as many bytes (Thakur, Rabenseifner and Gropp 2005, "Optimization of collective communication
operations in MPICH").
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch

from lockstep.engine.exchange.base import Forest, ScratchExchange, Sum, future_on
from lockstep.engine.exchange.tree import Work
from lockstep.engine.layout.halving import is_possible


class PairWire(Protocol):
    """Interface to exchange messages between two ranks; the ranks that sum are numbered from 0."""

    def swap(self, other: int, outgoing: torch.Tensor, incoming: torch.Tensor) -> Work:
        """Begin to send `outgoing` to the rank with number `other`, and to receive `incoming` from it."""


class HalvingExchange(ScratchExchange):
    """All-reduce over N ranks in 2 log2(N) rounds, whose additions are those of the reduction tree.

    Each call of `start` begins the sum of a bucket (flat tensor of gradients), and advances the sums of
    earlier buckets by a round. The call with `last=True` waits for all sums. So all ranks send their
    messages in the same order.
    """

    sent = 0

    def __init__(self, wire: PairWire, forest: Forest) -> None:
        assert is_possible(forest.blocks, forest.replicas), (
            "members are not 2^k equal nodes of the tree"
        )
        super().__init__(forest, divisor=forest.size)  # so that each round can halve a slot
        self._wire = wire
        self._open: list[Iterator[None]] = []

    def start(self, slots: list[torch.Tensor], *, last: bool, place: int = 0) -> Sum:
        """Begin to add `slots`, this rank's single sum, over all ranks; return a future of the total.

        `last` and `place` are as in `Exchange.start`.
        """
        (slot,) = slots
        future = future_on(slot.device)
        self._open.append(self._rounds(slot, future))
        self._advance()
        while last and self._open:
            self._advance()
        if last:
            self._scratch.pass_ends()
        return future

    def _advance(self) -> None:
        done = object()
        self._open = [one for one in self._open if next(one, done) is not done]

    def _rounds(self, slot: torch.Tensor, future: Sum) -> Iterator[None]:
        """Sum `slot` in place over all ranks, and set the result of `future` to `slot`.

        This generator yields once per round, while the messages of the round are on their way.
        """
        own, size = self._forest.rank, self._padded(slot.numel())
        data = slot.as_strided((size,), (1,))
        received = self._scratch.take(data, size // 2)
        halves = []
        part = data
        for other, is_upper in self._partners(own):
            lower, upper = part.chunk(2)
            part, given = (upper, lower) if is_upper else (lower, upper)
            incoming = received[: part.numel()]
            self.sent += given.nbytes
            work = self._wire.swap(other, given, incoming)
            yield
            work.wait()
            # The lower node is the left operand, as everywhere.
            torch.add(*((incoming, part) if is_upper else (part, incoming)), out=part)
            halves.append((other, part, given))
        for other, part, given in reversed(halves):
            self.sent += part.nbytes
            work = self._wire.swap(other, part, given)
            yield
            work.wait()
        future.set_result(slot)

    def _partners(self, own: int) -> list[tuple[int, bool]]:
        """Return each round's partner of rank `own`, and whether the partner's number is lower."""
        bits = [1 << bit for bit in range(self._forest.size.bit_length() - 1)]
        return [(own ^ bit, bool(own & bit)) for bit in bits]
