"""Lists of nodes as Slurm writes them, and the addresses it knows."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from lockstep.errors import WorldError
from lockstep.world import slurm_nodes


# What `scontrol show hostnames` of Slurm 22.05 answers, with two exceptions; tests/slurm compares more.
@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n[1-2,5],m[01-03],c", "n1 n2 n5 m01 m02 m03 c"),
        ("b,a", "b a"),
        ("n[09-11]", "n09 n10 n11"),
        ("[1-2]", "1 2"),
        ("n1[9-11]", "n19 n110 n111"),
        ("a[1-2]b[01-02]", "a1b01 a1b02 a2b01 a2b02"),
        ("SH-IDC1-10-5-36-[65-66,70]", "SH-IDC1-10-5-36-65 SH-IDC1-10-5-36-66 SH-IDC1-10-5-36-70"),
        ("gpu-1.example.org,gpu-2.example.org", "gpu-1.example.org gpu-2.example.org"),
        ("x[1-2]y,z[3]w", "x1y x2y z3w"),  # scontrol refuses a name after a name with a tail
    ],
)
def test_lists(text, names):
    assert slurm_nodes.expand(text) == tuple(names.split())


@pytest.mark.parametrize(
    "text",
    [
        "",
        ",",
        "a,,b",  # scontrol overlooks the empty name
        "a,",
        "n[1-",
        "n[1]]",
        "n[]",
        "n[2-1]",
        "n[a-b]",
        "n[1-2-3]",
        "n[1-3/2]",
        "n[0-99999999]",
        "n[0-9999999999999999999]",
        "n1 n2",
        "@all",
        "n*",
        "n1!n2",
        "n\n1",
    ],
)
def test_garbage_is_refused(text):
    began = time.monotonic()
    with pytest.raises(WorldError) as caught:
        slurm_nodes.expand(text)
    assert caught.value.message.startswith(f"the node list {text!r} cannot be parsed: ")
    assert time.monotonic() - began < 2


@pytest.fixture
def no_scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH with nothing on it yet."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def program(directory: Path, text: str) -> None:
    file = directory / "scontrol"
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)


def test_no_scontrol_no_address(no_scontrol):
    assert slurm_nodes.address("n1") is None


def test_a_name_that_is_none_never_reaches_a_command(no_scontrol):
    program(no_scontrol, "echo NodeAddr=10.0.0.1")
    assert slurm_nodes.address("n1") == "10.0.0.1"
    for name in ("--help", "n1 n2", "", "n[1-2]", "n1\n"):
        assert slurm_nodes.address(name) is None


@pytest.mark.parametrize(
    "text",
    [
        "echo Node n1 not found; exit 1",
        "echo NodeAddr=n1",
        "echo nothing of use",
        "printf '\\377\\376'",
        "exit 0",
    ],
)
def test_scontrol_that_knows_nothing(no_scontrol, text):
    program(no_scontrol, text)
    assert slurm_nodes.address("n1") is None


def test_scontrol_that_does_not_answer(no_scontrol, monkeypatch):
    program(no_scontrol, "exec /bin/sleep 60")
    monkeypatch.setattr(slurm_nodes, "_SCONTROL_SECONDS", 0.2)
    began = time.monotonic()
    assert slurm_nodes.address("n1") is None
    assert time.monotonic() - began < 5
