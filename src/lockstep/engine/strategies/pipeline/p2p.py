"""Messages of tensors and numbers between the ranks of a row, which hold the stages of one model.

A message is a JSON header, with the structure, shapes and dtypes, and then the tensors. So shapes need not
be agreed in advance, and batches may differ in length. The header is sent from CPU memory, tensors from
their device.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from lockstep.engine.exchange.scatter import gather_texts
from lockstep.errors import ModelError

_BLOCK = 512  # bytes of the first block, enough for the header of a few tensors
_LENGTH = 8
_TEXT = 512  # bytes
_SMALL = 1 << 14  # tensors of at most so many bytes are sent in one block together


def dismantle(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Return `value` as JSON data, with indices in place of tensors, which are appended to `tensors`.

    `value`: tensors, numbers and strings in tuples, lists and dictionaries. Other objects raise a
    `ModelError`.
    """
    kind = type(value)
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if value is None or kind in (bool, int, float, str):
        return {"value": value}
    if kind in (tuple, list, torch.Size):
        name = "list" if kind is list else "tuple"
        return {name: [dismantle(item, tensors) for item in value]}
    if kind in (dict, OrderedDict):
        items = [[dismantle(k, tensors), dismantle(v, tensors)] for k, v in value.items()]
        return {"dict" if kind is dict else "ordered": items}
    if kind is torch.dtype:
        return {"dtype": str(value).removeprefix("torch.")}
    raise ModelError(
        f"a {kind.__name__} would have to go from one stage of a model to another rank; "
        "expected tensors and numbers in tuples, lists and dictionaries",
        hint="return a tuple or a dict from the model, or cut it elsewhere",
    )


