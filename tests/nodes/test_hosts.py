"""The hosts of these tests are what they claim to be, and nothing stays of them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.conftest import Lockstep
from tests.hosts import Hosts, require


@pytest.fixture(autouse=True)
def possible() -> None:
    require()


def test_names_and_directories(hosts: Hosts, tmp_path: Path) -> None:
    a, b = hosts.lan(2)
    (tmp_path / "file").touch()
    script = "cat /proc/sys/kernel/hostname; getent hosts a b; ls"
    seen = a.start("sh", "-c", script, cwd=tmp_path)
    unseen = b.start("sh", "-c", f"{script} {tmp_path}", hidden=tmp_path)
    (on_a, on_b) = (one.out.split() for one in hosts.finish([seen, unseen]))
    assert on_a == ["a", a.address, "a", b.address, "b", "file"]
    assert on_b == ["b", a.address, "a", b.address, "b"]


def test_nothing_stays() -> None:
    stuck: list[subprocess.Popen[str]] = []

    def fail() -> None:
        with Hosts() as hosts:
            a, b = hosts.lan(2)
            stuck.extend(host.start("sleep", "1000") for host in (a, b))
            stuck.append(a.start("sh", "-c", "trap '' TERM; sleep 1000 & wait"))
            raise RuntimeError("as a test that fails")

    with pytest.raises(RuntimeError, match="as a test that fails"):
        fail()
    assert all(Lockstep.gone(process.pid) for process in stuck)
    listed = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout  # noqa: S607
    assert f"-{os.getpid()}-" not in listed
    assert not any(Path("/etc/netns").glob(f"*-{os.getpid()}-*"))


def test_what_a_killed_run_left_is_removed_by_the_next() -> None:
    left = "lockstep-tests-999999999-abc-a"  # no process has this number
    subprocess.run(["ip", "netns", "add", left], check=True)  # noqa: S607
    with Hosts():
        listed = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True)  # noqa: S607
    assert left not in listed.stdout
