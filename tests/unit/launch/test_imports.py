"""What a script imports at its top, read from its source."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.launch.spec import LaunchSpec
from lockstep.launch.target.imports import read


def modules(directory: Path, text: str) -> list[tuple[str, ...]]:
    script = directory / "train.py"
    script.write_text(text)
    return [(one.module, *one.names) for one in read(LaunchSpec(target=str(script))).imports]


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
        ("rank = int(os.environ['RANK'])\nimport json", [("json",)]),
        (
            "import warnings\nwarnings.simplefilter('ignore')\nimport json",
            [("warnings",), ("json",)],
        ),
        ("import torch\ntorch.backends.x.y = True\nimport json", [("torch",), ("json",)]),
        ("import torch.library as l\nl.define('x')\nimport json", [("torch.library",), ("json",)]),
        ("text = " + "'a' + " * 1500 + "'a'\nimport json", [("json",)]),
        ("def set_up():\n    os.environ['A'] = 'b'\nimport json", [("json",)]),
        ("logger = logging.getLogger(name)\nimport json", [("json",)]),
        ("def start():\n    random.seed(0)\nseed = 0\nimport json", [("json",)]),
        ("class A:\n    def f(self):\n        os.environ['A'] = 'b'\nimport json", [("json",)]),
        ("def mine(): ...\ndef main():\n    mine()\nimport json", [("json",)]),
    ],
)
def test_statements(tmp_path: Path, text: str, expected: list[tuple[str, ...]]) -> None:
    assert modules(tmp_path, text) == expected


@pytest.mark.parametrize(
    "line",
    [
        "os.environ['TOKENIZERS_PARALLELISM'] = 'false'",
        "environment['A'] = 'b'",
        "before = os.environ.setdefault('A', 'b')",
        "os.putenv('A', 'b')",
        "sys.path.insert(0, '.')",
        "load_dotenv()",
        "if debug:\n    os.environ['A'] = 'b'",
        "if debug:\n    import setting",
        "class A:\n    os.environ['A'] = 'b'",
        "try:\n    import no_such_package\nexcept ImportError:\n    os.environ['A'] = 'b'",
        "from other import set_up\nset_up()",
        "import other\nother.set_up().now()",
        "def set_up(): ...\nset_up()",
        "def set_up(): ...\ndone = set_up()",
        "sys.argv = []",
        "del sys.argv[1:]",
        "sys.modules['pickle'] = None",
        "sys.meta_path.insert(0, finder)",
        "os.chdir('/')",
        "os.register_at_fork()",
        "env.read_env()",
        "def main(size=os.environ.setdefault('A', 'b')): ...",
        "class A:\n    @os.environ.setdefault('A', 'b')\n    def f(self): ...",
        "def set_up(main):\n    os.chdir('/')\n@set_up\ndef main(): ...",
        "def set_up():\n    os.chdir('/')\ndef main(done=set_up()): ...",
        "importlib.import_module('setting')",
        "setting = __import__('setting')",
        "random.seed(0)",
        "seed(0)",
        "random.setstate(state)",
        "if debug:\n    seed_everything(0)",
    ],
)
def test_the_list_ends_where_an_import_may_change(tmp_path: Path, line: str) -> None:
    (tmp_path / "setting.py").write_text("os.environ['A'] = 'b'")
    (tmp_path / "other.py").write_text("def set_up(): ...")
    assert modules(tmp_path, f"import json\n{line}\nimport pickle") == [("json",)]
    (tmp_path / "mine.py").write_text(f"import csv\n{line}")
    assert modules(tmp_path, "import json, mine, pickle") == [("json",), ("csv",)]


def test_modules_of_the_user_are_followed_and_not_named(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import csv, other\nif __name__ == '__main__':\n    import bz2"
    )
    (tmp_path / "other.py").write_text("import mine, pickle")
    assert modules(tmp_path, "import mine\nimport json") == [("csv",), ("pickle",), ("json",)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("from kit.nets import Net", ["glob", "csv"]),
        ("import kit.nets as nets", ["glob", "csv"]),
        ("from kit import nets", ["glob", "csv"]),
        ("from kit.deep import inner", ["glob", "csv", "json"]),
        ("from kit import no_such_name", ["glob"]),
        ("import plain.part", ["bz2"]),
        ("from plain.below.part import x", ["zlib"]),
    ],
)
def test_packages_of_the_user_are_followed_into_their_modules(
    tmp_path: Path, text: str, expected: list[str]
) -> None:
    files = {
        "kit/__init__.py": "import glob",
        "kit/nets.py": "import csv",
        "kit/deep/__init__.py": "from .. import nets",
        "kit/deep/inner.py": "from ..nets import Net\nimport json\nfrom ... import beyond",
        "plain/part.py": "import bz2",
        "plain/below/part.py": "import zlib",
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    assert modules(tmp_path, text) == [(name,) for name in expected]


def test_a_module_run_by_name_imports_relative_to_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kit").mkdir()
    (tmp_path / "kit/__init__.py").write_text("import glob")
    (tmp_path / "kit/nets.py").write_text("import csv")
    (tmp_path / "kit/train.py").write_text("from . import nets\nimport json")
    (tmp_path / "kit/__main__.py").write_text("from . import nets\nimport bz2")
    for target, last in (("kit.train", "json"), ("kit", "bz2"), ("kit.__main__", "bz2")):
        found = read(LaunchSpec(kind="module", target=target)).imports
        assert [one.module for one in found] == ["glob", "csv", last]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import torch, lockstep.testing", True),
        ("def main():\n    from lockstep import Run", True),
        ("import kit", True),
        ("if fast:\n    from kit import train", True),
        ("def main():\n    from kit import train", True),
        ("def main():\n    import far.away", False),
        ("import helpers, far.away", False),
        ("from kit.plain import x", True),  # which imports kit first
        ("import plain", False),
        ("from . import lockstep", False),
        ("import lockstep_tools, numpy.lockstep", False),
        ("lockstep = 'import lockstep'", False),
    ],
)
def test_whether_a_script_uses_lockstep(tmp_path: Path, text: str, expected: bool) -> None:
    files = {
        "kit/__init__.py": "from .train import main",
        "kit/plain.py": "x = 1",
        "kit/train.py": "import lockstep as ls",
        "far/away.py": "def late():\n    import kit.train",
        "helpers.py": "def shown():\n    import lockstep",
        "plain.py": "import json\ndef main():\n    import pickle",
        "train.py": text,
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    assert read(LaunchSpec(target=str(tmp_path / "train.py"))).uses_lockstep == expected


@pytest.mark.parametrize(
    ("text", "alone"),
    [
        ("import torch\nloss.backward()", True),
        ("import torch\nprint(model(x))", False),
        ("import lockstep\nrun.backward(loss)", False),
        ("import torch.distributed as dist\ndist.init_process_group()\nloss.backward()", False),
        ("from accelerate import Accelerator\naccelerator.backward(loss)", False),
        ("rank = int(os.environ['RANK'])\nloss.backward()", False),
        ("from transformers import Trainer\ntrainer.train()\nloss.backward()", False),
        ("from inner import f\nloss.backward()", False),
        ("from late import f\nloss.backward()", False),
        ("half a script", False),
    ],
)
def test_a_script_whose_ranks_would_train_by_themselves(
    tmp_path: Path, text: str, alone: bool
) -> None:
    (tmp_path / "inner.py").write_text("import torch\ntorch.distributed.init_process_group()")
    (tmp_path / "late.py").write_text("def f():\n    import lockstep")
    script = tmp_path / "train.py"
    script.write_text(text)
    assert read(LaunchSpec(target=str(script))).trains_alone is alone
