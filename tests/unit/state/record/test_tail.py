from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.errors import RunDirectoryError
from lockstep.state.record import tail
from lockstep.state.record.tail import EventTail, Tail


def test_a_line_is_seen_when_it_is_whole(tmp_path: Path) -> None:
    file = tmp_path / "log"
    follow = Tail(file)
    assert follow.lines() == [], "the file may come later"
    file.write_text("one\ntw")
    assert follow.lines() == ["one"]
    file.write_text("one\ntwo\nthree\n")
    assert follow.lines() == ["two", "three"]
    assert follow.lines() == []


def test_a_long_file_is_read_from_near_its_end(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(tail, "_FIRST", 20)
    file = tmp_path / "log"
    file.write_text("".join(f"line {k}\n" for k in range(100)))
    follow = Tail(file)
    assert follow.lines() == ["line 98", "line 99"], "without the part of a line"
    with file.open("a") as more:
        more.write("line 100\n" * 9)
    assert len(follow.lines()) == 9


def test_a_file_that_begins_anew(tmp_path: Path) -> None:
    file = tmp_path / "log"
    file.write_text("a long line of an earlier run\nhalf")
    follow = Tail(file)
    follow.lines()
    file.write_text("new\n")
    assert follow.lines() == ["new"]


def test_parts_of_lines_are_no_events(tmp_path: Path) -> None:
    file = tmp_path / "rank-0.jsonl"
    file.write_bytes(b'{"kind": "log", "time": 1}\n{"kind": "lo\n\xff\n{"kind": "pace", "ti')
    events = EventTail(file)
    assert events.events() == [{"kind": "log", "time": 1}]
    with file.open("ab") as more:
        more.write(b'me": 3}\n')
    assert events.events() == [{"kind": "pace", "time": 3}]
    with file.open("ab") as more:
        more.write(b"[]\n")
    with pytest.raises(RunDirectoryError, match="no event"):
        events.events()
