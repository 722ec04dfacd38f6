"""What is taken for a logger."""

import importlib.util

import pytest

from lockstep.errors import UsageError
from lockstep.state.record import loggers


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match="needs the package wandb") as caught:
        loggers.check(["wandb"])
    assert caught.value.hint == "pip install 'torch-lockstep[wandb]'"


def test_an_object_without_log_is_refused() -> None:
    with pytest.raises(UsageError, match=r"of type int; expected a name or an object with log"):
        loggers.check([3])
