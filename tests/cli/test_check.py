"""`lockstep check` and `lockstep run --check`: exit codes, fixes, what is said before a launch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lockstep.tools.check.rules import RULES

pytestmark = pytest.mark.forked

BAD, HANGS = RULES["LS202"].bad, RULES["LS401"].bad


def test_exit_codes(lockstep):
    bad, good = lockstep.script(BAD, "bad.py"), lockstep.script("x = 1\n", "good.py")
    done = lockstep("check", good)
    assert (done.code, done.out) == (0, "No findings.\n")
    done = lockstep("check", good, bad)
    assert done.code == 1
    assert "LS202 [*]" in done.out
    assert lockstep("check", "--exit-zero", bad).code == 0
    assert lockstep("check", "--ignore", "LS2", bad).code == 0
    for words in (["none.py"], [], ["--fix", "--diff", bad], ["--select", "LS9", bad]):
        done = lockstep("check", *words)
        assert done.code == 2, words
        assert "lockstep: error: " in done.err


def test_notes_on_scripts_that_no_rule_judges(lockstep):
    plain = "import torch\nfor x in data:\n    model(x).backward()\n"
    done = lockstep("check", lockstep.script(plain, "plain.py"))
    assert done.code == 0
    assert done.out.startswith("note: plain.py: no rule looked at it: it trains, and uses neither")
    asked = "import lockstep\n# lockstep: question: a\nx = 1\n# lockstep: question: b\n"
    done = lockstep("check", lockstep.script(asked, "asked.py"))
    assert done.out == "note: asked.py: 2 open questions of lockstep convert\nNo findings.\n"


def test_a_fix_is_shown_and_made(lockstep):
    bad = lockstep.script(BAD, "bad.py")
    done = lockstep("check", "--diff", bad)
    assert done.code == 1
    assert (
        "\n-    return DataLoader(dataset, batch_size=32, sampler=sampler, shuffle=True)"
        in done.out
    )
    assert "\n+    return DataLoader(dataset, batch_size=32, sampler=sampler)" in done.out
    done = lockstep("check", "--fix", bad)
    assert (done.code, done.out, done.err) == (0, "No findings.\n", "1 fixed\n")
    assert lockstep("check", "--diff", bad).code == 0


def test_a_fix_keeps_the_mode_and_follows_links(lockstep):
    bad = lockstep.directory / lockstep.script(BAD, "bad.py")
    bad.chmod(0o751)
    link = bad.with_name("link.py")
    link.symlink_to(bad)
    done = lockstep("check", "--fix", "link.py")
    assert (done.code, done.err) == (0, "1 fixed\n")
    assert bad.stat().st_mode & 0o777 == 0o751
    assert link.is_symlink()
    assert bad.read_text() != BAD


def test_a_fix_that_cannot_be_written_leaves_the_script(tmp_path):
    """The shell's limit on the size of files stands for a disk that is full."""
    bad = tmp_path / "bad.py"
    bad.write_text(BAD)
    words = ["bash", "-c", 'ulimit -f 0; exec "$0" -m lockstep check --fix "$1"', sys.executable]
    done = subprocess.run([*words, bad], check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert f"{bad} cannot be written" in done.stderr
    assert bad.read_text() == BAD
    assert list(tmp_path.iterdir()) == [bad]


def test_only_what_is_mended_is_counted(lockstep):
    script = lockstep.script(BAD + "\n\n" + HANGS, "two.py")
    done = lockstep("check", "--fix", script)
    assert done.code == 1
    assert "LS401" in done.out
    assert "LS202" not in done.out
    assert done.err == "1 fixed\n"


def test_rules_are_listed_and_explained(lockstep):
    done = lockstep("check", "--list")
    assert done.code == 0
    assert all(code in done.out for code in RULES)
    done = lockstep("check", "--explain", "LS202")
    assert RULES["LS202"].good in done.out
    assert lockstep("check", "--explain", "LS9").code == 2


def test_run_check_shows_what_would_hang_and_starts(lockstep):
    script = lockstep.script(f"{HANGS}\nprint('started')\n")
    done = lockstep("run", "--check", script)
    assert done.code == 0, done.err
    assert "LS401" in done.err
    assert "started" in done.out
    assert "LS401" not in lockstep("run", script).err


def test_run_check_finds_the_script_of_a_package(lockstep):
    lockstep.script(f"{HANGS}\nprint('started')\n", "pkg/__main__.py")
    done = lockstep("run", "--check", "-m", "pkg")
    assert done.code == 0, done.err
    assert "pkg/__main__.py" in done.err
    assert "LS401" in done.err
