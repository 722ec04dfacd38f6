"""Models and settings that are refused whatever the layout."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.engine.strategies import checks
from lockstep.engine.strategies.checks import REFUSED, check_same_models, shares_buffers
from lockstep.errors import ExactnessError, ModelError

CPU = torch.device("cpu")
KNOWN = set(inspect.signature(DistributedDataParallel).parameters)


def check_settings(
    module: nn.Module, settings: dict[str, Any], *, exact: bool, device: torch.device = CPU
) -> None:
    checks.check_settings(module, settings, exact=exact, device=device)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients_are_refused(kind: type[nn.Module]) -> None:
    model = nn.Sequential(nn.Linear(2, 2), kind(5, 2, sparse=True))
    for exact in (True, False):
        with pytest.raises(ModelError, match="the embedding 1 has sparse=True") as caught:
            check_settings(model, {}, exact=exact)
        assert caught.value.hint
    check_settings(nn.Sequential(kind(5, 2)), {}, exact=True)


def test_a_keyword_that_ddp_does_not_know() -> None:
    with pytest.raises(ModelError, match="no setting find_unused, nonsense") as caught:
        check_settings(nn.Linear(1, 1), {"find_unused": 1, "nonsense": 2}, exact=False)
    assert "find_unused_parameters" in caught.value.hint


@pytest.mark.parametrize("name", sorted({"broadcast_buffers", "forward_sync_buffers"} & KNOWN))
def test_buffers_of_each_ranks_own_need_a_word(name: str) -> None:
    with pytest.raises(ExactnessError, match=f"{name}=False would break the promise") as caught:
        check_settings(nn.Linear(1, 1), {name: False}, exact=True)
    assert "exact=False" in caught.value.hint
    check_settings(nn.Linear(1, 1), {name: False}, exact=False)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("name", sorted(set(REFUSED) & KNOWN))
@pytest.mark.parametrize("value", [True, torch.ones(2), [("weight", None)], object()])
def test_what_cannot_be_passed_on(name: str, value: object, exact: bool) -> None:
    with pytest.raises(ModelError, match=f"^{name} cannot be passed on to DDP: .+") as caught:
        check_settings(nn.Linear(1, 1), {name: value}, exact=exact)
    assert caught.value.hint


@pytest.mark.parametrize("name", sorted(KNOWN - {"module"}))
def test_every_keyword_of_ddp_is_taken_with_its_own_default(name: str) -> None:
    default = inspect.signature(DistributedDataParallel).parameters[name].default
    check_settings(nn.Linear(1, 1), {name: default}, exact=True)
    assert checks.is_harmless(name, {name: default})


@pytest.mark.parametrize(
    "settings",
    [
        {"bucket_cap_mb": 5, "gradient_as_bucket_view": True},
        {"static_graph": True},
        {"find_unused_parameters": False},
        {"broadcast_buffers": True},
        {"mixed_precision": None},
        {"device_ids": []},
        {"init_sync": False, "dim": 1},
    ],
)
def test_exact_keywords_are_allowed(settings: dict) -> None:
    check_settings(nn.Linear(1, 1), settings, exact=True)
    assert all(checks.is_harmless(name, settings) for name in settings)


@pytest.mark.parametrize(
    "settings", [{"device_ids": [0]}, {"output_device": 0}, {"output_device": "cuda:0"}]
)
def test_devices_on_the_processor(settings: dict) -> None:
    (name,) = settings
    with pytest.raises(ModelError, match=f"{name}=.*computes on the CPU; expected none"):
        check_settings(nn.Linear(1, 1), settings, exact=True)
    assert all(checks.is_harmless(name, settings) for name in settings)


@pytest.mark.parametrize("ids", [[1], ["cuda:1"], [torch.device("cuda", 0)], [None]])
def test_the_device_of_the_rank(ids: list) -> None:
    here = torch.device("cuda", 1)
    if ids[0] in (1, "cuda:1"):
        check_settings(
            nn.Linear(1, 1), {"device_ids": ids, "output_device": 1}, exact=True, device=here
        )
    elif ids[0] is not None:
        with pytest.raises(ModelError, match=r"computes on cuda:1; expected \[1\]"):
            check_settings(nn.Linear(1, 1), {"device_ids": ids}, exact=True, device=here)
    else:
        check_settings(nn.Linear(1, 1), {"device_ids": None}, exact=True, device=here)


@pytest.mark.parametrize(
    ("settings", "shared"),
    [
        ({}, True),
        ({"broadcast_buffers": False}, False),
        ({"forward_sync_buffers": False}, False),
        ({"broadcast_buffers": False, "forward_sync_buffers": True}, True),
        ({"broadcast_buffers": True, "forward_sync_buffers": False}, False),
        ({"broadcast_buffers": False, "forward_sync_buffers": None}, False),
    ],
)
def test_the_newer_name_wins_as_in_ddp(settings: dict, shared: bool) -> None:
    assert shares_buffers(settings) is shared


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        (
            nn.Linear(2, 4),
            "built a different Linear than rank 0: weight: .3, 2.*; rank 0 has weight: .4, 2",
        ),
        (nn.Linear(2, 3).double(), "float32; rank 0 has weight: .*float64"),
        (nn.Linear(2, 3, bias=False), "2 parameters; rank 0 has 1 parameters"),
    ],
)
def test_ranks_that_build_other_models(theirs: nn.Module, message: str) -> None:
    store = dist.HashStore()
    check_same_models(theirs, "0", store, 0, 2)
    with pytest.raises(
        ModelError, match=f"rank 1 of 2 {message}" if "built" in message else message
    ):
        check_same_models(nn.Linear(2, 3), "0", store, 1, 2)


def test_ranks_whose_parameters_lie_in_another_order() -> None:
    """Sums go by the order of memory, and would add what does not belong together."""
    store = dist.HashStore()
    turned = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
    check_same_models(turned, "0", store, 0, 2)
    with pytest.raises(ModelError, match=r"rank 0 has weight: .*, strides \(8, 1, 4, 2\)"):
        check_same_models(nn.Conv2d(2, 3, 2), "0", store, 1, 2)


def test_ranks_that_build_the_same_model() -> None:
    store = dist.HashStore()
    for rank in range(2):
        check_same_models(nn.Linear(2, 3), "0", store, rank, 2)
    with pytest.raises(ModelError, match="built a different Linear than rank 0"):
        check_same_models(nn.Linear(2, 4), "0", store, 1, 2)
