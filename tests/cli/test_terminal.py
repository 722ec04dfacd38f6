"""A launcher in a terminal, as a shell's job, and in a pipe that another process has made non-blocking."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

#: The shell: it takes the terminal back while the job is inside of `restored`.
SHELL = """
import os, signal, sys
from lockstep.launch.stdin import restored

signal.signal(signal.SIGTTOU, signal.SIG_IGN)
begins, goes_on = os.pipe(), os.pipe()
job = os.fork()
if job == 0:
    os.setpgid(0, 0)
    os.tcsetpgrp(0, os.getpgrp())
    signal.signal(signal.SIGTTOU, signal.SIG_DFL)
    with restored():
        os.write(begins[1], b"x")
        os.read(goes_on[0], 1)
    os._exit(0)
os.read(begins[0], 1)
os.tcsetpgrp(0, os.getpgrp())
os.write(goes_on[1], b"x")
status = os.waitpid(job, os.WUNTRACED)[1]
if os.WIFSTOPPED(status):
    os.kill(job, signal.SIGKILL)
    os.waitpid(job, 0)
sys.exit(os.WIFSTOPPED(status))
"""


def test_a_launcher_that_ends_in_the_background_is_not_stopped(tmp_path: Path) -> None:
    ours, terminal = pty.openpty()
    shell = tmp_path / "shell.py"
    shell.write_text(f"import fcntl, termios\nfcntl.ioctl(0, termios.TIOCSCTTY, 0)\n{SHELL}")
    try:
        done = subprocess.run(
            [sys.executable, str(shell)],
            check=False,
            stdin=terminal,
            start_new_session=True,
            timeout=30,
        )
    finally:
        os.close(ours)
        os.close(terminal)
    assert done.returncode == 0


def test_output_waits_for_the_reader_of_a_non_blocking_pipe(tmp_path: Path) -> None:
    """All of it comes, the verdict too, where more is printed than the pipe holds."""
    script = tmp_path / "loud.py"
    script.write_text("for k in range(40000): print('line', k)\nraise SystemExit(3)\n")
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    command = [sys.executable, "-m", "lockstep", "run", str(script)]
    launcher = subprocess.Popen(command, stdout=writer, stderr=writer, cwd=tmp_path)
    os.close(writer)
    counts, deadline = [0], time.monotonic() + 60
    # Writes that do not fill their pages leave a pipe full below its size: full is what grows no more.
    while (not counts[-1] or counts[-1] != counts[-20:][0]) and time.monotonic() < deadline:
        time.sleep(0.05)
        counts.append(_waiting(reader))
    assert counts[-1] > fcntl.fcntl(reader, fcntl.F_GETPIPE_SZ) // 2
    with os.fdopen(reader, "rb") as stream:
        told = stream.read().decode().splitlines()
    launcher.wait(timeout=30)
    assert [line for line in told if line.startswith("line ")] == [
        f"line {k}" for k in range(40000)
    ]
    assert any(": exit code 3" in line for line in told)


def _waiting(reader: int) -> int:
    """Return how many bytes wait in a pipe."""
    count = fcntl.ioctl(reader, termios.FIONREAD, bytes(4))
    return int(struct.unpack("i", count)[0])
