"""Each rule finds its own bad example, and nothing in its good one; and further cases of each."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.tools.check import editor, engine
from lockstep.tools.check.config import Selection
from lockstep.tools.check.rules import RULES
from tests.ports import ROOT

ALL = Selection(select=("ALL",))


def found(tmp_path: Path, text: str, *, flags: Selection = ALL) -> list[tuple[str, int]]:
    """Return code and line of all findings in a script."""
    script = tmp_path / "script.py"
    script.write_text(text)
    return [(one.code, one.line) for one in engine.check([script], flags).findings]


def only(code: str) -> Selection:
    return Selection(select=(code,))


@pytest.mark.parametrize("code", RULES)
def test_a_rule_finds_its_bad_example_and_not_its_good_one(code: str, tmp_path: Path) -> None:
    rule = RULES[code]
    assert found(tmp_path, rule.bad, flags=only(code)), "the bad example has no finding"
    assert not found(tmp_path, rule.good, flags=only(code)), "the good example has findings"


@pytest.mark.parametrize("code", RULES)
def test_examples_have_no_findings_of_other_rules_by_default(code: str, tmp_path: Path) -> None:
    assert not found(tmp_path, RULES[code].good, flags=Selection())


@pytest.mark.parametrize("code", [code for code, rule in RULES.items() if rule.fix])
def test_a_fix_mends_the_bad_example(code: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("# kept\n" + RULES[code].bad)
    outcome = engine.check([script], only(code))
    module, edits = outcome.edits[script]
    text = editor.apply(module, edits)
    assert text.startswith("# kept\n")
    assert found(tmp_path, text, flags=only(code)) == []
    assert editor.apply(module, ()) == module.text, "what is not edited stays"


def test_texts_are_whole() -> None:
    """What a finding puts in is in its own message: lists, SARIF and the manual show the rule's."""
    for rule in RULES.values():
        assert "{" not in rule.message + rule.name + rule.fix, rule.code
        assert rule.why.endswith((".", ".)")), rule.code


def test_the_examples_have_no_findings() -> None:
    """But for the one that shows how scripts were written in 2020: its option, and the loss of rank 0."""
    found = engine.check(engine.files([ROOT / "examples"])).findings
    expected = [("ddp_2020.py", "LS102"), ("ddp_2020.py", "LS501")]
    assert [(one.path.name, one.code) for one in found] == expected
