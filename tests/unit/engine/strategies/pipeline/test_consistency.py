"""What ranks of one model tell each other of a call."""

from __future__ import annotations

from types import FunctionType

import pytest
import torch

from lockstep.engine.strategies.pipeline import consistency, p2p
from lockstep.engine.strategies.pipeline.consistency import CallCheck, fingerprint
from lockstep.errors import MismatchError


class Pair:
    """A row of two ranks, the other says what a test wants; words are cut as by `RowCommunicator`."""

    def __init__(self, other: bytes) -> None:
        self.rank, self._other = 0, other

    def of_run(self, place: int) -> int:
        return place

    def compare(self, text: bytes) -> list[bytes]:
        return [one[: p2p._TEXT].rstrip() for one in (text, self._other or text)]


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


# --- which pass a rank is in -----------------------------------------------------------------------

WHERE = "epoch 99999, batch 9999999 of loader 99, replica 9999, turn 99999"


def meet(calls: CallCheck, kind: str, call: int) -> None:
    calls.check(kind, call, "ffffffff")


def script_named(name: str) -> FunctionType:
    """Return `meet` as a script of that name has it."""
    return FunctionType(meet.__code__.replace(co_filename=f"/home/{name}"), {})


@pytest.mark.parametrize(
    "name",
    [
        f"{'обучение' * 10}.py",
        f"{'火' * 76}.py",
        "\udce9" * 250,
        f"{chr(34) * 200}\n.py",
        "a" * 255,
    ],
)
def test_scripts_of_any_name(name: str) -> None:
    """A line that is too long is cut, and what is compared is not."""
    in_script = script_named(name)
    pair = CallCheck(Pair(b""), 10**9, "Net")  # type: ignore[arg-type]
    pair.where = WHERE
    in_script(pair, "backward pass for inputs alone", 10**12)
    other = consistency._encode([0, "forward pass", 1, "outside of a loop", ""], "火" * 300 + ":7")
    apart = CallCheck(Pair(other), 0, "Net")  # type: ignore[arg-type]
    with pytest.raises(MismatchError, match="call 1 of model 0"):
        in_script(apart, "backward pass", 1)


def test_the_line_is_named_to_its_end() -> None:
    other = consistency._encode([0, "forward pass", 1, "outside of a loop", ""], "train.py:7")
    apart = CallCheck(Pair(other), 0, "Net")  # type: ignore[arg-type]
    with pytest.raises(MismatchError, match=r"обучение\.py:\d+, .* at train\.py:7;"):
        script_named(f"{'обучение' * 10}.py")(apart, "backward pass", 1)
