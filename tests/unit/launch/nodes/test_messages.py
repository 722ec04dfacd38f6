"""Verdicts that other launchers are told of: the longest that a message holds, and one that is longer."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from lockstep.launch.agent.failure import Decision, FailureReport, Verdict
from lockstep.launch.nodes.messages import LINE, Answer, shortened_failure
from lockstep.state.record import error_report


def told(length: int) -> FailureReport:
    """What is told of a verdict so long that its message has `length` bytes."""

    def of(text: str) -> FailureReport:
        verdict = Verdict(text=text, exit_code=1, name="rank 1", traceback=None, brief="x")
        return FailureReport(verdict=verdict, consequence=False, time=1.0)

    return of("a" * (length - len(json.dumps(asdict(of(""))))))


@pytest.mark.parametrize("size", [100_000, LINE // 2 - 1, LINE // 2])
def test_what_fits_is_told_as_it_is(size: int) -> None:
    one = told(size)
    assert len(json.dumps(asdict(one))) == size
    assert shortened_failure(one) is one
    assert answer(one) < LINE


@pytest.mark.parametrize("size", [LINE // 2 + 1, LINE, 2_000_000])
def test_what_is_too_long_says_so(size: int) -> None:
    one = shortened_failure(told(size))
    assert answer(one) < 2000
    assert one.verdict.text.startswith(
        f"lockstep: rank 1 failed, and its verdict of {size} bytes is too long for the other launchers; "
    )
    assert (one.verdict.exit_code, one.time) == (1, 1.0)


def answer(one: FailureReport) -> int:
    """The bytes of the answer that all launchers get."""
    decision = Decision(kind="end", text=one.verdict.brief, verdict=one.verdict)
    return len(json.dumps(asdict(Answer(decision=decision))))


@pytest.mark.parametrize("letter", ["x", "\n", "\x00", "ü", "\U0001f600"])
def test_a_verdict_of_any_exception_fits(letter: str) -> None:
    """The worst letters take twelve bytes each."""
    report = error_report.describe(ValueError(letter * 2_000_000), 1, None)
    assert "1991808 characters left out" in report.message
    text = f"{report.exception}: {report.message}"
    verdict = Verdict(text=text, exit_code=1, name="rank 1", traceback=report.traceback, brief=text)
    one = FailureReport(verdict=verdict, consequence=False, time=1.0)
    assert shortened_failure(one) is one
    assert answer(one) < LINE


def test_a_message_is_whole_up_to_the_limit() -> None:
    for length in (8191, 8192):
        assert error_report.describe(ValueError("x" * length), 0, None).message == "x" * length
    longer = error_report.describe(ValueError("a" * 4096 + "!" + "b" * 4096), 0, None).message
    assert longer == "a" * 4096 + "\n… (1 characters left out) …\n" + "b" * 4096
