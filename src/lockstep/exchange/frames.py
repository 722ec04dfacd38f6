"""What workers and servers send each other: a fixed header, a little JSON, raw bytes of tensors.

Nothing is pickled: a header says how many bytes follow, and what they are is known from the kind of the
frame or said in its JSON.

    kind | tag | bytes of JSON | number | place | bytes of tensors     then the JSON, then the tensors
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch

HEADER = struct.Struct("<BxHIQQQ")
#: The most JSON that a frame may carry: descriptions of some 100,000 tensors.
LONGEST_META = 1 << 25
#: The most that may come before a worker has shown that it belongs to the launch.
LONGEST_HELLO = 1 << 12


class Kind(IntEnum):
    """What a frame is."""

    HELLO = 1  # a worker says who it is
    WELCOME = 2  # and is let in
    PUSH = 3  # a worker's tree nodes of a bucket
    SUM = 4  # the sum of all workers' nodes
    BYE = 5  # a worker leaves in good order
    ERROR = 6  # what a server has against going on
    COUNT = 7  # how many bytes a server has moved
    BEGIN = 8  # parameters and an optimizer, for a server to hold
    UPDATE = 9  # a worker's tree nodes of all gradients that a server has the parameters of
    VERSION = 10  # the parameters after an update
    MEMORY = 11  # an optimizer's state after an update, or the question for it
    CHALLENGE = 12  # what a worker is to prove itself with


#: Types of elements, by the number that a frame gives as its tag.
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Header:
    """The fixed part of a frame.

    Attributes:
        kind: what the frame is.
        tag: a small number whose meaning depends on the kind.
        meta: bytes of JSON that follow.
        number: which bucket or update of its kind.
        place: where the sender stands in the run.
        payload: bytes of tensors that follow the JSON.
    """

    kind: int
    tag: int
    meta: int
    number: int
    place: int
    payload: int

    @staticmethod
    def unpack(data: bytes | bytearray) -> Header:
        """Read a header."""
        return Header(*HEADER.unpack(data))

    @property
    def size(self) -> int:
        """Bytes of the whole frame."""
        return HEADER.size + self.meta + self.payload


def frame(
    kind: Kind,
    tensors: Sequence[torch.Tensor] = (),
    *,
    tag: int = 0,
    number: int = 0,
    place: int = 0,
    meta: Mapping[str, Any] | None = None,
) -> list[memoryview]:
    """Return the pieces of a frame, whose tensors are not copied; they are contiguous and on the CPU."""
    text = b"" if meta is None else json.dumps(meta).encode()
    views = [view(tensor) for tensor in tensors]
    payload = sum(one.nbytes for one in views)
    header = HEADER.pack(kind, tag, len(text), number, place, payload)
    return [memoryview(header + text), *(one for one in views if one.nbytes)]


def view(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, which share its memory."""
    memory: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(memory)


def parse(text: bytes | bytearray) -> dict[str, Any]:
    """Return the JSON of a frame.

    Raises:
        ValueError: if it is none, or no object.
    """
    meta = json.loads(text) if text else {}
    if not isinstance(meta, dict):
        raise ValueError("expected a JSON object")  # noqa: TRY004 - for callers it is a bad value
    return meta
