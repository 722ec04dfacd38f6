"""Check that all ranks that hold one pipelined model make the same calls with the same inputs."""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import lockstep
from lockstep.engine.strategies.pipeline.p2p import RowCommunicator
from lockstep.errors import MismatchError

#: Value of `CallCheck.where` for a call of the model outside of all loops over batches.
OUTSIDE = "outside of a loop"
#: Number of bytes of each tensor that are compared; more would take longer than is useful.
_COMPARED = 4096
#: Most bytes of a script's name in a message to other ranks, which has at most 512 bytes.
_NAMED = 80
#: Beginnings of the paths of files that are not the user's script: Lockstep, torch, frozen modules.
_OTHERS = (str(Path(lockstep.__file__).parent), str(Path(torch.__file__).parent), "<frozen ")
_HINT = (
    "all ranks of a model must call it alike, with the same input: no call may stand under an `if` that "
    "depends on the rank or on one rank's values"
)


class CallCheck:
    """Counts the calls of one pipelined model, and compares calls between the ranks that hold the model.

    If only one rank made a call, stages would otherwise combine activations of different calls.

    Attributes:
        where: text that describes the batch that the script computes.
    """

    def __init__(self, row: RowCommunicator, number: int, name: str) -> None:
        self._row, self._number, self.name = row, number, name
        self._calls = 0
        self.where = OUTSIDE

    def next(self) -> int:
        """Count one more call of the model, and return its number."""
        self._calls += 1
        return self._calls

    def check(self, kind: str, call: int, values: str = "") -> None:
        """Raise a `MismatchError` unless all ranks of the model make the same call; collective.

        `kind`: "forward pass" or "backward pass". `call`: number of the call. `values`: fingerprint of the
        call's input. The current batch is compared, too.
        """
        own = [self._number, kind, call, self.where, values]
        calls = [_decode(text) for text in self._row.compare(_encode(own, _script_line()))]
        for rank, (theirs, line) in enumerate(calls):
            if theirs != own:
                mine = calls[self._row.rank][1]
                raise self._mismatch(own, f" at {mine}", theirs, f" at {line}", rank)

    def _mismatch(
        self, own: list[Any], mine: str, theirs: list[Any], line: str, other: int
    ) -> MismatchError:
        here, there = (f"rank {self._row.of_run(r)}" for r in (self._row.rank, other))
        if own[:-1] == theirs[:-1]:
            return MismatchError(
                f"{here} calls {self.name}{mine} with another input than {there}{line}; "
                "expected the same input on all ranks of a model",
                hint=_HINT,
            )
        return MismatchError(
            f"{here} is in {_describe(own)}{mine}, {there} in {_describe(theirs)}{line}; "
            "expected the same pass on all ranks of a model",
            hint=_HINT,
        )


def _describe(description: Sequence[Any]) -> str:
    number, kind, call, where, *_ = description
    return f"the {kind} of call {call} of model {number} (counted from 0), {where},"


def _encode(own: Sequence[Any], line: str) -> bytes:
    """Return a description of a call, and the line of the script that made the call, as bytes.

    `own`: the description, a list of JSON values.
    """
    return json.dumps(own).encode() + b"\n" + line.encode(errors="replace")


def _decode(text: bytes) -> tuple[list[Any], str]:
    own, _, line = text.partition(b"\n")
    return json.loads(own), line.decode(errors="ignore")


def _script_line() -> str:
    """Return file name and line of the user's script from which the current call comes."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OTHERS):
        frame = frame.f_back
    name = Path(frame.f_code.co_filename).name.encode(errors="replace")[-_NAMED:]
    return f"{name.decode(errors='ignore')}:{frame.f_lineno}"


def fingerprint(parts: Any, tensors: Sequence[torch.Tensor]) -> str:
    """Return a checksum of the arguments of a call of the model.

    `parts`: structure of the arguments, as JSON data. `tensors`: the tensors in them. The checksum covers
    the structure, shapes and dtypes, and the first 4 KiB of each contiguous CPU tensor.
    """
    crc = zlib.crc32(json.dumps(parts).encode())
    for tensor in tensors:
        crc = zlib.crc32(f"{tuple(tensor.shape)} {tensor.dtype}".encode(), crc)
        plain = tensor.detach()
        if (
            plain.device.type == "cpu"
            and plain.layout is torch.strided
            and plain.is_contiguous()
            and not (plain.is_quantized or plain.is_conj() or plain.is_neg())
        ):
            count = _COMPARED // plain.element_size()
            crc = zlib.crc32(plain.reshape(-1)[:count].view(torch.uint8).numpy().tobytes(), crc)
    return f"{crc:08x}"
