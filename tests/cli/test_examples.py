"""The examples run, and reach what they say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import Lockstep
from tests.template import Template

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = pytest.mark.forked


@pytest.fixture
def template(examples_template: Template) -> Template:
    """The process that commands are forked from."""
    return examples_template


def test_digits_reach_97_percent_on_two_ranks(lockstep: Lockstep) -> None:
    done = lockstep("run", "-n", "2", str(EXAMPLES / "digits.py"), timeout=120)
    assert done.code == 0, done.err
    accuracies = re.findall(r"^test accuracy ([\d.]+)%$", done.out, re.MULTILINE)
    assert len(accuracies) == 15
    assert float(accuracies[-1]) >= 97


@pytest.mark.wide
def test_digits_are_the_same_on_1_and_3_ranks(lockstep: Lockstep) -> None:
    script = str(EXAMPLES / "digits.py")
    done = lockstep("verify", script, "--layouts", "1,3", "--", "--epochs", "1", timeout=120)
    assert done.code == 0, done.out + done.err


@pytest.mark.wide
def test_stages_of_a_pipeline_give_the_weights_of_whole_models(lockstep: Lockstep) -> None:
    script = str(EXAMPLES / "pipeline.py")
    words = ("--strategies", "ddp,pipeline", "--layouts", "2", script, "--", "--epochs", "1")
    done = lockstep("verify", *words, timeout=120)
    assert done.code == 0, done.out + done.err
    assert "same: yes" in done.out


@pytest.mark.wide
def test_digits_are_cut_into_stages_as_they_are(lockstep: Lockstep) -> None:
    script = str(EXAMPLES / "digits.py")
    one = lockstep("run", script, "--epochs", "1", timeout=120)
    words = ("-n", "4", "--strategy", "pipeline", "--mesh", "2x2", "--threads", "1")
    four = lockstep("run", *words, script, "--epochs", "1", timeout=120)
    assert four.code == 0, four.err
    assert "Net in 2 stages: features (0.08 MB); head (0.04 MB); 1 chunk per batch" in four.err
    assert _digest(four.out) == _digest(one.out)


@pytest.mark.wide
def test_two_dimensions_learn(lockstep: Lockstep) -> None:
    script = str(EXAMPLES / "two_d.py")
    done = lockstep("run", "-n", "4", "--mesh", "2x2", script, "--epochs", "3", timeout=120)
    assert done.code == 0, done.err
    accuracies = re.findall(r"^test accuracy ([\d.]+)%$", done.out, re.MULTILINE)
    assert len(accuracies) == 3
    assert float(accuracies[-1]) >= 80
    assert "lockstep: two-d: close, " in done.err


def _digest(text: str) -> str:
    (found,) = re.findall(r"digest=(sha256:[0-9a-f]{64})", text)
    return str(found)