def assemble(parts: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Return the value that `dismantle` has split into `parts` (JSON data) and `tensors`."""
    ((kind, content),) = parts.items()
    if kind == "tensor":
        return tensors[content]
    if kind in ("tuple", "list"):
        items = [assemble(item, tensors) for item in content]
        return items if kind == "list" else tuple(items)
    if kind in ("dict", "ordered"):
        pairs = [(assemble(k, tensors), assemble(v, tensors)) for k, v in content]
        return dict(pairs) if kind == "dict" else OrderedDict(pairs)
    return getattr(torch, content) if kind == "dtype" else content


@dataclass(frozen=True, slots=True)
class Message:
    """A received value: its structure, its tensors, and whether each tensor needs a gradient."""

    parts: Any
    tensors: list[torch.Tensor]
    needy: list[bool]

    @property
    def value(self) -> Any:
        """The received value, assembled from its structure and tensors."""
        return assemble(self.parts, self.tensors)


class RowCommunicator:
    """Communication between the ranks of a row of the mesh, which hold one model together.

    Attributes:
        moved: dictionary with the numbers of bytes that this rank has "sent" and "received";
            `gather` is not counted.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._sending: list[tuple[dist.Work, torch.Tensor]] = []
        self.moved = {"sent": 0, "received": 0}

    def of_run(self, place: int) -> int:
        """Return the rank in the run of the process with rank `place` in this row."""
        return dist.get_global_rank(self._group, place)

    def compare(self, text: bytes) -> list[bytes]:
        """All-gather a text from each rank of the row; return all texts, in the order of ranks; collective.

        `text`: at most 512 bytes.
        """
        return gather_texts(text, _TEXT, self._group)

    # --- from one stage to the next ----------------------------------------------------------------

    def send(self, value: Any, to: int) -> None:
        """Begin to send `value` to the process with rank `to` in this row.

        `value` must not be changed before `flush`.
        """
        _, blocks = _outgoing(value, self._device)
        for block in blocks:
            work = dist.isend(block, group=self._group, group_dst=to)
            assert work is not None
            self._sending.append((work, block))
            self.moved["sent"] += block.numel()

    def flush(self) -> None:
        """Wait until all values that were passed to `send` are sent."""
        sending, self._sending = self._sending, []
        for work, _ in sending:
            work.wait()

    def receive(self, source: int) -> Message:
        """Wait for a value from the process with rank `source` in this row; return a `Message`."""

        def fill(block: torch.Tensor) -> None:
            dist.recv(block, group=self._group, group_src=source)
            self.moved["received"] += block.numel()

        return _incoming(fill, self._device)

    # --- from one rank to the whole row ------------------------------------------------------------

    def share(self, value: Any, source: int, device: torch.device | None = None) -> Message:
        """Broadcast `value` from the process with rank `source` in this row to the others; collective.

        `value`: ignored on the other ranks. `device`: device of the tensors in the returned message; by
        default this rank's device.
        """
        device = device or self._device

        def fill(block: torch.Tensor) -> None:
            dist.broadcast(block, group=self._group, group_src=source)
            self.moved["sent" if self.rank == source else "received"] += block.numel()

        if self.rank != source:
            return _incoming(fill, device)
        message, blocks = _outgoing(value, device)
        for block in blocks:
            fill(block)
        # On the device that the other ranks use: they compare hashes, which depend on the device.
        return replace(message, tensors=[tensor.to(device) for tensor in message.tensors])

    def gather(self, value: Any) -> list[Any]:
        """Return the `value` of each rank that holds this model, with tensors on the CPU; collective."""
        moved, cpu = dict(self.moved), torch.device("cpu")
        values = [self.share(value, other, cpu).value for other in range(self.size)]
        self.moved = moved
        return values


def _outgoing(value: Any, device: torch.device) -> tuple[Message, list[torch.Tensor]]:
    """Return a message with `value`, and the blocks of bytes to send: header, and tensors on `device`."""
    tensors: list[torch.Tensor] = []
    parts = dismantle(value, tensors)
    message = Message(parts, tensors, [tensor.requires_grad for tensor in tensors])
    kinds, flats = [], []
    for tensor in tensors:
        is_dense = torch.ops.aten.is_non_overlapping_and_dense.default(tensor)
        plain = tensor.detach() if is_dense else tensor.detach().contiguous()
        kind = str(tensor.dtype).removeprefix("torch.")
        kinds.append([kind, list(plain.shape), list(plain.stride()), tensor.requires_grad])
        if plain.numel():
            flats.append(_flat(plain).to(device))
    small = [flat for flat in flats if flat.numel() <= _SMALL]
    large = [flat for flat in flats if flat.numel() > _SMALL]
    header = _blocks(json.dumps([parts, kinds]).encode())
    return message, [*header, *([torch.cat(small)] if small else ()), *large]


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return a flat view of a dense tensor's memory, as bytes."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _blocks(header: bytes) -> Iterator[torch.Tensor]:
    """Yield a header as blocks of bytes: the first of fixed size, the second with the rest, if any.

    The first block also contains the length of the header.
    """
    length = len(header).to_bytes(_LENGTH, "little")
    room = _BLOCK - _LENGTH
    yield _bytes((length + header[:room]).ljust(_BLOCK, b"\0"))
    if len(header) > room:
        yield _bytes(header[room:])


def _bytes(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _incoming(fill: Any, device: torch.device) -> Message:
    """Receive a message, and return it with its tensors on `device`.

    `fill`: function that receives bytes into the tensor that it is called with.
    """
    block = torch.empty(_BLOCK, dtype=torch.uint8)
    fill(block)
    data = block.numpy().tobytes()
    length = int.from_bytes(data[:_LENGTH], "little")
    header = data[_LENGTH : _LENGTH + length]
    if len(header) < length:
        rest = torch.empty(length - len(header), dtype=torch.uint8)
        fill(rest)
        header += rest.numpy().tobytes()
    parts, kinds = json.loads(header)
    tensors = [
        torch.empty_strided(shape, stride, dtype=getattr(torch, kind), device=device)
        for kind, shape, stride, _ in kinds
    ]
    flats = [_flat(tensor) for tensor in tensors if tensor.numel()]
    small = [flat for flat in flats if flat.numel() <= _SMALL]
    if small:
        piece = torch.empty(sum(map(len, small)), dtype=torch.uint8, device=device)
        fill(piece)
        torch._foreach_copy_(small, torch.split(piece, [len(flat) for flat in small]))
    for flat in flats:
        if flat.numel() > _SMALL:
            fill(flat)
    return Message(parts, tensors, [needs for *_, needs in kinds])
