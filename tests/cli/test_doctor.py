"""`lockstep doctor` on one machine: its report, its exit codes (B6)."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.forked


def test_one_machine(lockstep):
    done = lockstep("doctor", "--json", "--run-dir", "kept/runs")
    assert done.code == 0, done.out + done.err
    report = json.loads(done.out)
    levels = {one["check"]: one["level"] for one in report["findings"]}
    assert (
        levels["training"]
        == levels["versions"]
        == levels["storage"]
        == levels["all-reduce"]
        == "ok"
    )
    assert levels["clocks"] == levels["links"] == "skipped"
    facts = report["facts"][report["nodes"][0]]
    assert facts["storage"]["place"] == str(lockstep.directory)
    assert facts["problems"] == {}
    assert list(lockstep.directory.iterdir()) == [], "nothing is left behind"


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--nnodes", "2"), "--nnodes is 2, but no rendezvous address is given"),
        (("--nnodes", "1:2", "--rdzv-endpoint", "a"), "--nnodes is 1:2; expected a number"),
        (("train.py",), "lockstep doctor takes no train.py"),
    ],
)
def test_refusals(lockstep, words, error):
    done = lockstep("doctor", *words)
    assert (done.code, done.out) == (2, "")
    assert f"lockstep: error: {error}" in done.err


def test_a_place_where_no_run_can_be_kept(lockstep):
    """/proc takes no new files."""
    done = lockstep("doctor", "--run-dir", "/proc/runs")
    assert done.code == 1
    (line,) = [one for one in done.out.splitlines() if one.startswith("failure")]
    assert line.split()[:2] == ["failure", "storage"]
    assert "/proc cannot be written: " in line
