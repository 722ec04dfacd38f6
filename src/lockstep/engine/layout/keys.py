"""Keys of random streams: functions of seed, epoch, step, sample and replica, not of the rank.

Keys are BLAKE2b digests (RFC 7693) of the purpose and the numbers, so that neighbouring numbers give
unrelated streams.
"""

from __future__ import annotations

import hashlib
import struct

#: The streams of a run. Each names what its numbers after the seed mean.
SCRIPT = "script"  # checksum of the seed: what a script draws before its run
INIT = "init"  # none: parameters and whatever the script draws before it trains
ORDER = "order"  # loader, epoch: the epoch's permutation
SAMPLE = "sample"  # loader, epoch, index: what `dataset[index]` draws
BATCH = (
    "batch"  # loader, epoch, step, replica: what a whole-batch fetch or a collate function draws
)
FORWARD = (
    "forward"  # loader, epoch, step, replica, pass: what the user's code draws for a microbatch
)
BETWEEN = "between"  # loader, epoch, step: what the script draws after a loop over batches
EPOCH = "epoch"  # epoch: what the script draws between the beginning of an epoch and its first loop
STREAM = "stream"  # loader, epoch: what an iterable dataset draws
OPTIMIZER = "optimizer"  # step, optimizer, call: what `optimizer.step` and its hooks draw
SCHEDULER = "scheduler"  # step, scheduler, call: what `scheduler.step` draws


def derive(seed: int, purpose: str, *numbers: int) -> int:
    """Return the 63-bit key of a random stream.

    `numbers`: which part of the stream, each within 64 signed bits.
    """
    packed = struct.pack(f"<{1 + len(numbers)}q", seed, *numbers)
    digest = hashlib.blake2b(packed, digest_size=8, person=purpose.encode()).digest()
    return int.from_bytes(digest, "little") >> 1
