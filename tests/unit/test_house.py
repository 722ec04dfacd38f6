"""The house: who may import whom, what is public, how large a piece may be."""

from __future__ import annotations

import ast
import graphlib
import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import lockstep
from lockstep import errors

ROOT = Path(lockstep.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

#: Each part of the package, and the parts that it may import from (besides `errors` and `version`).
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "version": set(),
    "registry": set(),
    "setting_checks": set(),
    "settings": {"engine.layout", "registry", "setting_checks"},
    "unknown_variables": {"settings"},
    "world": {"registry"},
    "state.files": {"world"},
    "state.checkpoint": {"state.files", "engine.layout", "world", "engine.data"},
    "state.record": {"state.files", "engine.data", "world", "state.checkpoint"},
    "engine.layout": {"registry"},
    "engine.data": {"engine.layout", "world"},
    "engine.exchange": {"engine.layout", "registry", "world"},
    "engine.strategies": {
        "engine.layout",
        "world",
        "engine.data",
        "engine.exchange",
        "state.checkpoint",
        "registry",
    },
    "engine.parameter_server": {
        "engine.layout",
        "engine.data",
        "world",
        "registry",
        "engine.exchange",
        "engine.strategies",
    },
    "engine.training": {
        "registry",
        "settings",
        "setting_checks",
        "unknown_variables",
        "engine.layout",
        "world",
        "engine.data",
        "engine.exchange",
        "engine.strategies",
        "engine.parameter_server",
        "state.files",
        "state.record",
        "state.checkpoint",
    },
    "launch": {
        "registry",
        "settings",
        "setting_checks",
        "unknown_variables",
        "engine.layout",
        "world",
        "state.files",
        "state.record",
        "state.checkpoint",
    },
    "run": {"engine.training", "engine.data", "settings", "world", "state.checkpoint"},
    "testing": {"state.record", "run"},
    "integrations": {"run", "engine.data", "engine.training", "world"},
    "tools.quantities": set(),
    "tools.verify": {
        "settings",
        "engine.layout",
        "state.files",
        "state.record",
        "launch",
        "tools.quantities",
    },
    "tools.replay": {"settings", "state.files", "state.record", "state.checkpoint", "launch"},
    "tools.submit": {"state.files", "state.record"},
    "tools.report": {"state.files", "state.record", "tools.quantities"},
    "tools.bench": {
        "registry",
        "engine.layout",
        "world",
        "state.files",
        "state.record",
        "launch",
        "tools.report",
        "tools.quantities",
    },
    "tools.watch": {"state.files", "state.record", "tools.quantities"},
    "tools.check": {"state.files"},
    "tools.convert": {"tools.check"},
    "tools.doctor": {"world", "launch", "engine.training", "tools.quantities"},
    "cli": {
        "settings",
        "unknown_variables",
        "engine.layout",
        "launch",
        "tools.verify",
        "tools.replay",
        "tools.bench",
        "tools.quantities",
        "tools.check",
        "tools.convert",
        "tools.doctor",
        "tools.submit",
        "tools.report",
        "tools.watch",
        "state.checkpoint",
    },
    "__init__": {"launch", "run", "world"},
    "__main__": {"cli"},
}

#: A loop and its recovery call each other: one part, whose modules have no circle.
ONE_PART = {"engine.recovery": "engine.training"}


def part(module: str) -> str:
    """Return the part of the package that a module of it belongs to."""
    names = module.split(".")[1:]
    grouped = names[:1] in (["engine"], ["state"], ["tools"])
    own = ".".join(names[: 2 if grouped else 1]) or "__init__"
    return ONE_PART.get(own, own)


def module_name(file: Path) -> str:
    names = file.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(names[:-1] if names[-1] == "__init__" and len(names) > 2 else names)


