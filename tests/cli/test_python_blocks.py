"""Python code blocks of the README and the manual run as they stand there."""

from __future__ import annotations

import shlex
from collections import Counter

import pytest

from tests.blocks import REASONS, Script, blocks, scripts
from tests.conftest import Lockstep
from tests.console import PAGES

pytestmark = pytest.mark.forked

SCRIPTS = list(scripts())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("script", [pytest.param(one, id=one.name) for one in SCRIPTS])
def test_a_block_runs_as_it_stands(script: Script, lockstep: Lockstep) -> None:
    if script.reason:
        assert script.reason in REASONS
        pytest.skip(script.reason)
    name = lockstep.script(script.text, "test_block.py")
    program, *words = shlex.split(script.command)
    run = lockstep if program == "lockstep" else lockstep.python
    done = run(*words, name, env={"LOCKSTEP_PROGRESS": "0"}, timeout=120)
    assert done.code == (1 if script.error else 0), done.out + done.err
    assert script.error in done.err


def test_each_block_is_code() -> None:
    for page in PAGES:
        for block in blocks(page):
            compile(block.code, f"{page}:{block.line}", "exec")


def test_most_blocks_are_run() -> None:
    counts = Counter(script.reason for script in SCRIPTS)
    assert counts[""] >= 25
    assert set(counts) <= {"", *REASONS}
