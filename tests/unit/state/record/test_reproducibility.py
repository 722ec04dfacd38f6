"""Digests of earlier runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lockstep.state.files.run_file import Identity
from lockstep.state.record import reproducibility

IDENTITY = Identity("n", "s.py", [], 0, 2, 1, "fp32", "cpu")


def runs(place: Path, digests: list[str], fingerprint: str = "f.1") -> Path:
    """Write finished runs, the oldest first, and return the directory of the next one."""
    for number, digest in enumerate(digests):
        directory = place / f"{number:04}"
        directory.mkdir()
        content = {"fingerprint": fingerprint, "digest": digest, "generations": [{"ranks": 3}]}
        (directory / "run.json").write_text(json.dumps(content))
    return place / f"{len(digests):04}"


@pytest.mark.parametrize(
    ("digests", "found"),
    [
        ([], None),
        (["sha256:a"], None),
        (["sha256:b"], "0000 (3 ranks) ended with different weights (sha256:b…)"),
        (["sha256:b", "sha256:a", "sha256:c", "sha256:a"], "0002 (3 ranks)"),
        (["sha256:b", *["sha256:a"] * 49], "0000 (3 ranks)"),
        (["sha256:b", *["sha256:a"] * 50], None),  # only so many are looked at
    ],
)
def test_the_newest_that_ended_otherwise(tmp_path: Path, digests: list[str], found: str) -> None:
    own = runs(tmp_path, digests)
    line = reproducibility.other_digest(own, "f.1", "sha256:a", 2)
    assert (line is None) == (found is None)
    assert found is None or found in str(line)
    assert reproducibility.other_digest(own, "g.1", "sha256:a", 2) is None  # another script


@pytest.mark.parametrize(("ranks", "found"), [(3, False), (1, True), (2, True)])
def test_other_settings_count_where_the_number_of_ranks_differs(
    tmp_path: Path, ranks: int, found: bool
) -> None:
    """Settings may follow from the number of ranks, or from a file that the user has changed."""
    line = reproducibility.other_digest(runs(tmp_path, ["sha256:b"]), "f.2", "sha256:a", ranks)
    assert (line is not None) == found
    assert not found or "same script, arguments, seed, with different settings or data" in str(line)


def test_a_directory_that_cannot_be_read_is_passed_over(tmp_path: Path) -> None:
    own = runs(tmp_path, ["sha256:b"])
    for name, text in (("0005", "{"), ("0006", "[]"), ("0007", '{"digest": 3}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(text)
    assert "0000" in str(reproducibility.other_digest(own, "f.1", "sha256:a", 2))


def test_the_fingerprint_follows_from_source_and_settings(monkeypatch, tmp_path: Path) -> None:
    module = tmp_path / "helper_of_a_test.py"
    module.write_text("x = 1")
    monkeypatch.syspath_prepend(tmp_path)
    __import__("helper_of_a_test")
    first = reproducibility.fingerprint(IDENTITY, ["lr=1"])
    assert reproducibility.fingerprint(IDENTITY, ["lr=1"]) == first
    assert reproducibility.fingerprint(IDENTITY, ["lr=2"]) != first
    module.write_text("x = 2")
    assert reproducibility.fingerprint(IDENTITY, ["lr=1"]) != first
