"""`run.json`: whole or not at all, and only continued by the run that it is of."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import RunDirectoryError
from lockstep.state.files import run_file
from lockstep.state.files.run_file import Identity

IDENTITY = Identity(
    name="digits",
    script="train.py",
    arguments=["--lr", "0.1"],
    seed=0,
    replicas=4,
    threads=1,
    precision="fp32",
    device="cpu",
    versions={"torch": "2.13.0"},
)


def record(path: Path, status: str, identity: Identity = IDENTITY) -> None:
    from dataclasses import asdict

    run_file.write(path, {"identity": asdict(identity), "status": status})


def test_a_new_directory_is_free(tmp_path: Path) -> None:
    assert run_file.read(tmp_path) is None
    run_file.check(tmp_path, IDENTITY, fresh=False)


@pytest.mark.parametrize("status", ["running", "failed"])
def test_an_unfinished_run_is_continued_by_itself(tmp_path: Path, status: str) -> None:
    record(tmp_path, status)
    run_file.check(tmp_path, replace(IDENTITY), fresh=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 1}, "seed: 0 recorded, 1 now"),
        ({"replicas": 2}, "replicas: 4 recorded, 2 now"),
        ({"threads": 2}, "threads: 1 recorded, 2 now"),
        ({"arguments": []}, r"arguments: \['--lr', '0.1'\] recorded, \[\] now"),
        ({"versions": {"torch": "2.14"}}, "versions: .*2.13.0.* recorded, .*2.14.* now"),
        ({"seed": 1, "name": "x"}, "name: 'digits' recorded, 'x' now; seed: 0 recorded, 1 now"),
    ],
)
def test_another_run_is_refused_with_both_values(tmp_path: Path, changes, message) -> None:
    record(tmp_path, "running")
    with pytest.raises(RunDirectoryError, match=f"is another one: {message}") as caught:
        run_file.check(tmp_path, replace(IDENTITY, **changes), fresh=False)
    assert "--fresh" in caught.value.hint
    run_file.check(tmp_path, replace(IDENTITY, **changes), fresh=True)


def test_a_finished_run_is_not_overwritten(tmp_path: Path) -> None:
    record(tmp_path, "finished")
    with pytest.raises(RunDirectoryError, match="is finished") as caught:
        run_file.check(tmp_path, IDENTITY, fresh=False)
    assert "--fresh" in caught.value.hint
    run_file.check(tmp_path, IDENTITY, fresh=True)


@pytest.mark.parametrize(
    ("third", "refused"),
    [
        ("finished", True),
        ("running", False),
        ("preempted", False),
        ("failed", False),
        (None, False),
    ],
)
def test_a_finished_run_is_passed_over_while_a_later_one_of_its_script_is_not(
    tmp_path: Path, third: str | None, refused: bool
) -> None:
    paths = [tmp_path, tmp_path / "second-2", tmp_path / "third-3"]
    for path, status in zip(paths, ("finished", "finished", third), strict=True):
        if status is not None:
            path.mkdir(exist_ok=True)
            record(path, status)
    run_file.link(paths[0], paths[1])
    run_file.link(paths[1], paths[2])
    if refused:
        with pytest.raises(RunDirectoryError, match="is finished"):
            run_file.check(tmp_path, IDENTITY, fresh=False)
    else:
        run_file.check(tmp_path, IDENTITY, fresh=False)
    # Directories that lead back to each other have nothing that is left to do.
    run_file.link(paths[1], paths[0])
    with pytest.raises(RunDirectoryError, match="is finished"):
        run_file.check(tmp_path, IDENTITY, fresh=False)


@pytest.mark.parametrize(
    "text", ["", "{", '{"status": ', "nonsense", "\0\1", "[]", '"text"', "3", '{"identity": []}']
)
def test_a_damaged_record(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(RunDirectoryError) as caught:
        run_file.check(tmp_path, IDENTITY, fresh=False)
    assert caught.value.hint


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(RunDirectoryError, match="cannot be read"):
        run_file.read(tmp_path)


def test_a_record_that_cannot_be_opened(tmp_path: Path) -> None:
    (tmp_path / "run.json").mkdir()
    with pytest.raises(RunDirectoryError, match="cannot be read"):
        run_file.read(tmp_path)
    with pytest.raises(RunDirectoryError, match="cannot be written"):
        run_file.write(tmp_path, {})


def test_what_came_after_a_run_stays_when_its_record_is_written_anew(tmp_path: Path) -> None:
    assert run_file.kept(tmp_path) == {}
    record(tmp_path, "finished")
    run_file.link(tmp_path, tmp_path / "second-2")
    assert run_file.kept(tmp_path) == {"next": "second-2"}
    (tmp_path / "run.json").write_text("damaged")
    assert run_file.kept(tmp_path) == {}, "it is about to be replaced"
    run_file.forget(tmp_path)
    assert run_file.read(tmp_path) is None
    run_file.forget(tmp_path)


def test_writing_replaces_the_whole(tmp_path: Path) -> None:
    for number in range(3):
        run_file.write(tmp_path, {"number": number})
    assert run_file.read(tmp_path) == {"number": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_a_write_that_fails_leaves_the_old_record(tmp_path: Path, monkeypatch) -> None:
    run_file.write(tmp_path, {"number": 0})

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunDirectoryError, match="No space left on device") as caught:
        run_file.write(tmp_path, {"number": 1})
    assert "--run-dir" in caught.value.hint
    assert run_file.read(tmp_path) == {"number": 0}
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_other_users_may_not_read_it(tmp_path: Path) -> None:
    old = os.umask(0o022)
    try:
        run_file.write(tmp_path, {})
    finally:
        os.umask(old)
    assert (tmp_path / "run.json").stat().st_mode & 0o777 == 0o600


def test_a_directory_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="cannot be written"):
        run_file.write(tmp_path / "gone", {})
