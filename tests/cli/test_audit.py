"""The audit from outside: what a user sees of it, and what `lockstep run` and `verify` do with it."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.forked, pytest.mark.ranks(3)]

SCRIPT = """
import torch, torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset
import lockstep

X = torch.randn(96, 8, generator=torch.Generator().manual_seed(0))
Y = X[:, :4].argmax(1)
with lockstep.Run("t", replicas=4, progress=False) as run:
    model = run.model(nn.Linear(8, 4))
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    train = run.loader(TensorDataset(X, Y), batch_size=16, shuffle=True)
    count = 0
    for epoch in run.epochs(3):
        for number, (x, y) in enumerate(train):
            loss = F.cross_entropy(model(x), y)
            BODY
            optimizer.zero_grad()
            run.backward(loss)
            optimizer.step()
            run.print("pass at", run.step)
"""
COUNTS = "count += 1; loss = loss * count"
LEAVES = "if number == 9: break"


def script(lockstep, body: str = "pass") -> str:
    return lockstep.script(SCRIPT.replace("BODY", body))


@pytest.mark.parametrize("ranks", ["1", "3"])
def test_a_counter_is_named_with_its_line(lockstep, ranks):
    done = lockstep("run", "-n", ranks, script(lockstep, COUNTS))
    assert done.code == 1
    assert "AuditError: replica" in done.err
    assert "the pass changed `count` (train.py:17) from" in done.err
    assert done.err.count("AuditError") == 1, "one verdict, and no restart"


def test_the_step_is_that_of_the_run(lockstep):
    """Loops before `run.epochs` do not count."""
    text = SCRIPT.replace("BODY", COUNTS)
    text = text.replace("    count = 0", "    count = run.sum(len(x) for x, y in train) * 0")
    done = lockstep("run", "-n", "1", lockstep.script(text))
    assert "AuditError: replica 3 in step 2, computed twice by rank 0" in done.err


def test_what_an_extra_pass_prints_by_the_run_is_not_shown(lockstep):
    """18 steps, of which some have an extra pass; with one replica per rank each pass prints once."""
    done = lockstep("run", "-n", "3", "--replicas", "3", script(lockstep))
    assert done.code == 0, done.err
    assert done.out.count("pass at") == 18


def test_a_flag_and_a_variable_switch_it_off(lockstep):
    for words, env in ((["--audit", "off"], {}), ([], {"LOCKSTEP_AUDIT": "off"})):
        done = lockstep("run", "-n", "1", *words, script(lockstep, COUNTS), env=env)
        assert done.code == 0, done.err


@pytest.mark.parametrize("value", ["never", "0", "-1", "1.5"])
def test_a_value_that_is_none(lockstep, value):
    done = lockstep("run", "-n", "1", f"--audit={value}", script(lockstep))
    assert done.code == 2
    assert f"--audit is '{value}'; expected off, first or a number of steps" in done.err


def test_a_loop_that_is_left_by_a_count_of_microbatches_is_told(lockstep):
    text = SCRIPT.replace("BODY", LEAVES).replace('"pass at", run.step', '"pass"')
    done = lockstep("run", "-n", "1", lockstep.script(text))
    assert "a loop was left early, and `number` (train.py:15) counts microbatches" in done.err


ISLICE = "for number, (x, y) in enumerate(itertools.islice(train, 6)):"
NEXT = "for number in range(6):\n            x, y = next(stream)"


@pytest.mark.parametrize(
    ("loop", "told"),
    [
        (ISLICE, "a loop was left early; a count of microbatches, also that of itertools.islice"),
        (NEXT, "train.py:16 takes microbatches by next()"),
    ],
)
def test_loops_that_are_limited_from_outside_are_told(lockstep, loop, told):
    text = SCRIPT.replace("BODY", "pass").replace('"pass at", run.step', '"pass"')
    text = text.replace("import torch,", "import itertools, torch,")
    stream = "itertools.chain.from_iterable(itertools.repeat(train, 9))"
    text = text.replace("    count = 0", f"    stream = {stream}")
    text = text.replace("for number, (x, y) in enumerate(train):", loop)
    done = lockstep("run", "-n", "2", "--replicas", "2", lockstep.script(text))
    assert told in done.err


def test_a_rank_that_computes_wrongly_is_named(lockstep):
    fault = {"LOCKSTEP_FAULTS": "flip@5"}
    done = lockstep("run", "-n", "3", script(lockstep), env=fault)
    assert done.code == 1
    assert "rank 2 (node 0, cpu) computes something else than the other ranks" in done.err
    assert "the last audit that agreed was at step 4" in done.err
    printed = 'count += loss.item(); print("sum", count)'
    done = lockstep("run", "-n", "3", script(lockstep, printed), env=fault)
    assert "rank 2 (node 0, cpu) computes something else than the other ranks" in done.err
    computed = "count += loss.item(); loss = loss + 0 * count"
    done = lockstep("run", "-n", "3", script(lockstep, computed), env=fault)
    assert done.code == 1
    assert "if that does not matter to the loss, rank 2 (node 0, cpu) computes wrongly" in done.err


def test_servers_that_sum(lockstep):
    for body, code in (("pass", 0), (COUNTS, 1)):
        words = ["-n", "2", "--strategy", "ps", "--servers", "1", script(lockstep, body)]
        assert lockstep("run", *words).code == code


def test_verify_has_it_whatever_the_script_says(lockstep):
    text = SCRIPT.replace("BODY", COUNTS).replace('"t", ', '"t", audit="off", ')
    name = lockstep.script(text)
    assert lockstep("run", "-n", "1", name).code == 0
    done = lockstep("verify", name, "--layouts", "1", "2", timeout=120)
    assert done.code == 3
    assert "same: no" in done.out
    assert done.err.count("AuditError: replica") == 2, "on each layout"
