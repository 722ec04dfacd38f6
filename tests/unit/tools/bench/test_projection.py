"""The model of a step: known parameters come back, and what it says of other layouts."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from lockstep.tools.bench.projecting import project
from lockstep.tools.bench.projection import (
    Batches,
    Cost,
    FitPoint,
    Link,
    Model,
    Parameters,
    cost_of,
    fit_model,
)
from lockstep.tools.bench.results import add_speedups
from lockstep.tools.bench.traffic import Layout, ReduceAlgorithm, traffic

COST = Cost("tree", volume=9e6, sums=2)
TRUE = Parameters(
    overhead_seconds=0.004,
    compute_seconds_per_sample=0.001,
    data_seconds_per_sample=0.0001,
    local_latency_seconds=0.0003,
    local_seconds_per_byte=1 / 12.5e6,
)


def on(layout: int | Layout) -> Layout:
    """Return a layout; a number of ranks is on one host."""
    return layout if isinstance(layout, Layout) else Layout(1, layout)


def points(
    model: Model, *layouts: int | Layout, apart: bool = True, **changes: Any
) -> list[FitPoint]:
    made = [
        FitPoint(
            layout=layout,
            batch=model.batches.samples(layout.ranks),
            replicas=layout.ranks,
            step=model.step(layout),
            data=model.data(layout.ranks),
            exchange=model.exchange(layout) if apart else None,
        )
        for layout in map(on, layouts)
    ]
    return [dataclasses.replace(point, **changes) for point in made]


@pytest.mark.parametrize("per_rank", [False, True])
def test_parameters_that_made_the_points_come_back(per_rank: bool) -> None:
    model = Model(TRUE, COST, Batches(48 if not per_rank else 12, per_rank, None))
    found = fit_model(points(model, 1, 2, 3), COST, model.batches)
    for ranks in (1, 2, 3, 4, 8, 64):
        assert found.exchange(on(ranks)) == pytest.approx(model.exchange(on(ranks)))
        assert found.step(on(ranks)) == pytest.approx(model.step(on(ranks)))
    if not per_rank:  # else overhead and compute cannot be told apart
        known = dataclasses.replace(TRUE, latency_seconds=0.0003, seconds_per_byte=1 / 12.5e6)
        assert dataclasses.astuple(found.parameters) == pytest.approx(dataclasses.astuple(known))


def test_where_the_exchange_is_not_measured_apart_all_is_fitted_to_the_step() -> None:
    true = dataclasses.replace(TRUE, overhead_seconds=0.0)
    model = Model(true, COST, Batches(48, per_rank=False, replicas=None))
    found = fit_model(points(model, 1, 2, 3, 4, apart=False), COST, model.batches)
    assert found.step(on(8)) == pytest.approx(model.step(on(8)))


def test_points_that_are_left_out_do_not_count() -> None:
    model = Model(TRUE, COST, Batches(48, per_rank=False, replicas=None))
    off = points(model, 4, step=99.0, left_out="more threads than cores")
    found = fit_model([*points(model, 1, 2, 3), *off], COST, model.batches)
    assert found.step(on(4)) == pytest.approx(model.step(on(4)))


def test_a_given_link_takes_the_place_of_what_was_fitted() -> None:
    model = Model(TRUE, COST, Batches(48, per_rank=False, replicas=None))
    found = fit_model(points(model, 1, 2, 3), COST, model.batches)
    over = found.over(Link(bandwidth=1e9))
    assert over.parameters.seconds_per_byte == 1e-9
    assert over.parameters.latency_seconds == pytest.approx(TRUE.local_latency_seconds)
    far = found.over(Link(latency=1.0)).exchange(Layout(2, 1))
    assert far == pytest.approx(2 * 2 * 1.0 + 9e6 / 12.5e6)


LEVELS = dataclasses.replace(TRUE, latency_seconds=0.002, seconds_per_byte=1 / 1.5e6)
MEASURED = [Layout(hosts, each) for hosts in (1, 2, 4) for each in (1, 2, 4)]


def test_speeds_between_hosts_and_within_them_come_back() -> None:
    model = Model(LEVELS, COST, Batches(48, per_rank=False, replicas=None))
    found = fit_model(points(model, *MEASURED), COST, model.batches)
    assert dataclasses.astuple(found.parameters) == pytest.approx(dataclasses.astuple(LEVELS))
    for layout in (Layout(3, 2), Layout(2, 6), Layout(128, 8)):
        assert found.step(layout) == pytest.approx(model.step(layout))


@pytest.mark.parametrize(
    ("way", "layout", "expected"),
    [
        (ReduceAlgorithm.HOSTS, Layout(1, 1), (0, 0, 0, 0)),
        (ReduceAlgorithm.HOSTS, Layout(1, 4), (0, 0, 6, 1.5)),
        (ReduceAlgorithm.HOSTS, Layout(4, 1), (6, 1.5, 0, 0)),
        (ReduceAlgorithm.HOSTS, Layout(2, 4), (2, 1.0, 6, 1.5)),
        (ReduceAlgorithm.HOSTS, Layout(7, 1), (12, 12 / 7, 0, 0)),
        (ReduceAlgorithm.HOSTS, Layout(8, 1), (6, 14 / 8, 0, 0)),  # recursive halving
        (ReduceAlgorithm.HOSTS, Layout(128, 8), (14, 2 * 127 / 128, 14, 1.75)),
        (
            ReduceAlgorithm.HOSTS,
            Layout(8, 3),
            (14, 3 * 7 / 8, 4, 4 / 3),
        ),  # three replicas are two nodes
        (
            ReduceAlgorithm.HOSTS,
            Layout(2, 6),
            (2, 1.5, 10, 10 / 6),
        ),  # six replicas are two nodes of the tree
        (ReduceAlgorithm.FLAT, Layout(2, 4), (14, 4 * 4 / 8 + 7 / 8, 0, 10 / 8)),
        (ReduceAlgorithm.FLAT, Layout(8, 1), (14, 14 / 8, 0, 0)),
        (ReduceAlgorithm.RING, Layout(2, 4), (14, 14 / 8, 0, 0)),
        (ReduceAlgorithm.RING, Layout(1, 4), (0, 0, 6, 1.5)),
        (ReduceAlgorithm.SERVERS, Layout(2, 4), (2, 8, 0, 0)),
    ],
    ids=str,
)
def test_messages_and_bytes(
    way: ReduceAlgorithm, layout: Layout, expected: tuple[float, ...]
) -> None:
    assert dataclasses.astuple(traffic(way, layout)) == pytest.approx(expected)


def test_hosts_with_more_replicas_than_ranks() -> None:
    assert traffic(ReduceAlgorithm.HOSTS, Layout(2, 2), 8).link_bytes == 1.0
    assert (
        traffic(ReduceAlgorithm.HOSTS, Layout(2, 2), 6).link_bytes == 1.0
    )  # of four and two replicas
    assert (
        traffic(ReduceAlgorithm.HOSTS, Layout(2, 2), 10).link_bytes == 1.5
    )  # the first six are two nodes
    assert traffic(ReduceAlgorithm.HOSTS, Layout(3, 2), 12).link_bytes == pytest.approx(2 * 2 / 3)


def test_batches() -> None:
    def of(*pairs: tuple[int, float], replicas: int | None = None) -> Batches | None:
        fields = {"step": 1.0, "data": 0.0, "exchange": 0.0}
        return Batches.of(
            [FitPoint(layout=on(n), batch=b, replicas=replicas or n, **fields) for n, b in pairs]
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

    def local(cost: Cost, *ranks: int) -> list[tuple[float, float]]:
        found = [cost.traffic(on(n)) for n in ranks]
        return [(one.local_messages, one.local_bytes) for one in found]

    tree = cost("tree", sent=(on(4), 150e6))
    assert (tree.volume, tree.sums, tree.way) == (100e6, 5, ReduceAlgorithm.HOSTS)
    assert local(tree, 1, 2, 4) == [(0, 0), (10, 100e6), (30, 150e6)]
    assert cost("bf16").volume == 50e6
    assert cost("tree", "fsdp").volume == 150e6
    # What is counted of shared memory is what was written, not what a link would carry.
    assert cost("shared-memory", sent=(on(2), 150e6)).volume == 100e6
    server = cost("server", "ps", sent=(on(2), 100e6))
    assert local(server, 1, 2, 8) == [(0, 0), (10, 200e6), (10, 800e6)]
    assert cost("powersgd", sent=(on(4), 15e6)).volume == 10e6
    assert cost("tree", "fsdp").way == cost("mpi").way == ReduceAlgorithm.FLAT
    gpus = cost_of("tree", None, sent=None, gradients=100e6, on_cpu=False)
    assert gpus is not None
    assert gpus.way == ReduceAlgorithm.FLAT
    assert cost_of("powersgd", None, sent=None, gradients=100e6) is None


def rows(model: Model, *layouts: int | Layout, **changes: Any) -> list[dict[str, Any]]:
    made = [
        {
            "ranks": n,
            "hosts": layout.hosts,
            "strategy": "ddp",
            "exchange": None,
            "measured_by": "steps",
            "strategy_used": "ddp",
            "exchange_used": model.cost.exchange if n > 1 else "none",
            "repeats": 1,
            "batch": model.batches.samples(n),
            "replicas": n,
            "device": "cpu",
            "samples_per_second": model.rate(layout),
            "step_seconds": model.step(layout),
            "data_seconds": model.data(n),
            "exchange_seconds": model.exchange(layout),
            "sent_bytes_per_step": None,
            "gradient_bytes": model.cost.volume,
            "competing": False,
            **changes,
        }
        for layout, n in ((on(one), on(one).ranks) for one in layouts)
    ]
    add_speedups(made)
    return made


SHARED = Model(TRUE, Cost("shared-memory", 9e6, 2), Batches(48, per_rank=False, replicas=None))


def test_rows_of_a_projection() -> None:
    done = project(rows(SHARED, 1, 2, 3), [Layout(1, 4), Layout(1, 8)], Link())
    assert [row["ranks"] for row in done.rows] == [4, 8]
    assert done.rows[0]["step_seconds"] == pytest.approx(SHARED.step(on(4)), rel=1e-5)
    assert done.rows[0]["speedup"] == pytest.approx(
        SHARED.rate(on(4)) / SHARED.rate(on(1)), rel=1e-5
    )
    assert done.rows[0]["efficiency"] == pytest.approx(done.rows[0]["speedup"] / 4, rel=1e-5)
    assert [row["error"] for row in done.residuals] == pytest.approx([0, 0, 0], abs=1e-5)
    assert done.parameters[0]["bandwidth_bytes_per_second"] == pytest.approx(12.5e6, rel=1e-5)
    assert done.refused == []
    assert any("all ranks are on one host" in line for line in done.assumptions)


def test_gradients_of_a_sharded_model_are_those_of_all_ranks() -> None:
    known = rows(SHARED, 1, 2, strategy_used="fsdp", exchange_used="tree", gradient_bytes=5e6)
    assert project(known, [Layout(1, 4)], Link()).parameters[0]["shared_bytes"] == 1.5 * 2 * 5e6


def test_over_a_given_link_shared_memory_becomes_the_tree() -> None:
    done = project(rows(SHARED, 1, 2), [Layout(4, 1)], Link(bandwidth=1e9, latency=1e-5))
    assert done.rows[0]["exchange_seconds"] == pytest.approx(12 * 1e-5 + 1.5 * 9e6 / 1e9, rel=1e-5)
    assert done.parameters[0]["given"] == ["bandwidth", "latency"]
    assert any("shared-memory was measured" in line for line in done.assumptions)
    assert [row["error"] for row in done.residuals] == pytest.approx([0, 0], abs=1e-5)


def test_rows_of_several_hosts_have_the_other_ways_beside_them() -> None:
    model = Model(LEVELS, Cost("tree", 9e6, 2), Batches(48, per_rank=False, replicas=None))
    done = project(rows(model, *MEASURED), [Layout(4, 1), Layout(2, 6)], Link())
    (alone, row) = done.rows
    assert [(one["ranks"], one["hosts"]) for one in done.rows] == [(4, 4), (12, 2)]
    assert row["step_seconds"] == row["hosts_step_seconds"]
    assert row["step_seconds"] == pytest.approx(model.step(Layout(2, 6)), rel=1e-5)
    ring = model.by(ReduceAlgorithm.RING).step(Layout(2, 6))
    assert row["ring_step_seconds"] == pytest.approx(ring, rel=1e-5)
    assert row["flat_step_seconds"] > row["ring_step_seconds"]
    # With a rank per host all three move the same bytes.
    assert alone["flat_step_seconds"] == alone["ring_step_seconds"] == alone["step_seconds"]
    assert "fitted to 1, 2, 4, 2x1, 2x2, 2x4, 4x1, 4x2, 4x4 ranks" in done.assumptions[0]


def test_the_speed_within_a_host_must_be_known() -> None:
    known = rows(Model(LEVELS, COST, Batches(48, per_rank=False, replicas=None)), 1, Layout(2, 1))
    assert project(known, [Layout(4, 1)], Link()).refused == []
    assert "--local-bandwidth" in project(known, [Layout(2, 2)], Link()).refused[0]
    assert project(known, [Layout(2, 2)], Link(local_bandwidth=1e9)).refused == []


def test_from_one_rank_alone_with_a_link() -> None:
    done = project(rows(SHARED, 1), [Layout(4, 1)], Link(bandwidth=1e9))
    assert done.rows[0]["exchange_seconds"] == pytest.approx(1.5 * 9e6 / 1e9, rel=1e-5)
    assert "--bandwidth" in project(rows(SHARED, 1), [Layout(1, 4)], Link()).refused[0]


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
    done = project(rows(SHARED, 1, 2, **changes), [Layout(1, 4)], Link())
    assert done.rows == []
    (line,) = done.refused
    assert said in line


def test_a_strategy_that_one_rank_had_to_replace() -> None:
    link = Link(bandwidth=1e9, local_bandwidth=1e9)
    replaced = {"strategy": "pipeline", "strategy_used": "ddp"}
    done = project(rows(SHARED, 1, **replaced), [Layout(2, 4)], link)
    assert "with pipeline ranks do not share the samples evenly" in done.refused[0]
    assert project(rows(SHARED, 1, 2, **replaced), [Layout(2, 4)], link).refused == []


def test_layouts_that_compete_for_cores_are_shown_and_not_fitted() -> None:
    known = rows(SHARED, 1, 2)
    slow = rows(SHARED, 4, competing=True, step_seconds=99.0)
    done = project(known + slow, [Layout(1, 8)], Link())
    last = done.residuals[-1]
    assert "more threads than cores" in last["left_out"]
    assert last["error"] < -0.9
    assert [row["error"] for row in done.residuals[:2]] == pytest.approx([0, 0], abs=1e-5)
