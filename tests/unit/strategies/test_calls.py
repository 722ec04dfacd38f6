"""What ranks of one model tell each other of a call."""

from __future__ import annotations

import json

import pytest
import torch

from lockstep.errors import ModelError, PeerError
from lockstep.record.report import is_consequence
from lockstep.strategies.calls import describe, fingerprint, revive


class OddError(KeyError):
    """Takes another argument than a text."""

    def __init__(self, number: int) -> None:
        super().__init__(f"number {number}")


def told(error: Exception) -> Exception:
    """Send an exception to another rank, as JSON."""
    return revive(json.loads(json.dumps(describe(error, 1, "head"))))


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RuntimeError("x"), RuntimeError),
        (OddError(3), OddError),
        (torch.OutOfMemoryError("x"), torch.OutOfMemoryError),
        (ModelError("x", hint="y"), ModelError),
        (UnicodeDecodeError("a", b"b", 0, 1, "c"), PeerError),
        (FileNotFoundError(2, "x"), PeerError),
        (PeerError("x"), PeerError),
    ],
)
def test_an_exception_of_another_rank_is_of_its_class(error: Exception, kind: type) -> None:
    other = told(error)
    assert isinstance(other, kind)
    assert is_consequence(other)
    assert "(on rank 1, in stage head)" in str(other)
    assert getattr(other, "hint", None) == getattr(error, "hint", None)


def test_an_exception_of_a_class_that_is_not_here() -> None:
    class LocalError(ValueError):
        pass

    assert isinstance(told(LocalError("x")), ValueError)


def test_inputs_are_told_apart() -> None:
    x = torch.arange(6.0)
    seen = [
        fingerprint({}, []),
        fingerprint({"a": 1}, [x]),
        fingerprint({"a": 2}, [x]),
        fingerprint({}, [x]),
        fingerprint({}, [x + 1]),
        fingerprint({}, [x.reshape(2, 3)]),
        fingerprint({}, [x.double()]),
        fingerprint({}, [x, torch.tensor(True)]),
        fingerprint({}, [x, torch.tensor(False)]),
    ]
    assert len(set(seen)) == len(seen)
    assert fingerprint({}, [x]) == fingerprint({}, [x.clone()])


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(0, 3),
        torch.ones(2, 3).t(),
        torch.ones(2).to_sparse(),
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.ones(2, requires_grad=True),
        torch.ones(2, dtype=torch.bfloat16),
    ],
)
def test_inputs_of_any_kind(tensor: torch.Tensor) -> None:
    assert fingerprint({}, [tensor]) == fingerprint({}, [tensor])
