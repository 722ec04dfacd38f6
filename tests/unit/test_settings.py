"""Settings: one table; flags, which come as variables, win over the script's arguments."""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from pathlib import Path

import pytest

from lockstep.cli import setting_flags, whole_parser
from lockstep.errors import UsageError
from lockstep.launch.flag_settings import FlagSettings
from lockstep.settings import OF_RUNS, OF_SCRIPTS, TABLE, Setting, Settings, from_environment
from tests import settings_page


def test_a_run_takes_what_the_table_says() -> None:
    from lockstep import Run

    given = dict(inspect.signature(Run.__init__).parameters)
    # Who a rank is and where it meets the others is no setting.
    others = {"self", "name", "init_method", "rank", "world_size", "store"}
    assert {name: one.default for name, one in given.items() if name not in others} == {
        name: TABLE[name].default for name in OF_SCRIPTS
    }
    types = {one.name: one.type for one in dataclasses.fields(Settings)}
    wider = {"run_dir": "str | Path | None", "loggers": "Sequence[Any]"}
    for name in OF_SCRIPTS:
        assert given[name].annotation == wider.get(name, types[name])
        assert f"\n        {name}: " in (Run.__doc__ or ""), "each is explained"


def test_each_setting_has_the_type_that_its_text_is_read_as() -> None:
    types = typing.get_type_hints(Settings)
    samples = {int: "2", float: "2.5", Path: "x", str: "x", bool: "1"}
    for name in set(OF_RUNS) - {"loggers"}:
        wanted, *_ = typing.get_args(types[name]) or (types[name],)
        assert isinstance(TABLE[name].parse(samples[wanted]), wanted), name
        assert TABLE[name].default is None or type(TABLE[name].default) is wanted, name


def test_the_page_of_the_manual_is_current() -> None:
    page = settings_page.PAGE.read_text()
    assert page == settings_page.written(), "python -m tests.settings_page writes it anew"
    for target in re.findall(r"\]\(([\w./-]+\.md)", page):
        assert (settings_page.PAGE.parent / target).is_file(), target


@pytest.mark.parametrize("verb", ["run", "submit", "verify", "bench"])
def test_flags_that_are_not_given_say_nothing(verb: str) -> None:
    options = whole_parser().parse_args([verb, "train.py"])
    assert setting_flags.given(options, setting_flags.SHARED) == {}
    assert setting_flags.words(options, setting_flags.SHARED) == []


@pytest.mark.parametrize("group", ["layout", "training", "fault tolerance", "records", "torchrun"])
def test_a_row_of_the_table_is_all_that_a_flag_needs(
    group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = Setting(name="depth", help="how deep", parse=int, flag=(group, "--depth D"))
    monkeypatch.setitem(TABLE, "depth", row)
    options = whole_parser().parse_args(["run", "--depth", "3", "train.py"])
    assert setting_flags.given(options, ["depth"]) == {"depth": 3}


def test_flags_are_read_and_handed_on_as_they_were_given() -> None:
    words = ["--replicas", "4", "--strategy", "fsdp", "--sync-every", "8", "--mesh", "2x1"]
    words += ["--staleness", "0", "--no-exact"]
    options = whole_parser().parse_args(["verify", *words, "train.py"])
    found = setting_flags.given(options, setting_flags.SHARED)
    assert found == {
        "replicas": 4,
        "exact": False,
        "strategy": "fsdp",
        "sync_every": 8,
        "mesh": "2x1",
        "staleness": 0,
    }
    handed_on = setting_flags.words(options, setting_flags.SHARED)
    assert (
        setting_flags.given(
            whole_parser().parse_args(["run", *handed_on, "train.py"]), setting_flags.SHARED
        )
        == found
    )


def test_flags_become_variables_that_ranks_read_as_the_same_values() -> None:
    values = {
        "replicas": 4,
        "exact": False,
        "strategy": "fsdp",
        "mesh": "2x1",
        "run_dir": Path("a b"),
        "fresh": True,
        "checkpoint_every": 2.5,
        "loggers": ("tensorboard",),
    }
    read = from_environment(Settings(name="run"), FlagSettings(**values).variables())
    assert {name: getattr(read, name) for name in values} == values
    assert FlagSettings().variables() == {}


def test_flags_of_launchers_are_not_forwarded() -> None:
    assert FlagSettings(max_restarts=2, hang_timeout=3.0).variables() == {}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"strategy": "zero"}, "--strategy is 'zero'; expected one of "),
        ({"exchange": "ring"}, "--exchange is 'ring'; expected one of "),
        ({"precision": "int8"}, "--precision is 'int8'; expected one of "),
        ({"mesh": "2y2"}, "--mesh is '2y2'; expected DATAxMODEL"),
        ({"devices": "tpu"}, "--devices is 'tpu'; expected auto"),
        ({"sync_every": 0}, "--sync-every is 0; expected at least 1"),
        ({"servers": -1}, "--servers is -1; expected at least 0"),
        ({"replicas": 0}, "--replicas is 0; expected at least 1"),
        ({"bind": "tight"}, "--bind is 'tight'; expected one of none, cores"),
        ({"loggers": ("printer",)}, "a logger is 'printer'; expected one of"),
    ],
)
def test_a_flag_that_makes_no_sense(given: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        FlagSettings(**given)
    assert caught.value.exit_code == 2


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
        ("LOCKSTEP_CHECKPOINT_EVERY", "inf"),
        ("LOCKSTEP_STRATEGY", ""),
    ],
)
def test_a_variable_that_cannot_be_read_is_named(variable: str, text: str) -> None:
    with pytest.raises(UsageError, match=f"{variable} is '?{text}'?; expected"):
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
        (
            {"run_dir": Path("s3://bucket/run")},
            "run_dir is the URL s3://bucket/run; expected a direct",
        ),
        ({"precision": "fp8"}, "precision is 'fp8'; expected one of fp32"),
    ],
)
def test_a_setting_that_makes_no_sense(settings: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        Settings(**{"name": "run", **settings})
    assert caught.value.exit_code == 2


def test_the_environment_is_checked_as_the_script_is() -> None:
    with pytest.raises(UsageError, match="LOCKSTEP_REPLICAS is 0; expected at least 1"):
        from_environment(Settings(name="run"), {"LOCKSTEP_REPLICAS": "0"})


def test_a_run_reads_the_environment(make_run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_REPLICAS", "3")
    with make_run(replicas=2) as run:
        assert run.replicas == 3
