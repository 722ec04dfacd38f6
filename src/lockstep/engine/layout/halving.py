"""Where recursive halving and doubling sums over hosts, in place of messages from each host to each other.

It adds in the order of the reduction tree only if the hosts are 2^k equal nodes of the tree.
"""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.engine.layout.tree import nodes

#: Number of hosts from which rounds pay. A message costs a rank about 0.1 ms of processor time over TCP,
#: and a round waits for the network once: 8 hosts save 8 messages for 4 more rounds, 4 save 2 for 2 more.
FEWEST = 8


def is_possible(blocks: Sequence[range], replicas: int) -> bool:
    """Return whether the hosts are 2^k, with `blocks` of replicas that are nodes of one size."""
    is_power = len(blocks) & (len(blocks) - 1) == 0
    sizes = {len(own) for own in blocks}
    return is_power and len(sizes) == 1 and all(len(nodes(own, replicas)) == 1 for own in blocks)


def pays(blocks: Sequence[range], replicas: int) -> bool:
    """Return whether recursive halving is possible, and takes less time than direct messages."""
    return len(blocks) >= FEWEST and is_possible(blocks, replicas)
