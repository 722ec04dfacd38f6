"""What a watcher knows of a run, from directories written by hand."""

from __future__ import annotations

import io
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from lockstep.errors import UsageError
from lockstep.state.files.lock import DirectoryLock, LockOwner
from lockstep.tools.watch.screen import Screen
from lockstep.tools.watch.watcher import Watcher, newest, plain
from tests.recorded import Run


@pytest.fixture
def going_on(tmp_path: Path) -> Iterator[Path]:
    """A run with two kills that goes on in this process."""
    directory = Run(tmp_path / "run", kills=[20, 40], status="running").write()
    lock = DirectoryLock(directory, LockOwner.of("single", {}, "one"))
    yield directory
    lock.release(ends=True)


def add(directory: Path, file: str, **event: object) -> None:
    with (directory / "events" / file).open("a") as events:
        events.write(json.dumps({"time": time.time(), **event}) + "\n")


def pace(directory: Path, **more: object) -> None:
    window = {"steps": 10, "samples": 640, "seconds": 2.0, "data": 0.5, "exchange": None}
    times = {"median": 0.2, "slowest": 0.3, "epoch": 1, "step": 70}
    add(directory, "rank-0.jsonl", kind="pace", **window, **times, **more)


def test_a_run_that_goes_on(going_on: Path) -> None:
    pace(going_on, epochs=4, batch=8, batches=16)
    view = Watcher(going_on, 0).look()
    assert (view.status, view.name, view.step, view.restarts) == ("running", "digits", 70, 2)
    assert (view.epoch, view.rate, view.done) == ("epoch 2/4", 320.0, 1.5 / 4)
    assert view.seconds_left == pytest.approx(2.5 * 16 * 0.2)
    assert view.end is None
    assert [moment.text for moment in view.moments if moment.is_bad] == [
        "rank 1 was killed by signal 9 (SIGKILL)"
    ] * 2
    assert "running  epoch 2/4  step 70" in view.summary


def test_what_has_come_since_the_last_look(going_on: Path) -> None:
    watcher = Watcher(going_on, 1)
    before = watcher.look()
    assert before.lines == ("rank 1 is here",)
    assert before.rate is None, "the pace is that of an hour ago"
    pace(going_on)
    add(
        going_on,
        "launcher-0.jsonl",
        kind="failure",
        generation=2,
        name="rank 0",
        text="rank 0\x1b[2J died",
    )
    add(going_on, "launcher-0.jsonl", kind="of a later version")
    with (going_on / "logs" / "rank-1.log").open("a") as log:
        log.write("  1%\r 50%\r100%\n\x1b[31mred\x1b[0m\n")
    view = watcher.look()
    assert view.rate == 320.0
    assert (view.epoch, view.done, view.seconds_left) == ("epoch 2", None, None)
    assert view.moments[-1].text == "rank 0 died"
    assert view.lines == ("rank 1 is here", "100%", "red")


def test_a_restart_forgets_the_pace(going_on: Path) -> None:
    pace(going_on)
    watcher = Watcher(going_on, 0)
    assert watcher.look().rate == 320.0
    add(going_on, "rank-0.jsonl", kind="start", generation=3, step=68, ranks=2, host="n1")
    view = watcher.look()
    assert (view.rate, view.ranks[0].step, view.moments[-1].text) == (
        None,
        68,
        "resumed after step 68 on 2 ranks",
    )


def test_a_run_without_processes_is_dead(tmp_path: Path) -> None:
    view = Watcher(Run(tmp_path / "run", status="running").write(), 0).look()
    assert view.status == "dead"
    assert view.end is not None
    assert f"--run-dir {tmp_path / 'run'} continues it" in view.end


def test_a_run_on_another_host_may_live(going_on: Path) -> None:
    lock = going_on / ".lock"
    owner = json.loads(lock.read_text())
    lock.unlink()
    lock.write_text(json.dumps(owner | {"machine": "another"}))
    view = Watcher(going_on, 0).look()
    assert (view.in_use, view.status) == (None, "running")


@pytest.mark.parametrize("lives", [True, False])
def test_a_failed_run_whose_launcher_lives_may_go_on(going_on: Path, *, lives: bool) -> None:
    file = going_on / "run.json"
    file.write_text(
        json.dumps(json.loads(file.read_text()) | {"status": "failed", "error": "why\nhint: do"})
    )
    if not lives:
        (going_on / ".lock").unlink()
    view = Watcher(going_on, 0).look()
    assert (view.status, view.end) == (
        ("running", None) if lives else ("failed", "rank 1 was killed by signal 9 (SIGKILL)")
    )
    (going_on / "events" / "launcher-0.jsonl").unlink()
    view = Watcher(going_on, 0).look()
    assert view.end == (None if lives else "why")


def test_directories_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no directory"):
        Watcher(tmp_path / "none", 0)
    with pytest.raises(UsageError, match=r"has no run\.json"):
        Watcher(tmp_path, 0)


def test_the_newest_run_is_the_one_that_began_last(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no run in") as caught:
        newest(tmp_path)
    assert caught.value.hint is not None
    first = Run(tmp_path / "digits" / "1").write()
    later = Run(tmp_path / "voc" / "2").write()
    content = json.loads((later / "run.json").read_text())
    content["generations"][0]["time"] += 100
    (later / "run.json").write_text(json.dumps(content))
    os.utime(later / "run.json", (content["generations"][0]["time"] + 1,) * 2)
    os.utime(first / "run.json")  # it ended last
    (tmp_path / "damaged" / "3").mkdir(parents=True)
    (tmp_path / "damaged" / "3" / "run.json").write_text("{")
    assert newest(tmp_path) == later


@pytest.mark.parametrize(("width", "height"), [(100, 40), (60, 24), (40, 12), (20, 5)])
def test_the_picture_fits_the_terminal(going_on: Path, width: int, height: int) -> None:
    pace(going_on, epochs=4, batch=8, batches=16)
    console = Console(width=width, height=height, record=True, file=io.StringIO())
    console.print(Screen(Watcher(going_on, 0).look(), "q leaves"))
    lines = console.export_text().splitlines()
    assert lines[0].startswith("digits  running")
    assert max(map(len, lines)) <= width
    if height >= 24:
        assert len(lines) <= height
        assert "rank 1 was killed by signal 9 (SIGKILL)" in "\n".join(lines)


def test_many_ranks_leave_room(tmp_path: Path) -> None:
    view = Watcher(Run(tmp_path / "run", ranks=64).write(), 0).look()
    console = Console(width=100, height=30, record=True, file=io.StringIO())
    console.print(Screen(view))
    text = console.export_text()
    assert "and 5" in text
    assert "the launch ends with exit code 0" in text
    assert len(text.splitlines()) <= 30


@pytest.mark.parametrize(
    ("line", "seen"),
    [
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07text", "text"),
        ("a\x1b[2Jb\x07\x9bc", "abc"),
        (" 10%\r100%", "100%"),
        ("line\r", "line"),
        ("a\tb", "a       b"),
        ("ü 漢", "ü 漢"),
    ],
)
def test_lines_cannot_steer_the_terminal(line: str, seen: str) -> None:
    assert plain(line) == seen
