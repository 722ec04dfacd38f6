"""Settings: flags, which come as variables, win over the script's arguments."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.errors import UsageError
from lockstep.training.settings import Settings, from_environment


@pytest.mark.parametrize(
    ("variable", "text", "name", "expected"),
    [
        ("LOCKSTEP_SEED", "-7", "seed", -7),
        ("LOCKSTEP_REPLICAS", "6", "replicas", 6),
        ("LOCKSTEP_EXACT", "0", "exact", False),
        ("LOCKSTEP_STRATEGY", "ddp", "strategy", "ddp"),
        ("LOCKSTEP_EXCHANGE", "tree", "exchange", "tree"),
        ("LOCKSTEP_PRECISION", "bf16", "precision", "bf16"),
        ("LOCKSTEP_SYNC_EVERY", "8", "sync_every", 8),
        ("LOCKSTEP_DEVICES", "cpu", "devices", "cpu"),
        ("LOCKSTEP_THREADS", "3", "threads", 3),
        ("LOCKSTEP_RUN_DIR", "/tmp/x", "run_dir", Path("/tmp/x")),
        ("LOCKSTEP_FRESH", "yes", "fresh", True),
        ("LOCKSTEP_PROGRESS", "off", "progress", False),
        ("LOCKSTEP_STOP_ON_NAN", "TRUE", "stop_on_nan", True),
        ("LOCKSTEP_TRACE", "t", "trace", Path("t")),
        ("LOCKSTEP_CHECKPOINT_EVERY", "0.5", "checkpoint_every", 0.5),
        ("LOCKSTEP_KEEP", "7", "keep", 7),
    ],
)
def test_a_variable_wins_over_the_script(variable, text, name, expected) -> None:
    script = Settings(name="run", seed=1, replicas=2, exact=True, threads=1, run_dir=Path("own"))
    assert getattr(script, name) != expected
    changed = from_environment(script, {variable: text, "LOCKSTEP_OTHER": "1"})
    assert getattr(changed, name) == expected
    assert from_environment(script, {}) == script


def test_the_name_is_the_scripts_own() -> None:
    assert from_environment(Settings(name="run"), {"LOCKSTEP_NAME": "other"}).name == "run"


def test_default_replicas_are_no_number_that_somebody_named() -> None:
    default = {"LOCKSTEP_DEFAULT_REPLICAS": "4"}
    settings = from_environment(Settings(name="run", replicas=2), default)
    assert (settings.replicas, settings.default_replicas) == (2, 4)
    assert from_environment(Settings(name="run"), default).replicas is None


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("LOCKSTEP_SEED", "one"),
        ("LOCKSTEP_REPLICAS", "2.5"),
        ("LOCKSTEP_DEFAULT_REPLICAS", "x"),
        ("LOCKSTEP_EXACT", "maybe"),
        ("LOCKSTEP_THREADS", ""),
        ("LOCKSTEP_CHECKPOINT_EVERY", "often"),
    ],
)
def test_a_variable_that_cannot_be_read_is_named(variable: str, text: str) -> None:
    with pytest.raises(UsageError, match=f"{variable} is '{text}'"):
        from_environment(Settings(name="run"), {variable: text})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": ""}, "the run's name is ''"),
        ({"name": "a/b"}, "the run's name is 'a/b'"),
        ({"seed": 1.5}, "seed is 1.5"),
        ({"seed": 2**63}, "expected an integer of 64 bits"),
        ({"replicas": 0}, "replicas is 0"),
        ({"threads": -1}, "threads is -1"),
        ({"threads": "two"}, "threads is 'two'"),
        ({"strategy": "fsdp9"}, "strategy is 'fsdp9'; expected one of auto"),
        ({"precision": "fp8"}, "precision is 'fp8'; expected one of fp32"),
    ],
)
def test_a_setting_that_makes_no_sense(settings: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        Settings(**{"name": "run", **settings})
    assert caught.value.exit_code == 2


def test_the_environment_is_checked_as_the_script_is() -> None:
    with pytest.raises(UsageError, match="replicas is 0"):
        from_environment(Settings(name="run"), {"LOCKSTEP_REPLICAS": "0"})


def test_a_run_reads_the_environment(make_run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_REPLICAS", "3")
    with make_run(replicas=2) as run:
        assert run.replicas == 3
