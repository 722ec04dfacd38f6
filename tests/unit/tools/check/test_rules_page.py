"""The manual's page of `lockstep check` has every rule, in the rules' own words."""

from __future__ import annotations

from tests import rules_page


def test_the_rules_are_those_of_the_code() -> None:
    page = rules_page.PAGE.read_text()
    assert rules_page.written(page) == page, "python -m tests.rules_page writes them anew"
