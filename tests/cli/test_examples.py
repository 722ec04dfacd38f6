"""The examples run, and reach what they say."""

from __future__ import annotations

import re
from pathlib import Path

from tests.conftest import Lockstep

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_digits_reach_97_percent_on_two_ranks(lockstep: Lockstep) -> None:
    done = lockstep("run", "-n", "2", str(EXAMPLES / "digits.py"), timeout=120)
    assert done.code == 0, done.err
    accuracies = re.findall(r"^test accuracy ([\d.]+)%$", done.out, re.MULTILINE)
    assert len(accuracies) == 15
    assert float(accuracies[-1]) >= 97


def test_digits_are_the_same_on_1_and_3_ranks(lockstep: Lockstep) -> None:
    script = str(EXAMPLES / "digits.py")
    done = lockstep("verify", script, "--layouts", "1,3", "--", "--epochs", "1", timeout=120)
    assert done.code == 0, done.out + done.err
