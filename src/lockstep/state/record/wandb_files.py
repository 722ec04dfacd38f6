"""What lies in the files of offline runs of Weights & Biases."""

from __future__ import annotations

import importlib
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lockstep.state.record.given import NOTHING, Given, latest

_HEADER = 7
_BLOCK = 32768
#: Kinds of parts that end a record: a whole one, and the last of several.
_ENDS = (1, 4)


def last_logged(directory: Path) -> Given:
    """Return the last step that the files below `directory` hold, and the names of its values."""
    found = NOTHING
    for path in directory.glob("offline-run-*/*.wandb"):
        found = latest(found, _last(path))
    return found


def _last(path: Path) -> Given:
    messages: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")
    for content in reversed(list(records(path.read_bytes()))):
        record = messages.Record.FromString(content)
        if record.history.item:
            names = {item.key or ".".join(item.nested_key) for item in record.history.item}
            return int(record.history.step.num), names
    return NOTHING


def records(content: bytes) -> Iterator[bytes]:
    """Yield the records of a file; one that is not whole, since a kill came between, is left out.

    Source of the form: LevelDB's log format (google/leveldb, doc/log_format.md), behind a header of W&B's.
    """
    place, whole = _HEADER, b""
    while place + _HEADER <= len(content):
        left = _BLOCK - place % _BLOCK
        if left < _HEADER:  # no part begins in what is left of a block
            place += left
            continue
        _, size, kind = struct.unpack_from("<IHB", content, place)
        place += _HEADER
        if not kind or place + size > len(content):
            return
        whole += content[place : place + size]
        place += size
        if kind in _ENDS:
            yield whole
            whole = b""
