"""Which host this is."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys

import pytest

from lockstep.world import host

_CODE = "from lockstep.world import host; print(host.identity())"


def elsewhere(*program: str) -> str:
    done = subprocess.run(
        [*program, sys.executable, "-c", _CODE],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    return done.stdout.strip()


def test_processes_of_one_host_agree() -> None:
    assert re.fullmatch(r"[0-9a-f-]{36}/\d+", host.identity())
    assert elsewhere() == host.identity()


def test_a_network_of_its_own_makes_another_host() -> None:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs root and unshare")
    other = elsewhere("unshare", "--net")
    assert other != host.identity()
    assert other.split("/")[0] == host.identity().split("/")[0]


def test_the_name_is_the_systems() -> None:
    assert host.name() == socket.gethostname()


def test_versions_are_those_that_bits_depend_on() -> None:
    found = host.versions()
    assert found["python"] == f"{sys.version_info.major}.{sys.version_info.minor}"
    assert all(found[name] for name in ("lockstep", "torch", "numpy"))
