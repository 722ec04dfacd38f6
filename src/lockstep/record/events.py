"""Events: what a rank logged, one JSON object per line, in `events/rank-K.jsonl`."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from lockstep.record.directory import owner_only
from lockstep.record.run_file import cannot_write

_FLUSH_SECONDS = 1.0


class Events:
    """Collects logged values and writes them now and then, without waiting for a device per step.

    Args:
        directory: the run directory.
        rank: this rank.
    """

    def __init__(self, directory: Path, rank: int) -> None:
        self._directory = directory / "events"
        self._pending: list[tuple[float, dict[str, Any]]] = []
        self._flushed = time.monotonic()
        self._closed = False
        try:
            self._directory.mkdir(mode=0o700, exist_ok=True)
            path = self._directory / f"rank-{rank}.jsonl"
            # Closed by `close`, at the end of the run.
            self._file = open(path, "a", encoding="utf-8", opener=owner_only)  # noqa: SIM115
        except OSError as error:
            raise cannot_write(self._directory, error) from error

    def add(self, **fields: Any) -> None:
        """Record an event; tensors are read when it is written.

        Raises:
            RunDirectoryError: if pending events are due and cannot be written.
        """
        self._pending.append((time.time(), fields))
        if time.monotonic() - self._flushed > _FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write all pending events.

        Raises:
            RunDirectoryError: if they cannot be written, for instance on a full disk.
        """
        pending, self._pending = self._pending, []
        self._flushed = time.monotonic()
        try:
            for moment, fields in pending:
                line = {"time": round(moment, 6), **{k: _plain(v) for k, v in fields.items()}}
                self._file.write(json.dumps(line, default=str) + "\n")
            self._file.flush()
        except OSError as error:
            raise cannot_write(self._directory, error) from error

    def close(self) -> None:
        """Write all pending events and close the file.

        Raises:
            RunDirectoryError: if they cannot be written.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self.flush()
        finally:
            self._abandon()

    def _abandon(self) -> None:
        try:
            self._file.close()
        except OSError as error:
            raise cannot_write(self._directory, error) from error


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value
