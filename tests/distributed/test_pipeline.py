"""Models over rows of ranks: the bits of one process, whichever way the ranks stand (A5)."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.testing import RankError, run_ranks
from tests.distributed import jobs, spread

pytestmark = pytest.mark.ranks(4)

MESHES = [(2, "1x2"), (3, "1x3"), (4, "2x2")]


def environ(mesh: str | None, replicas: int = 4) -> dict[str, str]:
    asked = {} if mesh is None else {"LOCKSTEP_STRATEGY": "pipeline", "LOCKSTEP_MESH": mesh}
    return {"LOCKSTEP_REPLICAS": str(replicas), **asked}


def assert_same(job: Any, *args: Any, replicas: int = 4, meshes: Any = MESHES) -> None:
    (expected,) = run_ranks(job, 1, *args, environ=environ(None, replicas))
    for ranks, mesh in meshes:
        found = run_ranks(job, ranks, *args, environ=environ(mesh, replicas))
        assert found == [expected] * ranks, mesh


@pytest.mark.wide(beyond=1)
@pytest.mark.parametrize("kind", ["list", "skipping"])
def test_bits_of_one_process(kind: str) -> None:
    """BatchNorm, dropout and other draws in later stages, in-place operations, skips, short batches."""
    assert_same(spread.train, kind)


@pytest.mark.wide
def test_bits_with_one_replica() -> None:
    assert_same(spread.train, "list", replicas=1, meshes=[(2, "1x2"), (3, "1x3")])


@pytest.mark.wide(beyond=1)
@pytest.mark.parametrize(
    ("job", "args"),
    [
        (jobs.train_conv, ({}, {})),
        (jobs.train_gan, ()),
        (jobs.train_adamw, ("bf16",)),
        (jobs.train_adamw, ("fp16",)),
    ],
)
def test_bits_of_other_jobs(job: Any, args: tuple[Any, ...]) -> None:
    assert_same(job, *args, meshes=[(4, "2x2")])


@pytest.mark.wide
def test_bits_of_resnet18_with_dropout() -> None:
    assert_same(jobs.train_resnet, meshes=[(3, "1x3"), (4, "2x2")])


@pytest.mark.wide(beyond=1)
@pytest.mark.parametrize("job", [spread.train_both_ways, spread.train_below_a_critic])
def test_gradients_go_from_one_model_to_the_other(job: Any) -> None:
    assert_same(job, meshes=[(2, "1x2"), (4, "2x2")])


@pytest.mark.wide(beyond=1)
@pytest.mark.parametrize("exchange", ["tree", "native"])
def test_every_exact_exchange(exchange: str) -> None:
    (expected,) = run_ranks(jobs.train_conv, 1, {"replicas": 2}, {})
    settings = {"replicas": 2, "strategy": "pipeline", "mesh": "2x2", "exchange": exchange}
    assert run_ranks(jobs.train_conv, 4, settings, {}) == [expected] * 4


def test_a_mesh_of_whole_models_is_what_ddp_does() -> None:
    (expected,) = run_ranks(jobs.train_conv, 1, {"replicas": 2}, {})
    settings = {"replicas": 2, "strategy": "pipeline", "mesh": "2x1"}
    assert run_ranks(jobs.train_conv, 2, settings, {}) == [expected] * 2


def test_frozen_parts_gradients_of_inputs_and_averages() -> None:
    """Each is a few steps; in one launch, as starting ranks takes longer than that."""
    assert_same(spread.train_in_corners, replicas=2, meshes=[(3, "1x3"), (4, "2x2")])


# --- chunks ----------------------------------------------------------------------------------------


@pytest.mark.wide(beyond=1)
@pytest.mark.parametrize("chunks", [3, 64])
def test_chunks_are_the_same_mathematics(chunks: int) -> None:
    """The last batch has 4 samples, which 3 chunks share unevenly and 64 cannot share."""
    ((_, _, loss, weights),) = run_ranks(spread.train_chunks, 1, chunks, environ=environ(None, 1))
    for ranks, mesh in [(2, "1x2"), (3, "1x3")]:
        found = run_ranks(spread.train_chunks, ranks, chunks, environ=environ(mesh, 1))
        for digest, exactness, own_loss, own in found:
            assert digest == found[0][0]
            assert exactness == "close"
            assert own_loss == pytest.approx(loss, rel=1e-5)
            assert own == pytest.approx(weights, rel=1e-4, abs=1e-5)


def test_a_mask_as_long_as_the_batch_is_not_cut() -> None:
    (expected,) = run_ranks(spread.train_masked, 1, environ=environ(None, 1))
    for found in run_ranks(spread.train_masked, 2, ["x"], environ=environ("1x2", 1)):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)
    with pytest.raises(RankError, match=r"called with 2 tensors \(x, mask\) and chunks=2"):
        run_ranks(spread.train_masked, 2, environ=environ("1x2", 1))


def test_as_many_chunks_as_stages_unless_asked_otherwise() -> None:
    two = run_ranks(spread.train_chunks, 2, 2, environ=environ("1x2", 1))
    assert run_ranks(spread.train_chunks, 2, None, environ=environ("1x2", 1)) == two
    (whole,) = {digest for digest, *_ in run_ranks(spread.train_chunks, 1, 2)}
    ((one, *_), _) = run_ranks(spread.train_chunks, 2, 1, environ=environ("1x2", 1))
    assert one == whole != two[0][0]


@pytest.mark.wide(beyond=1)
@pytest.mark.parametrize("middle", ["draws", "drops"])
def test_what_draws_draws_for_each_chunk(middle: str) -> None:
    found = run_ranks(spread.train_chunks, 2, 2, middle, environ=environ("1x2", 1))
    assert [exactness for _, exactness, *_ in found] == ["approximate"] * 2


def test_batchnorm_sees_each_chunk() -> None:
    ((_, _, loss, _),) = run_ranks(spread.train_chunks, 1, 2, "norm", environ=environ(None, 1))
    ((_, exactness, own, _), _) = run_ranks(
        spread.train_chunks, 2, 2, "norm", environ=environ("1x2", 1)
    )
    assert exactness == "approximate"
    assert own == pytest.approx(loss, rel=0.5)
    assert own != pytest.approx(loss, rel=1e-4)


# --- state -----------------------------------------------------------------------------------------


@pytest.mark.wide
def test_a_run_goes_on_with_other_meshes_and_strategies(tmp_path) -> None:
    (whole,) = run_ranks(
        spread.go_on, 1, str(tmp_path / "whole"), "auto", None, environ=environ(None)
    )
    place = str(tmp_path / "run")
    for ranks, strategy, mesh in [(4, "pipeline", "2x2"), (2, "ddp", None)]:
        faults = {"LOCKSTEP_FAULTS": "term@4", "LOCKSTEP_REPLICAS": "4"}
        if strategy == "ddp":  # goes on after a step that nobody knows beforehand
            faults["LOCKSTEP_FAULTS"] = "term@70"
        told = run_ranks(spread.go_on, ranks, place, strategy, mesh, 0.02, environ=faults)
        assert told == ["preempted"] * ranks, (strategy, mesh)
    assert run_ranks(spread.go_on, 2, place, "pipeline", "1x2", environ={}) == [whole] * 2


def test_ranks_hold_their_own_stage_only() -> None:
    found = run_ranks(spread.held, 3, environ=environ("1x3"))
    sizes = [own for own, _, _ in found]
    assert sizes == [6 * 8 + 8, 0, 8 + 8 + 8 * 4 + 4]
    for _, whole, said in found:
        assert whole == sum(sizes)
        refused, copied = said
        assert "this rank has one stage of it" in refused
        assert "run.export(path)" in refused
        assert "copy the module before run.model" in copied


def test_export_and_load() -> None:
    assert run_ranks(spread.exported, 4, environ=environ("2x2")) == [True] * 4


# --- what goes wrong -------------------------------------------------------------------------------


@pytest.mark.wide(beyond=3)
@pytest.mark.parametrize(
    ("ranks", "model", "settings", "more", "match"),
    [
        (4, "list", {}, {}, "pipeline stages don't fit ranks: 3 modules in a row for 4 ranks"),
        (2, "list", {"chunks": 0}, {}, "chunks is 0; expected an integer of at least 1"),
        (2, "list", {"chunks": 2}, {}, "chunks=2 would break the promise"),
        (2, "skipping", {"split": ["tail"]}, {}, "split names 'tail'"),
        (2, "list", {"chunk_inputs": ["x"]}, {}, "chunk_inputs is .'x'.; expected .* input"),
        (2, "list", {"chunk_inputs": 3}, {}, "chunk_inputs is 3; expected a list of one or more"),
        (2, "list", {"chunk_inputs": []}, {}, r"chunk_inputs is \[\]; expected a list of one"),
        (
            2,
            "list",
            {},
            {"exchange": "powersgd", "exact": False},
            "exchange=powersgd with strategy=pipeline",
        ),
        (2, "list", {"bucket_cap": 3}, {}, "has no setting bucket_cap"),
    ],
)
def test_settings_that_cannot_be(
    ranks: int, model: str, settings: dict[str, Any], more: dict[str, Any], match: str
) -> None:
    job = {"strategy": "pipeline", **more}
    with pytest.raises(RankError, match=match):
        run_ranks(_hold, ranks, model, settings, job)


def _hold(model: str, settings: dict[str, Any], more: dict[str, Any]) -> None:
    spread.hold(model, settings, **more)


def test_settings_of_a_pipeline_are_nothing_to_other_strategies() -> None:
    (nothing,) = run_ranks(_hold, 1, "list", {"chunks": 1, "split": ["1"], "plan": {}}, {})
    assert nothing is None


def test_a_second_backward_pass() -> None:
    with pytest.raises(RankError, match="a second backward pass through one call of the model"):
        run_ranks(spread.backward_twice, 2, environ=environ("1x2", 1))


def test_an_input_that_cannot_be_cut() -> None:
    with pytest.raises(RankError, match="was called with something else than tensors"):
        run_ranks(spread.call_with, 2, {1, 2}, environ=environ("1x2", 1))


@pytest.mark.wide(beyond=1)
@pytest.mark.parametrize(
    ("where", "match"),
    [
        (
            "before",
            r"forward pass of call 1 .*, outside of a loop, at spread\.py:\d+[,;]",
        ),
        ("inside", r"the (forward pass of call 2|backward pass of call 1) of model 0"),
        ("noise", "calls Sequential at spread.* with another input than rank"),
    ],
)
def test_a_rank_that_calls_the_model_by_itself(where: str, match: str) -> None:
    with pytest.raises(RankError, match=match):
        run_ranks(spread.call_alone, 2, where, environ=environ("1x2", 1))


@pytest.mark.wide
def test_gradients_of_gradients() -> None:
    with pytest.raises(RankError, match="create_graph=True through a model in stages"):
        run_ranks(spread.differentiate_twice, 2, environ=environ("1x2", 1))
