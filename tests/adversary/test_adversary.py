"""Training scripts as users write them: on three layouts, with a kill, preempted at an epoch's end.

`make test-adversary` runs all of them. Those that are not `wide` are part of `make test`.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.adversary.table import CASES, Case
from tests.adversary.verifying import ROOT, Verify
from tests.conftest import Lockstep

SCRIPTS = Path(__file__).parent / "scripts"

pytestmark = pytest.mark.forked


def chosen(*, refused: bool) -> list[object]:
    """Return the cases that are refused, or the others, each with the marks of its own."""
    return [
        pytest.param(case, id=case.name, marks=_marks(case))
        for case in CASES
        if bool(case.refused) == refused
    ]


def _marks(case: Case) -> list[pytest.MarkDecorator]:
    marks = [] if case.quick else [pytest.mark.wide]
    missing = [name for name in case.needs if importlib.util.find_spec(name) is None]
    if missing:
        reason = f"{', '.join(missing)} not installed: make test-adversary brings it"
        marks.append(pytest.mark.skip(reason=reason))
    if case.fault:
        marks.append(pytest.mark.xfail(reason=case.fault, strict=True))
    return marks


@pytest.mark.ranks(3)
@pytest.mark.parametrize("case", chosen(refused=False))
def test_the_same(verify: Verify, case: Case) -> None:
    verdict = verify(SCRIPTS / f"{case.name}.py", case.layouts)
    assert verdict.difference is None, verdict.difference.text
    assert verdict.holds, verdict.as_json()
    assert [outcome.kills for outcome in verdict.outcomes] == [0, 1, 0]
    assert [outcome.generations for outcome in verdict.outcomes] == [1, 2, 2]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", chosen(refused=True))
def test_refused(lockstep: Lockstep, case: Case) -> None:
    script = str(SCRIPTS / f"{case.name}.py")
    for ranks in range(case.ranks, 3):
        done = lockstep("run", "-n", str(ranks), script, env={"PYTHONPATH": str(ROOT)})
        assert done.code == 1, done.out + done.err
        assert case.refused in done.err
        assert "hint: " in done.err


def test_each_script_is_in_the_table() -> None:
    assert sorted(case.name for case in CASES) == sorted(file.stem for file in SCRIPTS.glob("*.py"))