def imported(tree: ast.AST) -> set[str]:
    """Return the modules of the package that a module imports, wherever in it."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports are not used here"
            module = node.module or ""
            for alias in node.names:
                inner = f"{module}.{alias.name}"
                found.add(inner if module == "lockstep" or inner in MODULES else module)
    return {name for name in found if name.split(".")[0] == "lockstep"}


MODULES = {module_name(file): file for file in FILES}


#: Variables by which a launcher tells a worker who it is.
IDENTITY = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_a_file_keeps_the_house(file: Path) -> None:
    """Imports go one way, pieces are small; `world` and the launcher alone read who a worker is."""
    text, own = file.read_text(), part(module_name(file))
    assert len(text.splitlines()) <= 450, "split the file"
    tree = ast.parse(text)
    if own in ("engine", "state", "tools"):  # a docstring
        return
    assert own in ALLOWED, f"a new part of the package: say in this test what {own} may import"
    others = {part(module) for module in imported(tree)} - {own, "errors", "version", "__init__"}
    assert others <= ALLOWED[own], f"{own} may not import {others - ALLOWED[own]}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and own not in ("world", "launch", "testing"):
            assert not (isinstance(node.value, str) and node.value in IDENTITY), node.value
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node, clean=False) or ""
            length = (node.end_lineno or 0) - node.lineno + 1 - docstring.count("\n")
            assert length <= 50, f"{node.name} has {length} lines"


def test_the_permissions_have_no_circle() -> None:
    seen: list[str] = []

    def visit(name: str, above: tuple[str, ...] = ()) -> None:
        assert name not in above, f"a circle: {(*above, name)}"
        for other in ALLOWED[name]:
            visit(other, (*above, name))
        seen.append(name)

    for name in ALLOWED:
        visit(name)


def test_the_modules_import_each_other_in_no_circle() -> None:
    """Imports inside functions count, too: they move a circle to the first call."""
    trees = {name: ast.parse(file.read_text()) for name, file in MODULES.items()}
    graph = {name: imported(tree) & MODULES.keys() - {name} for name, tree in trees.items()}
    tuple(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError with the circle


def test_the_launcher_knows_nothing_of_training() -> None:
    assert {part for part in ALLOWED["launch"] if part.startswith("engine")} == {"engine.layout"}


def test_layout_is_integers_only() -> None:
    for file in (ROOT / "engine" / "layout").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.split(".")[0] == "torch" for name in names), file


def fresh(code: str) -> str:
    """Run code in a new interpreter and return what it prints."""
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60
    ).stdout.strip()


def test_importing_the_package_does_not_import_torch() -> None:
    heavy = ("torch", "numpy", "tqdm", "rich")
    loaded = f"import sys, lockstep; print([n for n in {heavy!r} if n in sys.modules])"
    assert fresh(loaded) == "[]"
    assert (
        fresh(loaded.replace("lockstep;", "lockstep; lockstep.detect; lockstep.LockstepError;"))
        == "[]"
    )


def test_a_run_imports_no_strategy_that_it_may_not_need() -> None:
    """Half a second each, in every start and every restart."""
    heavy = ("torch.distributed.tensor", "torch.distributed.fsdp", "sympy")
    loaded = f"import sys, lockstep.run; print([n for n in {heavy!r} if n in sys.modules])"
    assert fresh(loaded) == "[]"


def test_the_wheel_has_each_file_of_the_package() -> None:
    """Setuptools takes modules by itself, and other files where pyproject.toml lists them."""
    project = tomllib.loads((ROOT.parents[1] / "pyproject.toml").read_text())
    listed = project["tool"]["setuptools"]["package-data"]["lockstep"]
    found = {file for pattern in listed for file in ROOT.glob(pattern)}
    others = {
        file for file in ROOT.rglob("*") if file.is_file() and "__pycache__" not in file.parts
    }
    assert others - set(FILES) == found
    assert ROOT / "py.typed" in found


def test_the_files_that_the_page_on_the_architecture_names_exist() -> None:
    page = (ROOT.parents[1] / "docs/architecture.md").read_text()
    named = set(re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.py)`", page))
    assert len(named) >= 50
    places = (ROOT, ROOT.parents[1])
    assert [file for file in sorted(named) if not any((at / file).exists() for at in places)] == []


def test_public_names() -> None:
    names = ["LockstepError", "Run", "World", "__version__", "detect", "launch"]
    assert sorted(lockstep.__all__) == names
    assert dir(lockstep) == lockstep.__all__
    assert set(lockstep._PLACES) == set(lockstep.__all__) - {"__version__"}
    for name in names:
        assert getattr(lockstep, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = lockstep.nonsense


def test_names_that_are_declared_public_exist() -> None:
    for file in FILES:
        if re.search("^__all__", file.read_text(), re.MULTILINE):
            module = importlib.import_module(module_name(file))
            assert all(hasattr(module, name) for name in module.__all__), file


def test_the_tree_of_errors_is_the_one_that_is_drawn() -> None:
    drawn = {word for word in errors.__doc__.replace("│", " ").split() if word.endswith("Error")}
    kinds = [
        k
        for k in vars(errors).values()
        if isinstance(k, type) and issubclass(k, errors.LockstepError)
    ]
    assert {kind.__name__ for kind in kinds} == drawn
    codes = {kind.__name__: kind.exit_code for kind in kinds}
    for kind in kinds:
        expected = (
            2
            if issubclass(kind, errors.UsageError)
            else 3
            if kind is errors.CheckFailedError
            else 1
        )
        assert codes[kind.__name__] == expected


def test_an_error_shows_its_hint() -> None:
    assert str(errors.StepError("seen")) == "seen"
    assert str(errors.StepError("seen", hint="do")) == "seen\nhint: do"
    assert errors.StepError("seen", hint="do").message == "seen"
