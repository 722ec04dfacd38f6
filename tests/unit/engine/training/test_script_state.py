"""`run.state`: variables of a script that stay over a crash."""

from __future__ import annotations

import json
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import lockstep
from lockstep.engine.recovery.script_state import ScriptState
from lockstep.errors import ModelError, UsageError, VariableError
from lockstep.state.checkpoint import state_codec

CPU = torch.device("cpu")


def test_names_that_were_given_are_read_written_and_deleted() -> None:
    state = ScriptState("state", {"best": 0.0, "snaps": []}, CPU)
    state.best = 0.5
    state.snaps.append(torch.ones(2))
    assert (state.best, len(state.snaps)) == (0.5, 1)
    assert {"best", "snaps"} <= set(dir(state))
    del state.snaps
    assert not hasattr(state, "snaps")
    assert repr(state) == "state(best=0.5)"


def test_other_names_are_an_error_that_says_which_there_are() -> None:
    state = ScriptState("state", {"best": 0.0, "ratio": 1.0}, CPU)
    message = "state has no bset; it has best, ratio"
    with pytest.raises(VariableError, match=message):
        state.bset = 1.0
    with pytest.raises(VariableError, match=message) as caught:
        _ = state.bset
    assert "bset=…" in (caught.value.hint or "")
    with pytest.raises(VariableError, match=message):
        del state.bset
    assert getattr(state, "bset", None) is None


def test_values_that_cannot_be_saved_are_refused_by_name_at_once() -> None:
    with pytest.raises(ModelError, match=r"state\.log.* is a function; expected tensors, numbers"):
        ScriptState("state", {"log": open_}, CPU)
    state = ScriptState("state", {"best": 0.0, "snaps": []}, CPU)
    with pytest.raises(ModelError, match=r"state\.best.*0.* is a object; expected"):
        state.best = [object()]
    assert state.best == 0.0


def open_() -> None:
    """A function, which no state can have."""


def test_no_variables_and_names_of_methods() -> None:
    with pytest.raises(UsageError, match="no variables"):
        ScriptState("state", {}, CPU)
    with pytest.raises(UsageError, match="state_dict, the name of a method"):
        ScriptState("state", {"state_dict": 1}, CPU)


def test_values_come_back_as_they_were() -> None:
    values: dict[str, Any] = {
        "number": 0.1,
        "text": "ä",
        "nothing": None,
        "queue": deque([1, 2, 3], maxlen=3),
        "free": deque([1]),
        "counts": defaultdict(int, a=1),
        "seen": Counter("aab"),
        "some": {1, 2},
        "pair": (1, [2.0]),
        "rows": torch.arange(3),
        "array": np.arange(3),
        "snaps": [{"w": torch.ones(2)}],
    }
    text, tensors = state_codec.flatten(ScriptState("state", values, CPU).state_dict())
    made = ScriptState("state", {**values, "counts": defaultdict(int)}, CPU)
    made.load_state_dict(state_codec.rebuild(text, tensors.__getitem__))
    assert list(made.state_dict()) == list(values)
    made.queue.append(4)
    made.free.append(2)
    made.counts["b"] += 1
    assert (list(made.queue), list(made.free), dict(made.counts)) == (
        [2, 3, 4],
        [1, 2],
        {"a": 1, "b": 1},
    )
    assert (made.seen, made.some, made.pair, made.number) == (
        values["seen"],
        {1, 2},
        (1, [2.0]),
        0.1,
    )
    assert torch.equal(made.rows, values["rows"])
    assert torch.equal(made.snaps[0]["w"], torch.ones(2))
    assert made.array.tolist() == [0, 1, 2]


def test_they_are_named_by_number_and_part_of_the_digest(make_run: Callable[..., Any]) -> None:
    with make_run() as run:
        first, second = run.state(best=0.0), run.state(best=0.0)
        assert list(run._session.state.registered) == ["state", "state-2"]
        before = run.digest()
        second.best = 1.0
        assert run.digest() != before
        with pytest.raises(ModelError, match="state is registered already"):
            run.state("state", best=0.0)
        assert first.best == 0.0
    with pytest.raises(lockstep.LockstepError, match=r"run\.state was called after the end"):
        run.state(best=1)
    assert json.dumps(first.state_dict()) == '{"best": 0.0}'
