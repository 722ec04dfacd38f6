"""What a script imports at its top, read from its source."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.launch.imports import at_the_top
from lockstep.launch.spec import LaunchSpec


def modules(directory: Path, text: str) -> list[tuple[str, ...]]:
    script = directory / "train.py"
    script.write_text(text)
    return [(one.module, *one.names) for one in at_the_top(LaunchSpec(target=str(script)))]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import json, numpy as np", [("json",), ("numpy",)]),
        ("from numpy.linalg import norm, svd", [("numpy.linalg", "norm", "svd")]),
        ("from numpy import *", [("numpy",)]),
        ("try:\n    import json\nexcept ImportError:\n    import pickle", [("json",)]),
        ("if debug:\n    import json\nimport pickle", [("pickle",)]),
        ("if __name__ == '__main__':\n    import json", [("json",)]),
        ("def main():\n    import json\nclass A:\n    import pickle", []),
        ("if TYPE_CHECKING:\n    import json", []),
        ("import no_such_package\nimport json", [("json",)]),
        ("from . import sibling\nimport json", [("json",)]),
        ("import json\nhalf a script", []),
        ("import math", [("math",)]),
    ],
)
def test_statements(tmp_path: Path, text: str, expected: list[tuple[str, ...]]) -> None:
    assert modules(tmp_path, text) == expected


@pytest.mark.parametrize(
    "line",
    [
        "os.environ['TOKENIZERS_PARALLELISM'] = 'false'",
        "os.environ.setdefault('A', 'b')",
        "os.putenv('A', 'b')",
        "sys.path.insert(0, '.')",
        "environ = dict(A='b')",
        "load_dotenv()",
    ],
)
def test_the_list_ends_where_an_import_may_change(tmp_path: Path, line: str) -> None:
    assert modules(tmp_path, f"import json\n{line}\nimport pickle") == [("json",)]
    (tmp_path / "mine.py").write_text(f"import csv\n{line}")
    assert modules(tmp_path, "import json, mine, pickle") == [("json",), ("csv",)]


def test_modules_of_the_user_are_followed_and_not_named(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import csv, other\nif __name__ == '__main__':\n    import bz2"
    )
    (tmp_path / "other.py").write_text("import mine, pickle")
    assert modules(tmp_path, "import mine\nimport json") == [("csv",), ("pickle",), ("json",)]
