from __future__ import annotations

import pytest

from lockstep.errors import UsageError
from lockstep.world.devices_asked import parse


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("auto", "auto"),
        ("cpu", "cpu"),
        ("gpu", "gpu"),
        ("2", ("2",)),
        ("2,3", ("2", "3")),
        (" 02 , 3 ", ("2", "3")),
        ("GPU-8f5c1a2b", ("GPU-8f5c1a2b",)),
        (
            "GPU-754035b4-4708-efcd-b261-623aea38bcad,0",
            ("GPU-754035b4-4708-efcd-b261-623aea38bcad", "0"),
        ),
        (
            "MIG-41b3359c-e721-56e5-8009-12e5797ed514",
            ("MIG-41b3359c-e721-56e5-8009-12e5797ed514",),
        ),
        (
            "MIG-GPU-9de3d0e8-33f5-10dc-0c79-2c88a7ab0a23/2/0",
            ("MIG-GPU-9de3d0e8-33f5-10dc-0c79-2c88a7ab0a23/2/0",),
        ),
    ],
)
def test_words_and_lists(text, expected):
    assert parse(text, "--devices") == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "--devices is ''; expected auto"),
        ("tpu", "--devices is 'tpu'; expected auto"),
        ("-1", "--devices is '-1'; expected"),
        ("0-3", "--devices is '0-3'; expected"),
        ("2,", "'2,'; '' is no id"),
        ("2;3", "'2;3'; expected"),
        ("0,cpu", "'0,cpu'; 'cpu' is no id"),
        ("GPU-", "'GPU-'; expected"),
        ("GPU-xyz", "'GPU-xyz'; expected"),
        ("²", "'²'; expected"),
    ],
)
def test_anything_else_is_refused(text, said):
    with pytest.raises(UsageError) as caught:
        parse(text, "--devices")
    assert said in str(caught.value)
    assert "nvidia-smi -L" in str(caught.value)
