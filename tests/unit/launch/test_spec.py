from __future__ import annotations

import pytest

from lockstep.errors import UsageError
from lockstep.launch.spec import LaunchSpec, parse_ranks


@pytest.mark.parametrize(
    ("text", "value"), [("1", 1), ("16", 16), ("cpu", "cpu"), ("gpu", "gpu"), ("auto", "auto")]
)
def test_ranks_are_numbers_or_words(text, value):
    assert parse_ranks(text) == value


@pytest.mark.parametrize("text", ["", "2.5", "all", "1e3"])
def test_other_texts_are_refused(text):
    with pytest.raises(UsageError, match="expected a number of ranks"):
        parse_ranks(text)


@pytest.mark.parametrize(
    "wrong",
    [
        {"n": 0},
        {"n": True},
        {"n": "all"},
        {"start": "thread"},
        {"kind": "notebook"},
        {"signals": ("KILL",)},
        {"kind": "function", "start": "exec"},
    ],
)
def test_a_spec_is_valid_or_does_not_exist(wrong):
    with pytest.raises(UsageError):
        LaunchSpec(**{"target": "a.py", **wrong})


@pytest.mark.parametrize(
    ("target", "kind", "name"),
    [
        ("dir/train.py", "script", "train"),
        ("pkg.train", "module", "train"),
        ("main", "function", "main"),
    ],
)
def test_name(target, kind, name):
    assert LaunchSpec(target=target, kind=kind).name == name
