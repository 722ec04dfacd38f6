"""The exchanges over a process group, on the only group that needs no other process: of one rank (A4)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lockstep.engine.exchange.base import ExchangeContext, Forest
from lockstep.engine.exchange.choose import make
from lockstep.engine.layout.tree import total


@pytest.mark.parametrize("name", ["native", "tree", "shared-memory"])
def test_a_group_of_one_gives_back_what_it_got(lone_group: Any, name: str) -> None:
    import torch.distributed as dist

    parameters = [nn.Parameter(torch.zeros(size)) for size in (5, 40_000)]
    store = dist.HashStore()
    forest = Forest.of(4, 1, 0)
    exchange = make(
        ExchangeContext(
            name=name, forest=forest, parameters=parameters, group=lone_group, store=store, key="0"
        )
    )
    values = [[torch.randn_like(p.detach()) for _ in range(4)] for p in parameters]
    for extra in (0, 3):
        futures = []
        for number, contributions in enumerate(values):
            bucket = total(contributions, torch.add)
            (slot,) = exchange.slots(bucket.clone(), extra)
            assert slot.numel() == bucket.numel() + extra
            slot[: bucket.numel()].copy_(bucket)
            slot[bucket.numel() :].fill_(2)
            futures.append((bucket, exchange.start([slot], last=number == 1)))
        for bucket, future in futures:
            result = future.wait()
            assert torch.equal(result[: bucket.numel()], bucket)
            assert torch.equal(result[bucket.numel() :], torch.full((extra,), 2.0))
    exchange.close()
