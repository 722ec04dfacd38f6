"""Converted scripts train, and give one digest on one, two and three ranks."""

from __future__ import annotations

import pytest

from tests import converted
from tests.adversary.verifying import Verify

pytestmark = pytest.mark.forked

#: Those that `make test` runs.
QUICK = ("gan", "ddp_trainer")


@pytest.mark.wide(beyond=2)
@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in QUICK else [pytest.mark.wide])
        for name in converted.NAMES
        if name != "transfer"  # whose question has to be answered first
    ],
)
def test_a_converted_script_is_the_same_on_all_layouts(verify: Verify, name: str) -> None:
    script = verify.directory / f"{name}.py"
    script.write_text(converted.made(name).text)
    verdict = verify(script, ["1", "2", "3"])
    assert verdict.difference is None, verdict.difference.text
    assert verdict.holds, verdict.as_json()
