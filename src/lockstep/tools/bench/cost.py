"""Cost of an exchange: messages and bytes per rank and step, by the number of ranks.

A message takes a latency, and its bytes over the bandwidth (Hockney 1994, the alpha-beta model).
"""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.registry import EXCHANGES, STRATEGIES

#: Bytes that are shared, of a byte of gradients, where traffic is not counted.
_OF_GRADIENTS = {
    "shared-memory": 1.0,
    "tree": 1.0,
    "native": 1.0,
    "mpi": 1.0,
    "bf16": 0.5,
    "fp16": 0.5,
}
#: The same with FSDP2: one half of an exchange of gradients, and parameters gathered twice.
_OF_SHARDED = 1.5
SHARDED = STRATEGIES.where(lambda one: one.shards)
AT_SERVERS = EXCHANGES.where(lambda one: one.at_servers)
#: How DistributedDataParallel cuts gradients: a small bucket first, then large ones.
_FIRST_BUCKET, _BUCKET = 1 << 20, 25 << 20


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one exchange for one script.

    Without servers each rank sums one share of every bucket and gives it to all: out to the ranks that
    sum, and back. As many messages, and as many bytes, as in a ring all-reduce.
    """

    exchange: str
    volume: float  # bytes shared in a step: what a rank sends, divided by 2 (N - 1) / N
    sums: float  # sums in a step

    def messages(self, ranks: int) -> float:
        """Return how many messages a rank sends in a step."""
        if self.exchange in AT_SERVERS:
            return 2 * self.sums if ranks > 1 else 0
        return 2 * (ranks - 1) * self.sums

    def sent(self, ranks: int) -> float:
        """Return how many bytes pass the busiest link in a step, in one direction.

        With servers that is a server's: it takes the gradients of every rank.
        """
        if self.exchange in AT_SERVERS:
            return self.volume * ranks if ranks > 1 else 0
        return 2 * (ranks - 1) / ranks * self.volume


def cost_of(
    exchange: str,
    strategy: str | None,
    *,
    sent: tuple[int, float] | None,
    gradients: float | None,
) -> Cost | None:
    """Return the cost of an exchange; `None` where its bytes are not known.

    `sent` is a number of ranks and the bytes that each sent in a step, `gradients` the bytes of all
    gradients, where they are known.
    """
    if sent is not None and exchange in AT_SERVERS:
        volume = sent[1]
    elif sent is not None and exchange != "shared-memory":
        volume = sent[1] * sent[0] / (2 * (sent[0] - 1))
    else:  # of shared memory is counted what is written, each rank's nodes whole
        factor = _OF_SHARDED if strategy in SHARDED else _OF_GRADIENTS.get(exchange)
        if factor is None or gradients is None:
            return None
        volume = factor * gradients
    buckets = 1.0 + max(0.0, -((_FIRST_BUCKET - (gradients or volume)) // _BUCKET))
    return Cost(exchange, volume, buckets)
