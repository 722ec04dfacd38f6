"""A launcher in a terminal, as a shell's job."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
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
