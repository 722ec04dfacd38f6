"""What the user says of failures, in flags and in variables."""

from __future__ import annotations

import signal

import pytest

from lockstep.errors import UsageError
from lockstep.launch.fault_tolerance import FaultTolerance
from lockstep.launch.given import Given


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
        Given(**wrong)


def test_flags_win_over_variables_and_those_over_defaults():
    variables = {
        "LOCKSTEP_MAX_RESTARTS": "7",
        "LOCKSTEP_PREEMPT_SIGNAL": "SIGUSR2",
        "LOCKSTEP_HANG_TIMEOUT": "2.5",
    }
    flags = FaultTolerance(Given(max_restarts=0, preempt_signal="usr1", hang_timeout=0))
    for said, environ, expected in (
        (FaultTolerance(), {}, (None, None, 1800)),
        (FaultTolerance(), variables, (7, signal.SIGUSR2, 2.5)),
        (flags, variables, (0, signal.SIGUSR1, 0)),
    ):
        found = (
            said.restarts(environ),
            said.preemption(environ),
            said.patience(environ),
        )
        assert found == expected


@pytest.mark.parametrize(
    ("name", "value"), [("LOCKSTEP_MAX_RESTARTS", "x"), ("LOCKSTEP_MAX_RESTARTS", "-1")]
)
def test_variables_that_cannot_work(name, value):
    with pytest.raises(UsageError, match=name):
        FaultTolerance().restarts({name: value})


def test_workers_get_what_concerns_them():
    given = Given(preempt_signal="SIGUSR1", checkpoint_every=5, keep=2, max_restarts=1)
    assert given.variables() == {
        "LOCKSTEP_PREEMPT_SIGNAL": "SIGUSR1",
        "LOCKSTEP_CHECKPOINT_EVERY": "5",
        "LOCKSTEP_KEEP": "2",
    }
