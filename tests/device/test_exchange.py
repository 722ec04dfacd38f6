"""The exchange `tree` waits for its collectives on a stream of its own."""

from __future__ import annotations

import pytest

from tests.device.test_simulated import run

pytestmark = pytest.mark.forked

#: Sums three buckets of two nodes each; the collectives are copies that wait in the stream of their start.
PROGRAM = """
from lockstep.engine.exchange.base import Forest
from lockstep.engine.exchange.tree import TreeExchange

class Work:
    def wait(self):
        waiting.append(torch.accelerator.current_stream())

class Wire:
    def scatter(self, outgoing, received, shares):
        received.copy_(outgoing)
        return Work()

    def gather(self, part, total):
        total.copy_(part)
        return Work()

waiting, sums = [], []
exchange = TreeExchange(Wire(), Forest(0, counts=(2,), merges=(0, 1), blocks=(range(2),), replicas=2))
for bucket in range(3):
    slots = exchange.slots(torch.empty(1000, device="sim"))
    for number, slot in enumerate(slots):
        slot.fill_(10 * bucket + number)
    sums.append(exchange.start(slots, last=bucket == 2))
    del slots, slot
    used_again = torch.full((2000,), 7.0, device="sim")
    if bucket < 2:
        main.synchronize()
waiting[-1].synchronize()
print([int(each.wait().mean().item()) for each in sums], len(waiting), main in waiting)
"""


def test_the_backward_pass_waits_for_no_bucket(lockstep, simulated) -> None:
    assert run(lockstep, simulated, PROGRAM) == "[1, 21, 41] 6 False"
    assert run(lockstep, simulated, PROGRAM, lazy=False) == "[1, 21, 41] 6 False"
