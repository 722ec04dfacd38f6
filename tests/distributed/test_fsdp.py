"""A sharded model trains as a whole one does, bit for bit; and says what cannot be done with it (A5)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from lockstep.testing import RankError, run_ranks
from tests.distributed import jobs, sharded, test_resume

FSDP = {"LOCKSTEP_STRATEGY": "fsdp"}
#: (replicas, ranks): one replica on each, several, as many on each or not.
LAYOUTS = [(4, 1), (2, 2), (4, 2), (4, 3), (4, 4)]


#: Of those, where a script is another and layouts make no other difference.
SOME = [(4, 2), (4, 3)]


def same_on_all_layouts(
    function: Callable[..., Any], *args: Any, layouts: list[tuple[int, int]] = LAYOUTS
) -> None:
    """Every layout gives what one rank gives that holds the whole model."""
    expected: dict[int, Any] = {}
    for replicas, ranks in layouts:
        environ = {"LOCKSTEP_REPLICAS": str(replicas)}
        if replicas not in expected:
            (expected[replicas],) = run_ranks(function, 1, *args, environ=environ)
        found = run_ranks(function, ranks, *args, environ={**environ, **FSDP})
        assert found == [expected[replicas]] * ranks, f"{replicas} replicas on {ranks} ranks"


@pytest.mark.wide(beyond=1)
@pytest.mark.parametrize(
    "settings",
    [{}, {"reshard_after_forward": False}, {"gather": "batch"}],
    ids=["resharded", "kept", "batch"],
)
def test_a_net_with_batchnorm_dropout_and_an_uneven_last_batch(settings: dict[str, Any]) -> None:
    layouts = SOME if settings else LAYOUTS
    same_on_all_layouts(sharded.train_wrapped, [nn.Linear, "0"], settings, layouts=layouts)


@pytest.mark.wide(beyond=1)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_adamw_with_clipping_and_a_schedule(precision: str) -> None:
    same_on_all_layouts(jobs.train_adamw, precision, layouts=SOME)


@pytest.mark.wide
def test_resnet_18() -> None:
    expected = run_ranks(jobs.train_resnet, 1, environ={"LOCKSTEP_REPLICAS": "4"})
    found = run_ranks(jobs.train_resnet, 2, environ={"LOCKSTEP_REPLICAS": "4", **FSDP})
    assert found == expected * 2


@pytest.mark.wide(beyond=1)
@pytest.mark.parametrize(
    "job",
    [
        jobs.train_routed,  # parameters that nobody uses, or not all replicas
        jobs.train_gan,  # two models and passes over a batch
        jobs.train_frozen,
        jobs.train_two_models,  # one loss and one optimizer
        jobs.train_with_breaks,
        sharded.train_tangled,
        sharded.average_weights,
    ],
    ids=lambda job: job.__name__,
)
def test_models_of_other_kinds(job: Callable[[], Any]) -> None:
    same_on_all_layouts(job, layouts=SOME)


@pytest.mark.wide
def test_branches_that_not_all_replicas_use() -> None:
    same_on_all_layouts(sharded.train_branches, "batch")
    with pytest.raises(
        RankError, match=r"took no part in a forward pass|rank 0 is about to gather branches"
    ):
        run_ranks(sharded.train_branches, 2, "unit", environ=FSDP)


def test_units_in_another_order_on_another_rank() -> None:
    """Equally large units: the messages would fit."""
    with pytest.raises(
        RankError, match=r"rank 0 is about to gather layers\.[01], rank 1 layers\.[01]"
    ):
        run_ranks(sharded.train_crossed, 2, environ=FSDP)


def test_weights_leave_and_come_back_whole(tmp_path) -> None:
    trained, loaded, same = zip(
        *run_ranks(sharded.export_and_load, 2, str(tmp_path), environ=FSDP), strict=True
    )
    assert same == (True, True)
    assert set(trained) == set(loaded)


@pytest.mark.wide(beyond=1)
@pytest.mark.parametrize(
    ("parts", "last"),
    [
        ([(3, {}, "term@3", 0.1), (2, FSDP, "term@30", 0.1)], (1, {})),
        ([(3, FSDP, "term@3", 0.1), (1, {}, "term@45", 0.0)], (2, FSDP)),
    ],
    ids=["whole-sharded-whole", "sharded-whole-sharded"],
)
def test_a_run_goes_on_with_another_strategy(tmp_path, parts: Any, last: Any) -> None:
    """With a different number of ranks, too; slow enough that ranks agree before the end."""
    replicas = {"LOCKSTEP_REPLICAS": "3", "LOCKSTEP_THREADS": "1"}
    (whole,) = run_ranks(test_resume.train, 1, str(tmp_path / "whole"), environ=replicas)
    place = str(tmp_path / "run")
    for ranks, strategy, fault, slow in parts:
        environ = {**replicas, **strategy, "LOCKSTEP_FAULTS": fault}
        found = run_ranks(test_resume.train, ranks, place, slow, environ=environ)
        assert found == ["preempted"] * ranks
    ranks, strategy = last
    environ = {"LOCKSTEP_THREADS": "1", **strategy}
    assert run_ranks(test_resume.train, ranks, place, environ=environ) == [whole] * ranks


@pytest.mark.wide
def test_memory_per_rank_is_recorded(tmp_path) -> None:
    environ = {"LOCKSTEP_REPLICAS": "4"}
    (whole,) = run_ranks(sharded.memory_of, 1, str(tmp_path / "1"), 0, environ=environ)
    assert whole["kind"] == "memory"
    mebibytes = 2**20
    assert whole["parameters"] == whole["gradients"] == 16 * mebibytes
    assert whole["optimizer"] == 32 * mebibytes + 4 * 4  # and a number of steps for each
    assert whole["peak_host"] > 64 * mebibytes
    for ranks in (2, 4):
        place = str(tmp_path / f"{ranks}")
        for held in run_ranks(sharded.memory_of, ranks, place, 0, environ={**environ, **FSDP}):
            assert held["parameters"] == held["gradients"] == 16 * mebibytes // ranks
            assert held["optimizer"] == 32 * mebibytes // ranks + 4 * 4


def test_what_a_script_must_not_do() -> None:
    expected = {
        "state": "ModelError: Sequential.state_dict() was called",
        "part": "ModelError: FSDPLinear.state_dict() was called",
        "copy": "ModelError: copy.deepcopy of FSDPSequential, which is cut over ranks",
        "digest": "StepError: run.digest was called inside a microbatch",
        "export": "StepError: run.export was called inside a microbatch",
        "twice": "StepError: a gradient was taken with create_graph=True",
        "backward": "StepError: FSDPSequential got gradients outside of run.backward",
    }
    for told in run_ranks(sharded.misuse, 2, environ=FSDP):
        assert told.keys() == expected.keys()
        for how, text in expected.items():
            assert text.partition(": ")[2].split(maxsplit=1)[1] in told[how], told[how]
            assert told[how].startswith(text.partition(" ")[0]), told[how]


@pytest.mark.wide
def test_gradients_of_gradients() -> None:
    expected = run_ranks(sharded.train_with_penalty, 1, environ={"LOCKSTEP_REPLICAS": "2"})
    assert run_ranks(sharded.train_with_penalty, 2, environ=FSDP) == expected * 2
