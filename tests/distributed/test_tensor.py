"""Layers over rows of ranks: the same mathematics, and the same bits for any number of rows (A5)."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from lockstep.testing import RankError, run_ranks
from tests.distributed import spread

pytestmark = pytest.mark.ranks(4)


def environ(mesh: str | None) -> dict[str, str]:
    asked = {} if mesh is None else {"LOCKSTEP_STRATEGY": "tensor", "LOCKSTEP_MESH": mesh}
    return {"LOCKSTEP_REPLICAS": "4", **asked}


def test_close_to_one_process_and_the_same_for_any_number_of_rows() -> None:
    """Clipping, AdamW, parameters and buffers that are not cut."""
    ((_, exactness, weights),) = run_ranks(spread.train_tensor, 1, environ=environ(None))
    assert exactness == "exact"
    one = run_ranks(spread.train_tensor, 2, environ=environ("1x2"))
    two = run_ranks(spread.train_tensor, 4, environ=environ("2x2"))
    assert {digest for digest, _, _ in one + two} == {one[0][0]}
    for _, exactness, own in one + two:
        assert exactness == "close"
        assert own == pytest.approx(weights, rel=1e-3, abs=1e-5)


@pytest.mark.wide
def test_a_run_goes_on_with_another_mesh(tmp_path) -> None:
    ((whole, *_), _) = run_ranks(spread.train_tensor, 2, environ=environ("1x2"))
    place = str(tmp_path)
    faults = {**environ("2x2"), "LOCKSTEP_FAULTS": "term@4"}
    told = run_ranks(spread.train_tensor, 4, place, 0.02, environ=faults)
    assert {digest for digest, _, _ in told} == {"preempted"}
    found = run_ranks(spread.train_tensor, 2, place, environ=environ("1x2"))
    assert [digest for digest, _, _ in found] == [whole] * 2


def test_what_draws_makes_a_run_approximate() -> None:
    found = run_ranks(spread.classes_of_tensors, 2, environ=environ("1x2"))
    assert found == [["approximate", "close", "close", "approximate"]] * 2


def test_types_of_an_optimizers_state_stay() -> None:
    cut = {"wide.weight", "wide.bias", "narrow.weight", "narrow.bias"}
    for found in run_ranks(spread.load_precise, 2, environ=environ("1x2")):
        assert {name for name, is_cut in found if is_cut} == cut


def test_the_mesh() -> None:
    found = run_ranks(spread.look_at_mesh, 4, environ=environ("2x2"))
    assert [tuple(place) for _, _, place in found] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert {(names, shape) for names, shape, _ in found} == {(("data", "model"), (2, 2))}


@pytest.mark.wide(beyond=2)
@pytest.mark.parametrize(
    ("plan", "settings", "match"),
    [
        (None, {}, "run.model was given no plan for Mlp"),
        ({"tall": ColwiseParallel()}, {}, "plan names 'tall', and the model has no such part"),
        ({"wide": "columns"}, {}, "expected names of parts, each with a style"),
        ({"wide": ColwiseParallel()}, {"width": 33}, "expected a size that 2 divides"),
        ({"norm": RowwiseParallel()}, {}, "cannot be parallelised by this plan"),
        (
            {"wide": ColwiseParallel()},
            {"exact": True},
            "strategy=tensor sums parts of each product",
        ),
    ],
)
def test_plans_that_cannot_be(plan: Any, settings: dict[str, Any], match: str) -> None:
    with pytest.raises(RankError, match=match):
        run_ranks(_hold, 2, plan, settings, environ=environ("1x2"))


def _hold(plan: Any, settings: dict[str, Any]) -> None:
    spread.hold_tensor(plan, **settings)
