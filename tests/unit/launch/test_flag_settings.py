"""Settings of a launch, from flags and from variables."""

from __future__ import annotations

import pytest

from lockstep.errors import UsageError
from lockstep.launch.flag_settings import FlagSettings


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"max_restarts": -1}, "--max-restarts is -1; expected at least 0"),
        ({"keep": 0}, "--keep is 0; expected at least 1"),
        ({"checkpoint_every": -1.0}, "--checkpoint-every is -1.0; expected at least 0"),
        ({"hang_timeout": float("nan")}, "--hang-timeout is nan; expected at least 0"),
        ({"preempt_signal": "KILL"}, "--preempt-signal is 'KILL'; expected the name of a signal"),
        ({"preempt_signal": "10"}, "--preempt-signal is '10'; expected the name of a signal"),
    ],
)
def test_values_that_cannot_work(wrong, said):
    with pytest.raises(UsageError, match=said):
        FlagSettings(**wrong)


def test_flags_win_over_variables_and_those_over_defaults():
    variables = {
        "LOCKSTEP_MAX_RESTARTS": "7",
        "LOCKSTEP_PREEMPT_SIGNAL": "SIGUSR2",
        "LOCKSTEP_HANG_TIMEOUT": "2.5",
    }
    flags = FlagSettings(max_restarts=0, preempt_signal="usr1", hang_timeout=0)
    for given, environ, expected in (
        (FlagSettings(), {}, [None, None, 1800]),
        (FlagSettings(), variables, [7, "SIGUSR2", 2.5]),
        (flags, variables, [0, "usr1", 0]),
    ):
        names = ("max_restarts", "preempt_signal", "hang_timeout")
        assert [given.value_or_default(name, environ) for name in names] == expected


@pytest.mark.parametrize(
    ("name", "value"), [("LOCKSTEP_MAX_RESTARTS", "x"), ("LOCKSTEP_MAX_RESTARTS", "-1")]
)
def test_variables_that_cannot_work(name, value):
    with pytest.raises(UsageError, match=name):
        FlagSettings().value("max_restarts", {name: value})


def test_workers_get_what_concerns_them():
    given = FlagSettings(preempt_signal="SIGUSR1", checkpoint_every=5, keep=2, max_restarts=1)
    assert given.variables() == {
        "LOCKSTEP_PREEMPT_SIGNAL": "SIGUSR1",
        "LOCKSTEP_CHECKPOINT_EVERY": "5",
        "LOCKSTEP_KEEP": "2",
    }
