"""The order of sets of strings is the same in each launch, unless the user chooses a seed."""

from __future__ import annotations

import pytest

SCRIPT = """
print(*set("the cat sat on the mat and the dog lay by the door of the old red barn".split()))
"""


@pytest.mark.ranks(2)
def test_the_words_of_a_set(lockstep):
    place = lockstep.script(SCRIPT)
    launches = [
        lockstep("run", "-n", "1", place),
        lockstep("run", "-n", "2", "--start", "spawn", place),
        lockstep("run", "-n", "1", place, env={"PYTHONHASHSEED": "1"}),
    ]
    assert [done.code for done in launches] == [0] * 3, [done.err for done in launches]
    first, both, chosen = (set(done.out.splitlines()) for done in launches)
    assert len(first) == 1
    assert both == first
    assert chosen != first
