"""The audit from outside: what a user sees of it, and what `lockstep run` and `verify` do with it."""

from __future__ import annotations

import json
import re
import shutil
import socket
from typing import Any

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


NAMED = "rank {} (node 0, cpu, host "
ODD = "computes something else than the other ranks"
SAVES = "run.save() if run.step % 3 == 2 else None"  # after steps 3, 6, 9 and so on


def flips(lockstep, rank: int, *words: str, ranks: str = "3", body: str = SAVES):
    """Run the script on ranks of which one flips a bit from step 10 on."""
    env = {"LOCKSTEP_FAULTS": f"flip:{rank}@10"}
    name = script(lockstep, body)
    return lockstep("run", "-n", ranks, "--run-dir", "run", *words, name, env=env, timeout=120)


def digest(done) -> str:
    return re.search(r"digest=(sha256:\w+)", done.out)[1]


def clean(lockstep) -> str:
    return digest(lockstep("run", "-n", "2", script(lockstep)))


def recorded(lockstep) -> dict[str, Any]:
    return json.loads((lockstep.directory / "run/run.json").read_text())


def checkpoints(lockstep) -> set[str]:
    return {path.name for path in lockstep.directory.glob("run/checkpoints/*")}


ASIDE = {f"unconfirmed-step-000000{step:02}" for step in (9, 12)}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_computes_wrongly_is_left_out_and_the_result_is_right(lockstep, rank):
    """Audits of steps 2, 4 and 8 agree, that of step 16 does not: what was saved after 8 does not count."""
    done = flips(lockstep, rank)
    assert done.code == 0, done.err
    assert f"lockstep: {NAMED.format(rank)}" in done.err
    assert f"{ODD}: replica " in done.err
    assert (
        f"; restart 1 without rank {rank}, from the newest state that an audit has conf" in done.err
    )
    assert "other losses" not in done.err, "computed again, they need not be what they were"
    assert digest(done) == clean(lockstep)
    first, second = recorded(lockstep)["generations"]
    assert (first["ranks"], second["ranks"]) == (3, 2)
    assert second["step"] in (6, 7, 8), "the checkpoint of step 6, or a snapshot in memory"
    (found,) = recorded(lockstep)["audits"]["found"]
    host, device = socket.gethostname(), "cpu"
    expected = {"step": 16, "confirmed": 8, "rank": rank, "host": host, "device": device}
    assert found == expected
    assert checkpoints(lockstep) >= ASIDE
    pytest.importorskip("plotly")
    assert lockstep("report", "run").code == 0
    page = (lockstep.directory / "run/report.html").read_text()
    assert (
        f"audit of step 16: rank {rank} on {host} (cpu) computes wrongly; confirmed up to" in page
    )
    assert "audits that found a difference" in page


def test_without_checkpoints_or_in_memory_only_confirmed_states_count(lockstep):
    done = flips(lockstep, 2, body="pass")
    assert done.code == 0, done.err
    assert digest(done) == clean(lockstep)
    assert recorded(lockstep)["generations"][1].get("step", 0) <= 8
    shutil.rmtree(lockstep.directory / "run")
    done = flips(lockstep, 2, "--audit", "1", body="pass")
    assert digest(done) == clean(lockstep)
    second = recorded(lockstep)["generations"][1]
    assert second["source"] == "memory"
    assert second["step"] <= 9


def test_without_restarts_it_is_named_and_the_next_launch_goes_back(lockstep):
    done = flips(lockstep, 2, "--max-restarts", "0")
    assert done.code == 1
    assert f"WrongRankError: {NAMED.format(2)}" in done.err
    assert "states are confirmed up to step 8, and the run continues from one of these" in done.err
    assert "renamed: unconfirmed-step-" in done.err
    # That of step 15 may have been unfinished.
    assert checkpoints(lockstep) - {"unconfirmed-step-00000015"} == {"step-00000006"} | ASIDE
    done = lockstep("run", "-n", "3", "--run-dir", "run", "train.py")
    assert done.code == 0, done.err
    assert digest(done) == clean(lockstep)
    assert recorded(lockstep)["generations"][1]["step"] == 6


def test_of_two_ranks_it_is_not_known_which_one_computes_wrongly(lockstep):
    done = flips(lockstep, 1, ranks="2")
    assert done.code == 1
    assert "AuditError: replica 3 in step 16, computed by rank" in done.err
    assert "or a processor computes wrongly" in done.err
    assert recorded(lockstep)["audits"]["found"] == [{"step": 16, "confirmed": 8}]
    assert len(recorded(lockstep)["generations"]) == 1, "no restart"
    assert checkpoints(lockstep) >= ASIDE


def test_one_rank_repeats_its_own_error_and_finds_nothing(lockstep):
    done = flips(lockstep, 0, ranks="1")
    assert done.code == 0, done.err
    assert digest(done) != clean(lockstep)
    assert recorded(lockstep)["audits"]["found"] == []


def test_a_variable_that_the_pass_changes_may_be_the_cause(lockstep):
    printed = 'count += loss.item(); print("sum", count)'
    done = flips(lockstep, 2, body=printed)
    assert done.code == 0, done.err
    assert "restart 1 without rank 2" in done.err
    shutil.rmtree(lockstep.directory / "run")
    computed = "count += loss.item(); loss = loss + 0 * count"
    done = flips(lockstep, 2, body=computed)
    assert done.code == 1
    assert f"if that does not matter to the loss, {NAMED.format(2)}" in done.err
    assert len(recorded(lockstep)["generations"]) == 1, "no restart"


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
