"""Keywords of run.model that belong to other strategies."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.engine.strategies import checks
from lockstep.errors import ExactnessError, ModelError
from lockstep.registry import STRATEGIES

DDP = {"find_unused_parameters": True, "static_graph": True, "bucket_cap_mb": 3}
FSDP = {"wrap": [], "reshard_after_forward": False}


def taken_by(strategy: str, settings: dict[str, Any], **more: bool) -> dict[str, Any]:
    return checks.taken_by(STRATEGIES.find(strategy), settings, **more)


@pytest.mark.parametrize(
    ("strategy", "kept"),
    [("ddp", DDP), ("fsdp", FSDP), ("dp", {}), ("pipeline", DDP), ("ps", DDP)],
)
def test_what_others_have_has_no_effect(strategy: str, kept: dict[str, Any]) -> None:
    assert taken_by(strategy, {**DDP, **FSDP}, exact=True) == kept


def test_what_two_have() -> None:
    assert taken_by("dp", {"dim": 1, "static_graph": True}, exact=True) == {"dim": 1}


@pytest.mark.parametrize("strategy", ["fsdp", "dp"])
@pytest.mark.parametrize(
    ("settings", "is_kept"),
    [
        ({"bucket_cap": 3}, True),
        ({"process_group": object()}, True),
        ({"process_group": None}, False),
        ({"broadcast_buffers": False}, True),
        ({"broadcast_buffers": True}, False),
        ({"start_powerSGD_iter": 3}, False),
    ],
)
def test_what_nobody_takes_stays_to_be_refused(
    strategy: str, settings: dict[str, Any], is_kept: bool
) -> None:
    assert taken_by(strategy, settings, exact=True) == (settings if is_kept else {})


def test_other_numbers_with_another_strategy() -> None:
    settings = {"mp_policy": object()}
    assert taken_by("fsdp", settings, exact=True) == settings
    assert taken_by("ddp", settings, exact=False) == {}
    assert taken_by("ddp", {"mp_policy": None}, exact=True) == {}
    assert taken_by("pipeline", {"chunks": 2, "bucket_cap_mb": 3}, exact=True) == {
        "bucket_cap_mb": 3
    }
    with pytest.raises(ExactnessError, match="mp_policy with strategy=ddp"):
        taken_by("ddp", settings, exact=True)


@pytest.mark.parametrize("strategy", ["pipeline", "tensor"])
@pytest.mark.parametrize("name", ["broadcast_buffers", "forward_sync_buffers"])
def test_buffers_of_each_ranks_own_where_ranks_hold_parts(strategy: str, name: str) -> None:
    with pytest.raises(ModelError, match=f"{name}=False with strategy={strategy}") as caught:
        taken_by(strategy, {name: False}, exact=False)
    assert name in str(caught.value.hint)
    for settings in ({name: True}, {name: None}):
        assert taken_by(strategy, settings, exact=False) == settings
    both = {"broadcast_buffers": False, "forward_sync_buffers": True}
    assert taken_by(strategy, both, exact=False) == both, "the older name is not read then"
    assert taken_by("ddp", {name: False}, exact=False) == {name: False}
    whole = taken_by(strategy, {name: False}, exact=False, is_trained=False)
    assert whole == {name: False}, "every rank holds all of a frozen model"
