"""Diffs in the manual and the README are those of the files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import ports


@pytest.mark.parametrize("page", ports.PAGES, ids=lambda page: page.name)
def test_the_diffs_are_those_of_the_files(page: Path) -> None:
    text = page.read_text()
    assert ports.names(text)
    assert ports.written(text) == text, "python -m tests.ports writes the diffs anew"


def test_forms_without_lockstep_do_not_know_it() -> None:
    for page in ports.PAGES:
        for name in ports.names(page.read_text()):
            text = ports.files(name)[0].read_text()
            assert "lockstep" not in text
            assert "run." not in text
