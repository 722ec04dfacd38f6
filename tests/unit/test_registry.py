"""Registries of strategies and exchanges: ours, and those of other packages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.errors import UsageError
from lockstep.registry import EXCHANGES, STRATEGIES, Registry, resolve

ENTRY = (
    "from lockstep.registry import ExchangeEntry\nentry = ExchangeEntry(exactness='approximate')\n"
)


def publish(site: Path, package: str, code: str, points: str, group: str = "exchanges") -> None:
    """Install a package with one module into a directory."""
    (site / f"{package}.py").write_text(code)
    about = site / f"{package}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[lockstep.{group}]\n{points}\n")


@pytest.fixture
def exchanges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    """A registry that finds packages in `tmp_path`, and remembers nothing of earlier tests."""
    monkeypatch.syspath_prepend(tmp_path)
    return Registry("exchange", "lockstep.exchanges", [EXCHANGES.find("tree")])


@pytest.mark.parametrize("registry", [STRATEGIES, EXCHANGES])
def test_each_entry_names_functions_that_are_there(registry: Registry) -> None:
    for name in registry.own:
        entry = registry.find(name)
        functions = [getattr(entry, field, "") for field in ("build", "wrap", "check", "is_exact")]
        for function in filter(None, functions):
            assert callable(resolve(function)), (name, function)


def test_names_are_known_without_torch() -> None:
    code = (
        "import sys\nfrom lockstep.registry import EXCHANGES, STRATEGIES\n"
        "assert 'tree' in EXCHANGES.names() and 'ddp' in STRATEGIES.names()\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_package_publishes_an_exchange(tmp_path: Path, exchanges: Registry) -> None:
    publish(tmp_path, "theirs_one", ENTRY, "rounded = theirs_one:entry\ntree = theirs_one:entry")
    assert exchanges.names() == ("tree", "rounded")
    exchanges.require("rounded", "--exchange")
    assert "theirs_one" not in sys.modules, "it is imported where it is used"
    entry = exchanges.find("rounded")
    assert (entry.name, entry.exactness) == ("rounded", "approximate")
    assert exchanges.find("tree").exactness == "exact", "names of Lockstep stay Lockstep's"


def test_a_name_that_nothing_has(tmp_path: Path, exchanges: Registry) -> None:
    publish(tmp_path, "theirs_two", ENTRY, "rounded = theirs_two:entry")
    expected = "--exchange is 'ring'; expected one of tree, rounded"
    with pytest.raises(UsageError, match=expected) as refused:
        exchanges.require("ring", "--exchange")
    assert refused.value.exit_code == 2


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise RuntimeError('no licence')", "cannot be imported: RuntimeError: no licence"),
        ("", "cannot be imported: AttributeError"),
        ("entry = 7", "is of type int; expected a ExchangeEntry of lockstep.registry"),
    ],
)
def test_an_entry_that_cannot_be_used(
    code: str, message: str, tmp_path: Path, exchanges: Registry
) -> None:
    package = f"theirs_of_{len(code)}"
    publish(tmp_path, package, code, f"broken = {package}:entry")
    with pytest.raises(UsageError, match=message) as refused:
        exchanges.find("broken")
    assert f"the exchange broken of {package}" in refused.value.message


def test_two_packages_with_one_name(tmp_path: Path, exchanges: Registry) -> None:
    for package in ("theirs_three", "theirs_four"):
        publish(tmp_path, package, ENTRY, f"rounded = {package}:entry")
    with pytest.raises(UsageError, match="published 2 times, by theirs_four and theirs_three"):
        exchanges.find("rounded")


def test_a_strategy_that_wraps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    code = "from lockstep.registry import StrategyEntry\nentry = StrategyEntry()\n"
    publish(tmp_path, "theirs_five", code, "empty = theirs_five:entry", group="strategies")
    strategies = Registry("strategy", "lockstep.strategies", [STRATEGIES.find("ddp")])
    told = r"empty of theirs_five \(theirs_five:entry\) has neither wrap nor fallback"
    with pytest.raises(UsageError, match=told):
        strategies.find("empty")
