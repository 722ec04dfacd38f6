"""Sums in 16 bits and of low rank, on the only group that needs no other process: of one rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lockstep.engine.exchange.base import ExchangeContext, Forest, Stateful
from lockstep.engine.exchange.choose import make

#: Small numbers that 16 bits would round, as the strategy writes them behind the last bucket.
NOTES = torch.tensor([0.0, 1.0, 257.0, 2049.0, 65_535.0])


def made(group: Any, name: str, replicas: int, **settings: Any) -> Any:
    parameters = [nn.Parameter(torch.zeros(40, 30)), nn.Parameter(torch.zeros(7))]
    exchange = make(
        ExchangeContext(
            name=name,
            forest=Forest.of(replicas, 1, 0),
            parameters=parameters,
            group=group,
            store=dist.HashStore(),
            key="0",
            settings=settings,
        )
    )
    return exchange, parameters


def reduce(
    exchange: Any, parameters: list[nn.Parameter], buckets: list[torch.Tensor]
) -> list[torch.Tensor]:
    futures = []
    for number, (parameter, bucket) in enumerate(zip(parameters, buckets, strict=True)):
        last = number == len(buckets) - 1
        if isinstance(exchange, Stateful):
            exchange.announce([parameter])
        slots = exchange.slots(bucket.clone(), len(NOTES) if last else 0)
        slots[0][: bucket.numel()] = bucket
        if last:
            slots[0][bucket.numel() :] = NOTES
        futures.append(exchange.start(slots, last=last))
    totals = [future.wait() for future in futures]
    assert torch.equal(totals[-1][-len(NOTES) :], NOTES), "notes arrive as they are"
    return [*totals[:-1], totals[-1][: -len(NOTES)]]


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_gradients_are_rounded_and_notes_are_not(lone_group: Any, name: str, dtype: Any) -> None:
    exchange, parameters = made(lone_group, name, 1)
    for _ in range(2):
        buckets = [torch.randn(p.numel()) for p in parameters]
        for total, bucket in zip(reduce(exchange, parameters, buckets), buckets, strict=True):
            assert torch.equal(total, bucket.to(dtype).float())
            assert not torch.equal(total, bucket)
    exchange.close()


def test_a_ranks_nodes_are_added_before_they_are_rounded(lone_group: Any) -> None:
    exchange, _ = made(lone_group, "bf16", 1)
    exchange._forest = SimpleNamespace(own=3)  # as a rank among others has them
    slots = exchange.slots(torch.empty(4), 1)
    for slot in slots:
        slot[:4], slot[4:] = 1 + 2**-9, 300.0
    total = exchange.start(slots, last=True).wait()
    assert torch.equal(total[:4], torch.full((4,), 3 * (1 + 2**-9)).bfloat16().float())
    assert total[4] == 900.0


def test_powersgd_sums_what_is_of_low_rank_and_remembers_the_rest(lone_group: Any) -> None:
    """From the third step on a matrix of rank 1 comes through; of others the rest is in the next sum."""
    settings = {"matrix_approximation_rank": 1, "start_powerSGD_iter": 2}
    exchange, parameters = made(lone_group, "powersgd", 1, **settings)
    generator = torch.Generator().manual_seed(0)
    thin = torch.outer(*(torch.randn(n, generator=generator) for n in (40, 30))).view(-1)
    full, vector = torch.randn(1200, generator=generator), torch.randn(7, generator=generator)
    for step in range(3):
        matrix, whole = reduce(exchange, parameters, [full if step < 2 else thin, vector])
        assert torch.allclose(whole, vector)
        if step < 2:
            assert torch.equal(matrix, full), "nothing is left out in the first steps"
    assert torch.allclose(matrix, thin, atol=1e-4)
    first = reduce(exchange, parameters, [full, vector])[0]
    assert not torch.allclose(first, full, atol=0.1)
    second = reduce(exchange, parameters, [torch.zeros(1200), vector])[0]
    assert second.norm() > 0.1, "what was left out comes with the next step"
    assert exchange.state() == {"steps": 5}
    exchange.load({"steps": 1})
    assert torch.equal(reduce(exchange, parameters, [full, vector])[0], full)
