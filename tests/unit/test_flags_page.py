"""The manual's page of commands holds every flag that the parsers take."""

from __future__ import annotations

import re

from lockstep.cli import whole_parser
from tests import flags_page


def test_the_page_is_current() -> None:
    assert flags_page.PAGE.read_text() == flags_page.written(), (
        "python -m tests.flags_page writes it anew"
    )


def test_each_flag_is_on_the_page() -> None:
    sections = dict(re.findall(r"(?ms)^## lockstep (\w+)\n(.*?)(?=^## |\Z)", flags_page.written()))
    verbs = whole_parser().verbs
    assert sections.keys() == verbs.keys()
    for name, verb in verbs.items():
        linked = [
            sections[other] for other in re.findall(r"as in \[`lockstep (\w+)`", sections[name])
        ]
        text = "".join([sections[name], *linked])
        flags = {flag for action in verb._actions for flag in action.option_strings} - {
            "-h",
            "--help",
        }
        assert not [flag for flag in flags if f"`{flag}" not in text], name
