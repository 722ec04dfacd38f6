"""The manual's page of errors lists every message that the code has."""

from __future__ import annotations

from lockstep.errors import LockstepError
from tests import errors_page


def test_the_messages_are_those_of_the_code() -> None:
    page = errors_page.PAGE.read_text()
    assert errors_page.written(page) == page, "python -m tests.errors_page writes them anew"


def test_each_kind_of_error_that_is_raised_is_there() -> None:
    found = errors_page.messages()
    assert "-n is …; expected at least 1 rank" in found["UsageError"]
    assert LockstepError.__name__ not in found, "each has a kind of its own"
    assert sum(map(len, found.values())) > 300
