"""Private names of frameworks that the adapters use: one that is gone is named."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
from pathlib import Path

import pytest

from lockstep import integrations
from tests import vision  # noqa: F401 (before transformers imports torchvision)
from tests.integrations.private_names import (
    NEWER_ATTRIBUTES,
    PRIVATE_ATTRIBUTES,
    PRIVATE_NAMES,
)

if importlib.util.find_spec("lightning") is not None:
    import lightning.pytorch  # noqa: F401 (sets a variable of the environment)

FOLDER = Path(integrations.__file__).parent


def found(place: str) -> object:
    module, _, names = place.partition(":")
    package = module.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}, of the extra `test`")
    first, *rest = names.split(".")
    owner: object = getattr(
        importlib.import_module(module), first
    )  # some are imported when asked for
    for name in rest:
        owner = inspect.getattr_static(owner, name)
    return owner


@pytest.mark.parametrize("place", PRIVATE_NAMES)
def test_names_that_the_adapters_use_are_there(place: str) -> None:
    owner = found(place)
    gone = [name for name in PRIVATE_NAMES[place] if not hasattr(owner, name)]
    assert not gone, f"{place} has no {', '.join(gone)} any more"


@pytest.mark.parametrize("place", PRIVATE_ATTRIBUTES)
def test_attributes_that_the_adapters_use_are_set(place: str) -> None:
    source = inspect.getsource(found(place))  # type: ignore[arg-type]
    gone = [name for name in PRIVATE_ATTRIBUTES[place] if f"self.{name}" not in source]
    assert not gone, f"{place} does not set {', '.join(gone)} any more"


def test_every_private_name_of_a_trainer_is_listed() -> None:
    """`me` is the Trainer that the mixin is mixed into: what it is asked for is transformers' own."""
    listed = {
        name for names in (*PRIVATE_NAMES.values(), *PRIVATE_ATTRIBUTES.values()) for name in names
    }
    tree = ast.parse((FOLDER / "transformers.py").read_text())
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "me"
        and node.attr.startswith("_")
    }
    assert used
    listed |= NEWER_ATTRIBUTES.keys()
    assert used <= listed, f"to be listed: {used - listed}"
