"""The model of a step: known parameters come back, and what it says of other layouts."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from lockstep.tools.bench.projecting import project
from lockstep.tools.bench.projection import (
    Batches,
    Cost,
    Link,
    Model,
    Parameters,
    Point,
    cost_of,
    fit_model,
)
from lockstep.tools.bench.results import add_speedups

COST = Cost("tree", volume=9e6, sums=2)
TRUE = Parameters(
    overhead_seconds=0.004,
    compute_seconds_per_sample=0.001,
    data_seconds_per_sample=0.0001,
    latency_seconds=0.0003,
    seconds_per_byte=1 / 12.5e6,
)


def points(model: Model, *ranks: int, apart: bool = True, **changes: Any) -> list[Point]:
    made = [
        Point(
            ranks=n,
            batch=model.batches.samples(n),
            replicas=n,
            step=model.step(n),
            data=model.data(n),
            exchange=model.exchange(n) if apart else None,
        )
        for n in ranks
    ]
    return [dataclasses.replace(point, **changes) for point in made]


@pytest.mark.parametrize("per_rank", [False, True])
def test_parameters_that_made_the_points_come_back(per_rank: bool) -> None:
    model = Model(TRUE, COST, Batches(48 if not per_rank else 12, per_rank, None))
    found = fit_model(points(model, 1, 2, 3), COST, model.batches)
    for ranks in (1, 2, 3, 4, 8, 64):
        assert found.exchange(ranks) == pytest.approx(model.exchange(ranks))
        assert found.step(ranks) == pytest.approx(model.step(ranks))
    if not per_rank:  # else overhead and compute cannot be told apart
        assert dataclasses.astuple(found.parameters) == pytest.approx(dataclasses.astuple(TRUE))


def test_where_the_exchange_is_not_measured_apart_all_is_fitted_to_the_step() -> None:
    true = dataclasses.replace(TRUE, overhead_seconds=0.0)
    model = Model(true, COST, Batches(48, per_rank=False, replicas=None))
    found = fit_model(points(model, 1, 2, 3, 4, apart=False), COST, model.batches)
    assert found.step(8) == pytest.approx(model.step(8))


def test_points_that_are_left_out_do_not_count() -> None:
    model = Model(TRUE, COST, Batches(48, per_rank=False, replicas=None))
    off = points(model, 4, step=99.0, left_out="more threads than cores")
    found = fit_model([*points(model, 1, 2, 3), *off], COST, model.batches)
    assert found.step(4) == pytest.approx(model.step(4))


def test_a_given_link_takes_the_place_of_what_was_fitted() -> None:
    model = Model(TRUE, COST, Batches(48, per_rank=False, replicas=None))
    over = model.over(Link(bandwidth=1e9))
    assert over.parameters.seconds_per_byte == 1e-9
    assert over.parameters.latency_seconds == TRUE.latency_seconds
    assert model.over(Link(latency=1.0)).exchange(2) == pytest.approx(2 * 2 * 1.0 + 9e6 / 12.5e6)


def test_batches() -> None:
    def of(*pairs: tuple[int, float], replicas: int | None = None) -> Batches | None:
        fields = {"step": 1.0, "data": 0.0, "exchange": 0.0}
        return Batches.of(
            [Point(ranks=n, batch=b, replicas=replicas or n, **fields) for n, b in pairs]
        )

    assert of((1, 64), (2, 63.5)) == Batches(64, per_rank=False, replicas=None)
    assert of((1, 8), (2, 16), (4, 32)) == Batches(8, per_rank=True, replicas=None)
    assert of((1, 8), (2, 11)) is None
    fixed = of((1, 64), (2, 64), (3, 64), replicas=4)
    assert fixed is not None
    assert [fixed.largest(n) for n in (1, 2, 3, 4)] == [64, 32, 32, 16]
    assert fixed.largest(8) == 8, "a run of more ranks has more replicas"
    assert fixed.largest(1024) == 1, "a rank has at least one sample"


def test_what_an_exchange_costs() -> None:
    def cost(exchange: str, strategy: str | None = None, sent: Any = None) -> Cost:
        made = cost_of(exchange, strategy, sent=sent, gradients=100e6)
        assert made is not None
        return made

    tree = cost("tree", sent=(4, 150e6))
    assert (tree.volume, tree.sums) == (100e6, 5)
    assert [tree.sent(n) for n in (1, 2, 4)] == [0, 100e6, 150e6]
    assert [tree.messages(n) for n in (1, 2, 4)] == [0, 10, 30]
    assert cost("bf16").volume == 50e6
    assert cost("tree", "fsdp").volume == 150e6
    # What is counted of shared memory is what was written, not what a link would carry.
    assert cost("shared-memory", sent=(2, 150e6)).volume == 100e6
    server = cost("server", "ps", sent=(2, 100e6))
    assert [server.sent(n) for n in (1, 2, 8)] == [0, 200e6, 800e6]
    assert cost_of("powersgd", None, sent=None, gradients=100e6) is None


def rows(model: Model, *ranks: int, **changes: Any) -> list[dict[str, Any]]:
    made = [
        {
            "ranks": n,
            "strategy": "ddp",
            "exchange": None,
            "measured_by": "steps",
            "strategy_used": "ddp",
            "exchange_used": model.cost.exchange if n > 1 else "none",
            "repeats": 1,
            "batch": model.batches.samples(n),
            "replicas": n,
            "device": "cpu",
            "samples_per_second": model.rate(n),
            "step_seconds": model.step(n),
            "data_seconds": model.data(n),
            "exchange_seconds": model.exchange(n),
            "sent_bytes_per_step": None,
            "gradient_bytes": model.cost.volume,
            "competing": False,
            **changes,
        }
        for n in ranks
    ]
    add_speedups(made)
    return made


SHARED = Model(TRUE, Cost("shared-memory", 9e6, 2), Batches(48, per_rank=False, replicas=None))


def test_rows_of_a_projection() -> None:
    done = project(rows(SHARED, 1, 2, 3), [4, 8], Link())
    assert [row["ranks"] for row in done.rows] == [4, 8]
    assert done.rows[0]["step_seconds"] == pytest.approx(SHARED.step(4), rel=1e-5)
    assert done.rows[0]["speedup"] == pytest.approx(SHARED.rate(4) / SHARED.rate(1), rel=1e-5)
    assert done.rows[0]["efficiency"] == pytest.approx(done.rows[0]["speedup"] / 4, rel=1e-5)
    assert [row["error"] for row in done.residuals] == pytest.approx([0, 0, 0], abs=1e-5)
    assert done.parameters[0]["bandwidth_bytes_per_second"] == pytest.approx(12.5e6, rel=1e-5)
    assert done.refused == []
    assert any("all ranks are on one host" in line for line in done.assumptions)


def test_gradients_of_a_sharded_model_are_those_of_all_ranks() -> None:
    known = rows(SHARED, 1, 2, strategy_used="fsdp", exchange_used="tree", gradient_bytes=5e6)
    assert project(known, [4], Link()).parameters[0]["shared_bytes"] == 1.5 * 2 * 5e6


def test_over_a_given_link_shared_memory_becomes_the_tree() -> None:
    done = project(rows(SHARED, 1, 2), [4], Link(bandwidth=1e9, latency=1e-5))
    assert done.rows[0]["exchange_seconds"] == pytest.approx(12 * 1e-5 + 1.5 * 9e6 / 1e9, rel=1e-5)
    assert done.parameters[0]["given"] == ["bandwidth", "latency"]
    assert any("shared-memory was measured" in line for line in done.assumptions)
    assert [row["error"] for row in done.residuals] == pytest.approx([0, 0], abs=1e-5)


def test_from_one_rank_alone_with_a_link() -> None:
    done = project(rows(SHARED, 1), [4], Link(bandwidth=1e9))
    assert done.rows[0]["exchange_seconds"] == pytest.approx(1.5 * 9e6 / 1e9, rel=1e-5)
    assert "--bandwidth" in project(rows(SHARED, 1), [4], Link()).refused[0]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"competing": True}, "more threads than this machine has cores"),
        ({"strategy_used": "pipeline"}, "with pipeline ranks do not share the samples evenly"),
        ({"measured_by": "wall time"}, "no steps were measured"),
        ({"gradient_bytes": None}, "bytes that its exchange sends are not recorded"),
    ],
)
def test_what_cannot_be_projected(changes: dict[str, Any], said: str) -> None:
    done = project(rows(SHARED, 1, 2, **changes), [4], Link())
    assert done.rows == []
    (line,) = done.refused
    assert said in line


def test_layouts_that_compete_for_cores_are_shown_and_not_fitted() -> None:
    known = rows(SHARED, 1, 2)
    slow = rows(SHARED, 4, competing=True, step_seconds=99.0)
    done = project(known + slow, [8], Link())
    last = done.residuals[-1]
    assert "more threads than cores" in last["left_out"]
    assert last["error"] < -0.9
    assert [row["error"] for row in done.residuals[:2]] == pytest.approx([0, 0], abs=1e-5)
