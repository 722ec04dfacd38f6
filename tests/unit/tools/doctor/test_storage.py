"""The file system of a run directory, looked at for real; and facts that a judgement cannot read."""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
from pathlib import Path

import pytest

from lockstep.launch.agent.child import Child
from lockstep.tools.doctor import storage
from lockstep.tools.doctor.check import NodeReports, Options
from lockstep.tools.doctor.examine import CHECKS, _judged

_FAILED = "not compared: the network check failed"
_AWAY = "not compared: the other nodes did not come"


def judged(name: str, *facts: object) -> list[tuple[str, str]]:
    told = tuple({name: one, "problems": {}} for one in facts)
    labels = tuple(f"node {n}" for n in range(len(facts)))
    return [(one.level, one.text) for one in _judged(name, NodeReports(labels, told))]


def looked(place: Path) -> list[tuple[str, str]]:
    look = CHECKS["storage"].look
    assert look is not None
    return judged("storage", look(Options(run_dir=place)))


def test_a_directory_that_is_not_there_yet(tmp_path: Path) -> None:
    ((level, text),) = looked(tmp_path / "runs" / "one")
    assert level == "ok"
    assert text.startswith(f"{tmp_path}: locks, rename, ")
    assert not list(tmp_path.iterdir())


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    assert looked(tmp_path / "runs" / "one") == [
        ("failure", f"{tmp_path}/runs is a file; expected a directory")
    ]


def test_a_directory_that_cannot_be_written() -> None:
    ((level, text),) = looked(Path("/proc/1"))
    assert level == "failure"
    assert text.startswith("/proc/1 cannot be written: ")
    assert "Errno" not in text


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another user")
def test_a_directory_that_may_not_be_searched() -> None:
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o711)
        locked = Path(name, "locked")
        locked.mkdir(0o700)

        def look(run_dir: str) -> object:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            return CHECKS["storage"].look(Options(run_dir=Path(run_dir)))  # type: ignore[misc]

        facts = Child(look).give(f"{locked}/runs/one").result(10)
        text = f"{locked} cannot be written: Permission denied"
        assert judged("storage", facts) == [("failure", text)]


def test_a_file_system_without_locks_is_no_lock_that_another_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    with (tmp_path / "lock").open("w") as file, (tmp_path / "lock").open("w") as other:
        assert storage._takes(file.fileno())
        assert not storage._takes(other.fileno())
        monkeypatch.setattr(fcntl, "flock", refused)
        with pytest.raises(OSError, match="No locks"):
            storage._takes(file.fileno())


def test_facts_of_another_version_are_a_failure_of_the_check() -> None:
    facts = {"storage": {"of another": "version"}, "problems": {}}
    told = ({**facts, "versions": {"bits": {"lockstep": "0.1"}}}, {**facts, "versions": []})
    (one,) = _judged("storage", NodeReports(("node 0", "node 1"), told))
    assert one.level == "failure"
    assert "facts of the nodes cannot be compared (KeyError: 'place'): node 0 has " in one.text
    assert one.text.endswith("lockstep 0.1; node 1 has another version of lockstep")


@pytest.mark.parametrize(
    ("told", "asked", "level", "text"),
    [
        ({}, 1, "skipped", "not compared: a node was lost before"),
        ({"problems": {"network": "no listener"}}, 1, "skipped", _FAILED),
        ({"network": {"problem": "apart", "clocks": []}}, 1, "skipped", _FAILED),
        ({"network": {"problem": "apart", "clocks": ["b is late"]}}, 1, "warning", "b is late"),
        ({"network": {"alone": True, "clocks": []}}, 1, "skipped", "one host has one clock"),
        ({"network": {"alone": True, "clocks": []}}, 2, "skipped", _AWAY),
    ],
)
def test_why_clocks_are_not_compared(
    told: dict[str, object], asked: int, level: str, text: str
) -> None:
    seen = NodeReports(("node 1 (b)",), ({"problems": {}, **told},), asked)
    assert [(one.level, one.text) for one in _judged("clocks", seen)] == [(level, text)]
