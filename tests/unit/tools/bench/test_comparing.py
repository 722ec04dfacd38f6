"""Results beside each other: what compares, by what, and the tables that come with Lockstep."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import UsageError
from lockstep.tools.bench.comparing import compare, load, shipped
from lockstep.tools.bench.results import add_speedups


def result(**changes: Any) -> dict[str, Any]:
    rows = [
        {"ranks": n, "strategy": "ddp", "exchange": None, "measured_by": "steps", "batch": 64.0,
         "samples_per_second": 100.0 * n, "devices": ["cpu"]}
        for n in (1, 2)
    ]  # fmt: skip
    add_speedups(rows)
    made = {
        "format": 1,
        "kind": "result",
        "script": {"name": "train.py", "arguments": [], "sha256": "1"},
        "machine": {"processor": "A", "cores": 2, "versions": {"torch": "2.13"}},
        "options": [],
        "results": rows,
    }
    return {**made, **changes}


def test_the_same_script_compares_by_rate() -> None:
    other = copy.deepcopy(result())
    for row in other["results"]:
        row["samples_per_second"] *= 0.5
    found = compare(result(), other, "old.json")
    assert found["by"] == "rate"
    assert [(row["ranks"], row["ratio"]) for row in found["rows"]] == [(1, 2.0), (2, 2.0)]
    assert found["notes"] == []


def test_another_machine_is_said_and_allowed() -> None:
    machine = {"processor": "B", "cores": 8, "versions": {"torch": "2.11"}}
    script = {"name": "train.py", "arguments": [], "sha256": "2"}
    notes = compare(result(), result(machine=machine, script=script), "old.json")["notes"]
    assert notes == [
        "the script has changed between the two",
        "processor differs: A here, B there",
        "cores differs: 2 here, 8 there",
        "version of torch differs: 2.13 here, 2.11 there",
    ]


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ({"name": "other.py", "arguments": []}, "name: 'train.py' here, 'other.py' there"),
        ({"name": "train.py", "arguments": ["-x"]}, r"arguments: \[\] here, \['-x'\] there"),
    ],
)
def test_another_script_does_not_compare(script: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        compare(result(), result(script=script), "old.json")


def test_another_batch_does_not_compare() -> None:
    other = copy.deepcopy(result())
    other["results"][1]["batch"] = 32.0
    with pytest.raises(UsageError, match="samples of a step on 2 ranks: 64 here, 32 there"):
        compare(result(), other, "old.json")


def test_steps_beside_wall_time_compare_by_speedup() -> None:
    rows = [
        {"ranks": n, "strategy": "ddp", "measured_by": "wall time", "wall_seconds": 60 / n}
        for n in (1, 2)
    ]
    add_speedups(rows)
    found = compare(result(), result(results=rows), "old.json")
    assert found["by"] == "speed-up"
    assert [row["ratio"] for row in found["rows"]] == [None, None]
    assert [row["speedup_there"] for row in found["rows"]] == [1, 2]
    assert "compared by speed-up" in found["notes"][0]


def test_the_table_of_the_article() -> None:
    assert shipped() == ["voc2012-v100"]
    table = load("voc2012-v100")
    known = {(row["ranks"], row["strategy"]): row for row in table["results"]}
    assert {key: row["wall_seconds"] for key, row in known.items()} == {
        (1, None): 32 * 60 + 58,
        (4, "dp"): 14 * 60 + 40,
        (8, "dp"): 9 * 60 + 40,
        (4, "ddp"): 11 * 60 + 21,
        (8, "ddp"): 9 * 60 + 8,
    }
    assert known[8, "ddp"]["speedup"] == pytest.approx(1978 / 548, rel=1e-4)
    assert known[8, "ddp"]["efficiency"] == pytest.approx(1978 / 548 / 8, rel=1e-4)


def test_a_published_table_compares_by_speedup_with_any_script() -> None:
    found = compare(result(), load("voc2012-v100"), "voc2012-v100")
    assert found["by"] == "speed-up"
    assert len(found["rows"]) == 6, "two layouts of one's own, four that only the table has"
    assert found["rows"][0]["speedup_there"] == 1
    assert found["rows"][1]["speedup_there"] is None
    assert "compared by speed-up and efficiency" in found["notes"][0]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[]", "it is no file of results"),
        ('{"format": 1}', "its results are not rows"),
        ('{"format": 1, "results": [{"ranks": 0}]}', "its results are not rows"),
        (
            '{"format": 1, "results": [{"ranks": 1, "wall_seconds": -1}]}',
            "its results are not rows",
        ),
        ('{"format": 1, "results": [{"ranks": 1}], "script": {}}', "it does not name a script"),
        ("{", "it is no JSON"),
        ('{"format": 2}', "has format 2; this version reads up to 1"),
    ],
)
def test_files_that_are_no_results(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(content)
    with pytest.raises(UsageError, match=said):
        load(str(path))


def test_a_file_of_results_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(json.dumps(result()))
    assert load(str(path)) == result()
