"""Choice of how hosts sum gradients: recursive halving and doubling, or messages between all pairs.

Halving adds in the order of the reduction tree only for 2^k hosts whose replicas are equal subtrees of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.engine.layout.tree import nodes

#: Number of hosts from which halving is faster. A message costs a rank about 0.1 ms of CPU time over TCP,
#: and a round of messages waits for the network: 8 hosts save 8 messages for 4 more rounds, 4 save 2 for 2.
FEWEST = 8


def is_possible(blocks: Sequence[range], replicas: int) -> bool:
    """Return whether there are 2^k hosts whose replicas form equally large subtrees of the reduction tree.

    Only then does recursive halving add in the tree's order. `blocks`: the replicas of each host.
    """
    is_power = len(blocks) & (len(blocks) - 1) == 0
    sizes = {len(own) for own in blocks}
    return is_power and len(sizes) == 1 and all(len(nodes(own, replicas)) == 1 for own in blocks)


def pays(blocks: Sequence[range], replicas: int) -> bool:
    """Return whether recursive halving is possible and faster for sums between hosts.

    It counts as faster from `FEWEST` hosts on. `blocks`: the replicas of each host. `replicas`: number of
    replicas of the run.
    """
    return len(blocks) >= FEWEST and is_possible(blocks, replicas)
