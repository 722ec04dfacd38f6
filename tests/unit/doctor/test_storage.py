"""The file system of a run directory, looked at for real; and facts that a judgement cannot read."""

from __future__ import annotations

import errno
import fcntl
from pathlib import Path

import pytest

from lockstep.doctor import storage
from lockstep.doctor.check import Asked, Seen
from lockstep.doctor.examine import CHECKS, _judged


def judged(name: str, *facts: object) -> list[tuple[str, str]]:
    told = tuple({name: one, "problems": {}} for one in facts)
    labels = tuple(f"node {n}" for n in range(len(facts)))
    return [(one.level, one.text) for one in _judged(name, Seen(labels, told))]


def looked(place: Path) -> list[tuple[str, str]]:
    look = CHECKS["storage"].look
    assert look is not None
    return judged("storage", look(Asked(run_dir=place)))


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
    ((level, text),) = judged("storage", {"of another": "version"})
    assert level == "failure"
    assert "what nodes told cannot be compared: KeyError: 'place'" in text


def test_clocks_are_not_compared_where_a_node_was_lost() -> None:
    seen = Seen(("node 1 (b)",), ({"problems": {}},))
    ((level, text),) = [(one.level, one.text) for one in _judged("clocks", seen)]
    assert (level, text) == ("skipped", "not compared: a node was lost before")
