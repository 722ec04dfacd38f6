from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lockstep.errors import UsageError
from lockstep.state.files import directory


def test_launches_of_one_second_have_directories_of_their_own(tmp_path):
    made = [directory.create(None, "train", tmp_path) for _ in range(3)]
    assert len(set(made)) == 3
    assert all((path / "logs").is_dir() and path.parent == tmp_path / "train" for path in made)


def test_a_named_directory_is_used_whether_new_or_not(tmp_path):
    for _ in range(2):
        assert directory.create(tmp_path / "a" / "b", "train") == tmp_path / "a" / "b"
    assert list((tmp_path / "a" / "b").rglob("*")) == [tmp_path / "a" / "b" / "logs"]


def test_the_result_is_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert directory.create(Path("here"), "train") == tmp_path / "here"
    assert directory.create(None, "train").is_absolute()


def test_a_file_in_the_way(tmp_path):
    (tmp_path / "file").write_text("")
    for path in ("file", "file/below"):
        with pytest.raises(UsageError, match="is a file, or is below one") as caught:
            directory.create(tmp_path / path, "train")
        assert "--run-dir" in caught.value.hint


def test_launchers_of_several_nodes_make_one_directory_at_once(tmp_path):
    def make(_: int) -> Path:
        return directory.create(None, "train", tmp_path, stamp="20260101-000000")

    with ThreadPoolExecutor(8) as pool:
        made = set(pool.map(make, range(400)))
    assert made == {tmp_path / "train" / "20260101-000000"}
    assert [path.name for path in tmp_path.rglob("*")] == ["train", "20260101-000000", "logs"]
