"""Write the events of a rank or a launcher: one JSON object per line, in `events/rank-K.jsonl`."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.errors import UsageError
from lockstep.state.files.directory import owner_only
from lockstep.state.files.run_file import writing

_FLUSH_SECONDS = 1.0
#: Fields of every event, which a script cannot log.
_OWN = frozenset({"kind", "time", "step", "replica", "weight"})
_CONTAINERS = (list, tuple, dict)


class Events:
    """Collects the events of a rank, and writes them to a file about once a second.

    Values of tensors are read only when they are written, so that no step waits for a GPU.
    """

    def __init__(self, directory: Path, rank: int) -> None:
        self._directory = directory / "events"
        self._pending: deque[tuple[float, dict[str, Any]]] = deque()  # threads add, too
        self._flushed = time.monotonic()
        with writing(self._directory):
            self._directory.mkdir(mode=0o700, exist_ok=True)
            path = self._directory / f"rank-{rank}.jsonl"
            # Closed by `close`, at the end of the run.
            self._file = open(path, "a", encoding="utf-8", opener=owner_only)  # noqa: SIM115
            if _is_torn(path):
                self._file.write("\n")

    def add(self, **fields: Any) -> None:
        """Record an event; values of tensors are read when the event is written.

        Raises:
            RunDirectoryError: if pending events are due and cannot be written.
        """
        self._pending.append((time.time(), fields))
        if time.monotonic() - self._flushed > _FLUSH_SECONDS:
            self.flush()

    def put(self, **fields: Any) -> None:
        """Record an event from any thread; a later `add` or `flush` of the main thread writes it."""
        self._pending.append((time.time(), fields))

    def flush(self) -> None:
        """Write all pending events.

        Raises:
            RunDirectoryError: if the events cannot be written, for instance on a full disk.
        """
        self._flushed = time.monotonic()
        with writing(self._directory):
            while self._pending:
                self._file.write(_line(*self._pending.popleft()))
            self._file.flush()

    def close(self) -> None:
        """Write all pending events and close the file.

        Raises:
            RunDirectoryError: if the events cannot be written.
        """
        if self._file.closed:
            return
        try:
            self.flush()
        finally:
            with writing(self._directory):
                self._file.close()


def copied(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the logged `values` with copies of tensors, since a tensor may change before it is written.

    A tensor of one number on the CPU becomes this number: a copy, kept for a second, would cost ten times
    as much.

    Raises:
        UsageError: for a name that is a field of every event, and for tensors in a list or a mapping.
    """
    if not _OWN.isdisjoint(values):
        taken = ", ".join(sorted(_OWN.intersection(values)))
        raise UsageError(
            f"run.log cannot record {taken}: every event has its own",
            hint="log it under another name",
        )
    kept = {}
    for name, value in values.items():
        if isinstance(value, _CONTAINERS) and _has_tensors(value):
            raise UsageError(
                f"run.log was given {name}, a {type(value).__name__} with tensors in it; expected a "
                "tensor, a number or text, or a container of numbers and text",
                hint="torch.stack makes one tensor of several; or log each under a name of its own",
            )
        kept[name] = _copy(value) if hasattr(value, "detach") else value
    return kept


def _copy(value: Any) -> Any:
    is_number = getattr(value, "is_cpu", False) and not value.dim()
    return value.item() if is_number else value.detach().clone()


def _has_tensors(value: object) -> bool:
    inner = list(value.values()) if isinstance(value, dict) else value
    within = isinstance(inner, list | tuple) and any(map(_has_tensors, inner))
    return within or hasattr(value, "detach")


def _is_torn(path: Path) -> bool:
    """Return whether a file does not end with a line break, as after a kill of its writer."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - 1))
        return file.read(1) not in (b"", b"\n")


def append(directory: Path, name: str, /, **fields: Any) -> None:
    """Append one event with `fields` to `events/NAME.jsonl` in the run directory, and close the file.

    NAME is `name`. Launchers use this function.

    Raises:
        RunDirectoryError: if the event cannot be written.
    """
    path = directory / "events" / f"{name}.jsonl"
    with writing(path):
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with open(path, "a", encoding="utf-8", opener=owner_only) as file:
            file.write("\n" * _is_torn(path) + _line(time.time(), fields))


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)


_ENCODER = json.JSONEncoder(default=_plain)  # `json.dumps` would make one for each line


def _line(moment: float, fields: dict[str, Any]) -> str:
    moment = int(moment * 1e6) / 1e6  # `round` takes as long as the rest of a short line
    return _ENCODER.encode({"time": moment, **fields}) + "\n"
