"""Messages between workers and parameter servers: a fixed header, JSON, raw bytes of tensors.

Nothing is pickled. The header has the lengths of the following parts; types and shapes of tensors follow
from the kind of the message or from its JSON.

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
#: Most bytes of JSON that a process may send before it has authenticated itself.
LONGEST_HELLO = 1 << 12
#: Most pieces of memory for one system call (IOV_MAX is 1024).
PIECES = 512


class Kind(IntEnum):
    """Kind of a message between a worker and a parameter server, sent as one byte."""

    CHALLENGE = 1  # the server's nonce, with which a worker authenticates itself
    HELLO = 2  # a worker authenticates itself, and names its model
    WELCOME = 3  # the server authenticates itself
    PUSH = 4  # a worker's tree nodes of a bucket
    SUM = 5  # the sum of all workers' nodes
    BEGIN = 6  # parameters and an optimizer for a server
    UPDATE = 7  # a worker's tree nodes of the gradients of all parameters in a server
    VERSION = 8  # the parameters after an update
    STATE = 9  # an optimizer's state after an update, or the request for it
    TRAFFIC = 10  # how many bytes a server has received and sent, or the request for it
    ERROR = 11  # why the workers cannot continue
    BYE = 12  # a worker is done and disconnects


#: Types of elements; a message has an index into this tuple as its tag.
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Header:
    """The fixed-size header of a message.

    Attributes:
        tag: index of an element type or of an optimizer, depending on the kind.
        meta: number of bytes of JSON.
        number: number of the bucket or the update.
        place: number of the batch that the sender computes.
        payload: number of bytes of tensors.
    """

    kind: int
    tag: int
    meta: int
    number: int
    place: int
    payload: int

    @staticmethod
    def unpack(data: bytes | bytearray) -> Header:
        """Return the `Header` from `data`, its encoding of fixed size."""
        return Header(*HEADER.unpack(data))


@dataclass(frozen=True, slots=True)
class Message:
    """A message that was received completely.

    Attributes:
        meta: the JSON object of the message.
        payload: the bytes of the tensors.
    """

    header: Header
    meta: dict[str, Any]
    payload: torch.Tensor


def pieces(
    kind: Kind,
    tensors: Sequence[torch.Tensor] = (),
    *,
    tag: int = 0,
    number: int = 0,
    place: int = 0,
    meta: Mapping[str, Any] | None = None,
) -> list[memoryview]:
    """Return the memory of a message as a list of buffers for `socket.sendmsg`.

    The first buffer has the header and the JSON.

    Args:
        kind: kind of the message.
        tensors: contiguous tensors on the CPU, which are not copied.
        tag: index of an element type or of an optimizer, depending on `kind`.
        number: number of the bucket or the update.
        place: number of the batch that the sender computes.
        meta: JSON object of the message.
    """
    text = b"" if meta is None else json.dumps(meta).encode()
    views = [view(tensor) for tensor in tensors]
    payload = sum(v.nbytes for v in views)
    header = HEADER.pack(kind, tag, len(text), number, place, payload)
    return [memoryview(header + text), *(v for v in views if v.nbytes)]


def view(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor as a view of its memory."""
    memory: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(memory)


def parse(text: bytes | bytearray) -> dict[str, Any]:
    """Return the JSON object in `text`; an empty `text` gives an empty object.

    Raises:
        ValueError: if `text` is not a JSON object.
    """
    meta = json.loads(text) if text else {}
    if not isinstance(meta, dict):
        raise ValueError("expected a JSON object")  # noqa: TRY004 - for callers it is a bad value
    return meta


def megabytes(count: int) -> str:
    """Return `count`, a number of bytes, as text in megabytes, such as `1.5 MB`."""
    return f"{count / 1e6:.1f} MB"
