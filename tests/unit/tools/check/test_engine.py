"""Files, notebooks, comments, settings: what is read, and which rules run on it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from lockstep.errors import LockstepError, UsageError
from lockstep.tools.check import config, engine
from lockstep.tools.check.config import Selection
from lockstep.tools.check.output import FORMS
from lockstep.tools.check.rules import RULES

BAD = RULES["LS202"].bad
LINE = next(n for n, line in enumerate(BAD.splitlines(), 1) if "shuffle=True" in line)


@pytest.fixture(autouse=True)
def _forget() -> None:
    config._above.cache_clear()


def codes(*paths: Path, flags: Selection | None = None) -> list[str]:
    return [one.code for one in engine.check(list(paths), flags).findings]


def written(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_files_of_a_directory(tmp_path: Path) -> None:
    for name in ("a.py", "b.ipynb", "c.txt", ".venv/d.py", "e/f.py", "build/g.py"):
        written(tmp_path / name, "")
    found = [str(file.relative_to(tmp_path)) for file in engine.files([tmp_path])]
    assert found == ["a.py", "b.ipynb", "e/f.py"]
    with pytest.raises(UsageError, match="expected at least one"):
        engine.files([written(tmp_path / "x/y.txt", "").parent])
    with pytest.raises(LockstepError, match="does not exist"):
        engine.files([tmp_path / "none.py"])


@pytest.mark.parametrize(
    ("text", "line"), [("print 'old'\n", 1), ("x = (\n", 1), ("def f():\n  a\n b\n", 3)]
)
def test_a_file_that_is_not_python_3_is_named_and_the_others_are_checked(
    text: str, line: int, tmp_path: Path
) -> None:
    broken, bad = written(tmp_path / "a.py", text), written(tmp_path / "b.py", BAD)
    first, *rest = engine.check([broken, bad]).findings
    assert (first.code, first.line, first.path) == ("LS001", line, broken)
    assert [one.code for one in rest] == ["LS202"]


def test_a_file_that_cannot_be_decoded(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_bytes(b"x = '\xff'\n")
    assert codes(path) == ["LS001"]


def test_cells_of_a_notebook(tmp_path: Path) -> None:
    sources = ["%pip install x\n!ls\nimport torch", "print 'old'", "%%bash\nls", BAD]
    cells = [{"cell_type": "code", "source": text.splitlines(True)} for text in sources]
    cells.insert(1, {"cell_type": "markdown", "source": ["# Title"]})
    path = written(tmp_path / "a.ipynb", json.dumps({"cells": cells, "nbformat": 4}))
    found = [(one.code, one.cell, one.line) for one in engine.check([path]).findings]
    assert found == [("LS001", 3, 1), ("LS202", 5, LINE)]
    assert codes(written(tmp_path / "b.ipynb", "{}")) == ["LS001"]


@pytest.mark.parametrize(
    ("comment", "expected"),
    [
        ("# lockstep: ignore[LS202]", []),
        ("# lockstep: ignore[LS401, LS202]", []),
        ("# lockstep: ignore", []),
        ("# lockstep: ignore[LS401]", ["LS202"]),
        ("# lockstep: ignore[LS999]", ["LS202", "LS002"]),
    ],
)
def test_ignore_comments(comment: str, expected: list[str], tmp_path: Path) -> None:
    lines = BAD.splitlines()
    lines[LINE - 1] += f"  {comment}"
    found = codes(written(tmp_path / "a.py", "\n".join(lines)))
    assert sorted(found) == sorted(expected)


@pytest.mark.parametrize(
    ("table", "flags", "expected"),
    [
        ("", Selection(), ["LS202"]),
        ("ignore = ['LS2']", Selection(), []),
        ("select = ['LS4']", Selection(), []),
        ("select = ['LS4']", Selection(select=("LS2",)), ["LS202"]),
        ("select = ['ALL']\nignore = ['LS214']", Selection(), ["LS202"]),
    ],
)
def test_pyproject(table: str, flags: Selection, expected: list[str], tmp_path: Path) -> None:
    written(tmp_path / "pyproject.toml", f"[tool.lockstep.check]\n{table}\n")
    assert codes(written(tmp_path / "deep/er/a.py", BAD), flags=flags) == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[tool.lockstep.check]\nselect = ['LS9']", "no rule has the code 'LS9'"),
        ("[tool.lockstep.check]\nselect = 'LS2'", "expected a list of codes"),
        ("[tool.lockstep.check]\nselection = []", "no setting selection"),
        ("[tool", "cannot be read"),
    ],
)
def test_a_pyproject_that_is_wrong(text: str, said: str, tmp_path: Path) -> None:
    written(tmp_path / "pyproject.toml", text)
    with pytest.raises(UsageError, match=said):
        codes(written(tmp_path / "a.py", BAD))


def test_what_a_module_of_the_project_says_counts(tmp_path: Path) -> None:
    """Alone the helper is no distributed program; beside the script that imports it, it is."""
    written(tmp_path / "pkg/__init__.py", "")
    one = written(tmp_path / "pkg/data.py", BAD.replace("    dist.init_process_group()\n", ""))
    assert codes(one) == []
    main = "import torch.distributed as dist\nfrom pkg import data\n\ndist.init_process_group()\n"
    both = codes(one, written(tmp_path / "train.py", main))
    assert "LS202" in both


def test_a_script_without_a_loop_is_noted(tmp_path: Path) -> None:
    text = "import torch\nimport torch.distributed as dist\n"
    text += "dist.init_process_group()\ntorch.optim.SGD([])\n"
    outcome = engine.check([written(tmp_path / "a.py", text)], Selection(select=("LS4",)))
    assert "no training loop found" in outcome.notes[0]
    assert "note: " in FORMS["text"](outcome)


#: What the schema of SARIF 2.1.0 calls these properties, and what their values are: all that it requires
#: of an object, and nothing that it does not know. A set has all allowed values.
TEXT = {"text": str}
REGION = {"startLine": int, "startColumn": int, "endLine": int}
RULE = {"id": str, "name": str, "shortDescription": TEXT, "fullDescription": TEXT, "help": TEXT}
RESULT = {
    "ruleId": str,
    "level": {"none", "note", "warning", "error"},
    "message": TEXT,
    "locations": [{"physicalLocation": {"artifactLocation": {"uri": str}, "region": REGION}}],
}
SARIF = {
    "$schema": str,
    "version": {"2.1.0"},
    "runs": [
        {
            "tool": {"driver": {"name": str, "version": str, "rules": [RULE]}},
            "columnKind": {"utf16CodeUnits", "unicodeCodePoints"},
            "results": [RESULT],
        }
    ],
}


def assert_form(value: object, form: object) -> None:
    if isinstance(form, dict):
        assert isinstance(value, dict)
        assert value.keys() == form.keys()
        for key, inner in form.items():
            assert_form(value[key], inner)
    elif isinstance(form, list):
        assert isinstance(value, list)
        for one in value:
            assert_form(one, form[0])
    elif isinstance(form, set):
        assert value in form
    else:
        assert type(value) is form
        assert value, "an empty text, or a line or column below 1"


def test_sarif_has_the_form_of_its_standard(tmp_path: Path) -> None:
    broken = written(tmp_path / "b c.py", "x = (\n")
    log = json.loads(FORMS["sarif"](engine.check([written(tmp_path / "a,b.py", BAD), broken])))
    assert_form(log, SARIF)
    (run,) = log["runs"]
    assert len(run["results"]) == 2
    ids = [rule["id"] for rule in run["tool"]["driver"]["rules"]]
    assert len(ids) == len(set(ids))
    for result in run["results"]:
        place = result["locations"][0]["physicalLocation"]
        assert place["region"]["endLine"] >= place["region"]["startLine"]
        assert re.fullmatch(r"[\w/.%~-]+", place["artifactLocation"]["uri"])


def test_forms(tmp_path: Path) -> None:
    outcome = engine.check([written(tmp_path / "a,b.py", BAD)])
    text = FORMS["text"](outcome)
    assert f"a,b.py:{LINE}:12: LS202 [*] " in text
    assert text.endswith("1 finding, 1 of which --fix mends.")
    (row,) = json.loads(FORMS["json"](outcome))
    assert {"path", "line", "column", "code", "message", "fix"} <= set(row)
    assert (row["code"], row["line"], row["column"]) == ("LS202", LINE, 12)
    assert row["fix"] == RULES["LS202"].fix
    (run,) = json.loads(FORMS["sarif"](outcome))["runs"]
    (result,) = run["results"]
    assert result["level"] == "error"
    place = result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
    assert place.endswith("a%2Cb.py")
    assert result["ruleId"] in [one["id"] for one in run["tool"]["driver"]["rules"]]
    annotation = FORMS["github"](outcome)
    assert annotation.startswith("::error title=lockstep check (LS202),file=")
    assert "a%2Cb.py" in annotation
