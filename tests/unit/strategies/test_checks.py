"""Models and settings that are refused whatever the layout."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch import nn

from lockstep.errors import ExactnessError, ModelError
from lockstep.strategies.checks import check_same_models, check_settings


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


@pytest.mark.parametrize(
    "settings",
    [
        {"broadcast_buffers": False},
        {"forward_sync_buffers": False},
        {"mixed_precision": object()},
        {"delay_all_reduce_named_params": []},
        {"param_to_hook_all_reduce": object()},
    ],
)
def test_inexact_keywords_need_a_word(settings: dict) -> None:
    (name,) = settings
    with pytest.raises(ExactnessError, match=f"{name}=.* would break the promise") as caught:
        check_settings(nn.Linear(1, 1), settings, exact=True)
    assert "exact=False" in caught.value.hint
    check_settings(nn.Linear(1, 1), settings, exact=False)


@pytest.mark.parametrize(
    "settings",
    [
        {"bucket_cap_mb": 5, "gradient_as_bucket_view": True},
        {"static_graph": True},
        {"find_unused_parameters": False},
        {"broadcast_buffers": True},
        {"mixed_precision": None},
    ],
)
def test_exact_keywords_are_allowed(settings: dict) -> None:
    check_settings(nn.Linear(1, 1), settings, exact=True)


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        (
            nn.Linear(2, 4),
            "built another Linear than rank 0: weight: .3, 2.*; rank 0 has weight: .4, 2",
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


def test_ranks_that_build_the_same_model() -> None:
    store = dist.HashStore()
    for rank in range(2):
        check_same_models(nn.Linear(2, 3), "0", store, rank, 2)
