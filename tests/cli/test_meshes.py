"""Models over rows of ranks, through the launcher: what dies, and what cannot be (A5)."""

from __future__ import annotations

import pytest

from tests.conftest import Lockstep
from tests.distributed.small import SCRIPT, digest_of

pytestmark = pytest.mark.forked

LISTED = SCRIPT.replace("nn.Sequential(", "[").replace("nn.Linear(8, 2))", "nn.Linear(8, 2)]")


def test_ranks_that_are_killed_come_back(lockstep: Lockstep) -> None:
    """Snapshots of whole states, in the memory of a launcher whose ranks have parts."""
    lockstep.script(SCRIPT)
    expected = digest_of(lockstep.python("train.py").out)
    words = ("-n", "4", "--strategy", "pipeline", "--mesh", "2x2", "train.py")
    # The first snapshot is that of step 2; on a slow machine it may not be complete when step 3 begins.
    done = lockstep("run", *words, env={"LOCKSTEP_FAULTS": "kill@5"})
    assert done.code == 0, done.err
    assert digest_of(done.out) == expected
    assert "resuming after step" in done.err


@pytest.mark.wide
def test_a_list_of_modules_on_any_strategy(lockstep: Lockstep) -> None:
    lockstep.script(SCRIPT)
    expected = digest_of(lockstep.python("train.py").out)
    lockstep.script(LISTED)
    for words in (("-n", "1"), ("-n", "2"), ("-n", "3", "--strategy", "pipeline")):
        done = lockstep("run", *words, "train.py")
        assert done.code == 0, done.err
        assert digest_of(done.out) == expected


@pytest.mark.wide(beyond=1)
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("-n", "4", "--mesh", "3x2"), "a mesh of 3x2 has 6 ranks; the run has 4"),
        (("-n", "1", "--mesh", "1x2"), "a mesh of 1x2 has 2 ranks; the run has 1"),
        (("-n", "4"), "pipeline stages don't fit ranks: 3 modules in a row for 4 ranks"),
    ],
)
def test_meshes_that_cannot_be(lockstep: Lockstep, words: tuple[str, ...], message: str) -> None:
    lockstep.script(LISTED)
    done = lockstep("run", *words, "--strategy", "pipeline", "train.py")
    assert done.code == 2, done.err
    assert message in done.err
    assert "hint:" in done.err
    assert "Traceback" not in done.err


def test_an_entry_that_is_no_module(lockstep: Lockstep) -> None:
    lockstep.script(LISTED.replace("nn.Linear(8, 2)]", "len]"))
    done = lockstep("run", "-n", "2", "--strategy", "pipeline", "train.py")
    assert done.code == 1, done.err
    assert "entry 2 of the list given to run.model is a builtin_function" in done.err
    assert "Traceback" not in done.err


def test_a_plan_is_missing(lockstep: Lockstep) -> None:
    lockstep.script(SCRIPT)
    done = lockstep("run", "-n", "2", "--strategy", "tensor", "--no-exact", "train.py")
    assert done.code == 2, done.err
    assert "run.model was given no plan for Sequential" in done.err


def test_a_rank_that_leaves_its_row_is_named(lockstep: Lockstep) -> None:
    leaving = "for x, y in run.loader(data, batch_size=8, shuffle=True):"
    text = LISTED.replace("replicas=4", "replicas=1")
    lockstep.script(
        text.replace(
            leaving, leaving + "\n                if run.step == 2 and run.world.rank: break"
        )
    )
    done = lockstep("run", "-n", "2", "--strategy", "pipeline", "train.py")
    assert done.code == 1, done.err
    assert "EarlyExitError: rank 1 left this loop in batch 2" in done.err
