"""`manifest.json`: says what a checkpoint is, and notices when it is something else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lockstep.state.checkpoint import catalog
from lockstep.state.checkpoint.catalog import (
    DamagedError,
    FileSpec,
    Manifest,
    NewerFormatError,
    TensorSpec,
)

IDENTITY = {"name": "digits", "seed": 0, "arguments": ["--lr", "0.1"], "versions": {"torch": "2"}}


def example(directory: Path | None = None, **changes: object) -> Manifest:
    """A manifest, of two files that are written to `directory`."""
    files = {}
    if directory is not None:
        for name in ("a", "b"):
            (directory / name).write_bytes(name.encode() * 100)
            files[name] = FileSpec.of(directory / name)
    settings = {
        "identity": IDENTITY,
        "step": 345,
        "best": 0.5,
        "text": '{"epoch": 1, "ü": "\\u2028"}',
        "tensors": {"w": TensorSpec("float32", (3, 4)), "n": TensorSpec("int64", ())},
        "files": files,
    }
    return Manifest(**{**settings, **changes})


def test_it_comes_back_as_it_was(tmp_path: Path) -> None:
    for best in (None, 0.1, 1e300, float("inf"), -3):
        written = example(tmp_path, best=best)
        catalog.write_manifest(tmp_path, written)
        assert catalog.read_manifest(tmp_path) == written
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "manifest.json"]
    assert (tmp_path / "manifest.json").stat().st_mode & 0o777 == 0o600


def test_any_flipped_bit_is_noticed() -> None:
    data = example().dumps().encode()
    for place in range(0, len(data) - 1, 7):
        flipped = bytearray(data)
        flipped[place] ^= 1 << place % 8
        try:
            text = flipped.decode()
        except UnicodeDecodeError:
            continue
        try:
            read = Manifest.loads(text)
        except (DamagedError, NewerFormatError):
            continue
        assert read == example(), text  # a bit of white space, which says nothing


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", "null", '"text"', "{}", '{"format": 1}', '{"format": "1"}']
)
def test_what_is_no_manifest(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(DamagedError, match="manifest"):
        catalog.read_manifest(tmp_path)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    with pytest.raises(DamagedError, match="is missing"):
        catalog.read_manifest(tmp_path)
    (tmp_path / "manifest.json").write_bytes(b"\xff\xfe")
    with pytest.raises(DamagedError, match="is no text"):
        catalog.read_manifest(tmp_path)


def test_a_newer_format_names_the_version_that_wrote_it() -> None:
    content = {**json.loads(example().dumps()), "format": 9, "lockstep": "9.1", "more": []}
    with pytest.raises(NewerFormatError, match=r"format 9, written by Lockstep 9\.1") as caught:
        Manifest.loads(json.dumps(content))
    assert "install" in (caught.value.hint or "")


@pytest.mark.parametrize("name", ["../a", "/etc/passwd", "a/b", "..", "."])
def test_files_elsewhere_are_refused(name: str) -> None:
    text = example(files={name: FileSpec(0, "")}).dumps()
    with pytest.raises(DamagedError, match="no file of the checkpoint"):
        Manifest.loads(text)


def test_files_are_compared_with_what_was_written(tmp_path: Path) -> None:
    told = example(tmp_path)
    told.verify(tmp_path)
    (tmp_path / "b").write_bytes(b"b" * 99)
    with pytest.raises(DamagedError, match="b has 99 bytes; expected 100"):
        told.verify(tmp_path)
    (tmp_path / "b").write_bytes(b"b" * 99 + b"c")
    with pytest.raises(DamagedError, match="b has a different checksum"):
        told.verify(tmp_path)
    (tmp_path / "a").unlink()
    with pytest.raises(DamagedError, match="a is missing"):
        told.verify(tmp_path)


def test_differences_of_identities() -> None:
    assert example().differences(dict(IDENTITY)) == []
    assert example().differences({**IDENTITY, "arguments": ("--lr", "0.1")}) == []
    assert example().differences({**IDENTITY, "seed": 1}) == ["seed: 0 recorded, 1 now"]
    less = {name: value for name, value in IDENTITY.items() if name != "seed"}
    assert example().differences(less) == ["seed: 0 recorded, None now"]
    assert example().differences({**IDENTITY, "new": 1}) == ["new: None recorded, 1 now"]


def test_noting_what_is_best(tmp_path: Path) -> None:
    catalog.write_manifest(tmp_path, example(tmp_path, best=None))
    catalog.note_best(tmp_path, 0.75)
    assert catalog.read_manifest(tmp_path) == example(tmp_path, best=0.75)
