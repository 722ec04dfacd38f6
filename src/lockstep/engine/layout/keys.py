"""Seeds (keys) of random generators, derived from the run's seed and numbers such as epoch and replica.

A key does not depend on the rank. It is a BLAKE2b digest (RFC 7693) of a purpose and some numbers, so that
neighbouring numbers give unrelated random streams.
"""

from __future__ import annotations

import hashlib
import struct

# Purposes of random streams. A comment lists the numbers after the seed, then the code that draws.
SCRIPT = "script"  # checksum of the seed: the script before its run
INIT = "init"  # no number: initial parameters, and the script before it trains
ORDER = "order"  # loader, epoch: the epoch's permutation
SAMPLE = "sample"  # loader, epoch, index: `dataset[index]`
BATCH = "batch"  # loader, epoch, step, replica: a whole-batch fetch, and the collate function
FORWARD = "forward"  # loader, epoch, step, replica, iteration: the body of a loop
BETWEEN = "between"  # loader, epoch, step: the script after a loop over batches
EPOCH = "epoch"  # epoch: the script between the beginning of an epoch and its first loop
STREAM = "stream"  # loader, epoch: an iterable dataset
OPTIMIZER = "optimizer"  # step, optimizer, call: `optimizer.step` and its hooks
SCHEDULER = "scheduler"  # step, scheduler, call: `scheduler.step`


def derive(seed: int, purpose: str, *numbers: int) -> int:
    """Return a 63-bit generator seed: a hash of `seed`, `purpose` and `numbers` (signed 64-bit)."""
    packed = struct.pack(f"<{1 + len(numbers)}q", seed, *numbers)
    digest = hashlib.blake2b(packed, digest_size=8, person=purpose.encode()).digest()
    return int.from_bytes(digest, "little") >> 1
