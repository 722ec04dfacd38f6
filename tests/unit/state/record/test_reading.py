from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.errors import RunDirectoryError
from lockstep.state.record.reading import LineReader


def test_a_line_is_seen_when_it_is_whole(tmp_path: Path) -> None:
    file = tmp_path / "log"
    reader = LineReader(file)
    file.write_text("one\ntw")
    assert list(reader.lines()) == [b"one\n"]
    file.write_text("one\ntwo\nthree\n")
    assert list(reader.lines()) == [b"two\n", b"three\n"]
    assert list(reader.lines()) == []


def test_a_long_file_is_read_from_near_its_end(tmp_path: Path) -> None:
    file = tmp_path / "log"
    file.write_text("".join(f"line {k}\n" for k in range(100)))
    reader = LineReader(file, most=20)
    assert list(reader.lines()) == [b"line 98\n", b"line 99\n"], "without the part of a line"
    with file.open("a") as more:
        more.write("line 100\n" * 9)
    assert len(list(reader.lines())) == 9


def test_a_file_that_begins_anew(tmp_path: Path) -> None:
    file = tmp_path / "log"
    file.write_text("a long line of an earlier run\nhalf")
    reader = LineReader(file)
    assert len(list(reader.lines())) == 1
    file.write_text("new\n")
    assert list(reader.lines()) == [b"new\n"]


def test_parts_of_lines_are_no_events(tmp_path: Path) -> None:
    file = tmp_path / "rank-0.jsonl"
    file.write_bytes(b'{"kind": "log", "time": 1}\n{"kind": "lo\n\xff\n{"kind": "pace", "ti')
    reader = LineReader(file)
    assert list(reader.events()) == [{"kind": "log", "time": 1}]
    with file.open("ab") as more:
        more.write(b'me": 3}\n')
    assert list(reader.events()) == [{"kind": "pace", "time": 3}]
    with file.open("ab") as more:
        more.write(b"[]\n")
    with pytest.raises(RunDirectoryError, match="no event"):
        list(reader.events())
