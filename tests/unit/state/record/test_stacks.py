"""Stacks: written by a signal, read back, the user's line found."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.state.record import stacks
from lockstep.state.record.stacks import Frame

DUMP = """\
Thread 0x00007f01 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait

Current thread 0x00007f02 (most recent call first):
  File "/opt/venv/lib/python3.11/site-packages/torch/autograd/graph.py", line 88 in backward
  File "/home/me/train.py", line 12 in step
  File "/home/me/train.py", line 40 in <module>
"""


@pytest.fixture
def environ(tmp_path: Path) -> Iterator[dict[str, str]]:
    yield {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "rank-0.0.json")}
    faulthandler.unregister(stacks.SIGNAL)
    for file in stacks._files:
        file.close()
    stacks._files.clear()


def test_the_main_threads_stack_is_the_last_one() -> None:
    frames = stacks.main_thread(DUMP)
    assert [frame.line for frame in frames] == [88, 12, 40]
    assert stacks.main_thread("") == []


def test_a_second_dump_counts_and_the_first_does_not() -> None:
    assert [f.line for f in stacks.main_thread(DUMP + DUMP.replace("line 12", "line 13"))][1] == 13


def test_the_users_line_is_the_innermost_that_no_library_has() -> None:
    assert stacks.users(stacks.main_thread(DUMP)) == Frame("/home/me/train.py", 12, "step")


def test_without_a_line_of_the_users_the_innermost_is_taken() -> None:
    library = Frame(threading.__file__, 331, "wait")
    assert stacks.users([library, Frame("<frozen runpy>", 1, "run")]) == library
    assert stacks.users([]) is None


def test_a_line_below_the_working_directory_is_short(monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    assert str(Frame(str(tmp_path / "train.py"), 3, "main")) == "train.py:3 in main"
    assert str(Frame("/elsewhere/train.py", 3, "main")) == "/elsewhere/train.py:3 in main"


def test_the_stack_of_a_frame() -> None:
    (innermost, *_) = stacks.of(sys._getframe())
    assert innermost.function == "test_the_stack_of_a_frame"
    assert innermost.is_users


def test_a_signal_writes_all_stacks(environ: dict[str, str], tmp_path: Path) -> None:
    stacks.offer(environ)
    file = tmp_path / "rank-0.0.stacks"
    assert file.read_text() == ""
    os.kill(os.getpid(), stacks.SIGNAL)
    deadline = time.monotonic() + 5
    while not stacks.main_thread(file.read_text()) and time.monotonic() < deadline:
        time.sleep(0.01)
    functions = [frame.function for frame in stacks.main_thread(file.read_text())]
    assert "test_a_signal_writes_all_stacks" in functions


def test_a_file_that_cannot_be_made_costs_nothing_else(tmp_path: Path) -> None:
    stacks.offer({"TORCHELASTIC_ERROR_FILE": str(tmp_path / "missing" / "rank-0.0.json")})
    stacks.offer({})
    assert stacks._files == []
