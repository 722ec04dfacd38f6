"""Convert scripts of accelerate, transformers' Trainer and Lightning to `lockstep.integrations`.

For accelerate and transformers, the import is replaced. Lightning's Trainer and Fabric get the argument
`strategy=LockstepStrategy()`.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

from lockstep.errors import UsageError
from lockstep.tools.check.fix import Edit
from lockstep.tools.check.script import Script
from lockstep.tools.check.source import Module
from lockstep.tools.check.syntax import argument

#: Classes that have an adapter of the same name, and the adapter's module.
_ADAPTERS = {
    "accelerate.Accelerator": "lockstep.integrations.accelerate",
    "accelerate.accelerator.Accelerator": "lockstep.integrations.accelerate",
    "transformers.Trainer": "lockstep.integrations.transformers",
    "transformers.trainer.Trainer": "lockstep.integrations.transformers",
}
#: Packages whose other trainers are subclasses of transformers' Trainer.
_SUBCLASSES = re.compile(r"(transformers|trl|sentence_transformers)\..*Trainer")
#: Lightning's classes that take a strategy, and their arguments that start processes or average over them.
_LIGHTNING = ("lightning.Trainer", "lightning.pytorch.Trainer", "Fabric")
_PROCESSES = ("devices", "num_nodes", "sync_batchnorm")
#: Strategies that keep a whole model on each device.
_REPLICATED = re.compile(r"""["'](auto|ddp\w*)["']|[\w.]*\bDDPStrategy\(.*\)""", re.DOTALL)
NOTE = (
    "replicas= of {name}, or lockstep run --replicas N, sets the number of processes that are emulated; "
    "by default, as many as there are ranks"
)


@dataclass(frozen=True)
class _Import:
    """A name that a script imports: the import statement, and the adapter module to import from."""

    statement: ast.ImportFrom
    alias: ast.alias
    adapter: str


def convert(script: Script) -> tuple[str, list[str]] | None:
    """Return the script's text with adapters in place of other classes, and notes for the user.

    Return `None` if the script uses no class that has an adapter.

    Raises:
        UsageError: if the script has an adapter already, or imports a class in a way that is not replaced.
    """
    module = script.module
    names = set(module.imports.values())
    if any(name.startswith("lockstep.integrations.") for name in names):
        raise UsageError(
            f"{module.path} imports lockstep.integrations: it has been converted already"
        )
    found = list(_imports(module))
    if found:
        text = _replaced(module.text, found)
        compile(text, str(module.path), "exec")
        return text, [NOTE.format(name=one.alias.asname or one.alias.name) for one in found]
    if calls := list(script.calls(*_LIGHTNING)):
        return _with_strategy(module, calls), [NOTE.format(name="LockstepStrategy")]
    if "lightning.pytorch.cli.LightningCLI" in script.called:
        raise UsageError(
            f"{module.path} makes its Trainer by LightningCLI: the script stays as it is",
            hint="--trainer.strategy lockstep.integrations.lightning.LockstepStrategy",
        )
    if any(name.partition(".")[0] == "pytorch_lightning" for name in names):
        raise UsageError(
            f"{module.path} imports pytorch_lightning; expected lightning, the package's later name",
            hint="pip install lightning; import lightning.pytorch as pl",
        )
    if {"Accelerator", "transformers.Trainer"} & script.called:
        raise UsageError(
            f"{module.path} calls accelerate.Accelerator or transformers.Trainer by the module's name; "
            "expected the class to be imported",
            hint="from accelerate import Accelerator, or from transformers import Trainer",
        )
    if others := sorted(filter(_SUBCLASSES.fullmatch, names & script.called)):
        package, _, name = others[0].rpartition(".")
        raise UsageError(
            f"{module.path} trains with {name} of {package}, which is not converted by itself",
            hint=f"class MyTrainer(LockstepTrainer, {name}), of lockstep.integrations.transformers",
        )
    return None


def _with_strategy(module: Module, calls: list[ast.Call]) -> str:
    """Return the module's text with `strategy=LockstepStrategy()` in `calls`, and this class imported."""
    from lockstep.tools.check import editor

    edits = []
    for call in calls:
        if len(call.args) > 1:
            raise UsageError(
                f"{module.path}:{call.lineno}: {module.source(call)} has arguments without names",
                hint="Fabric(accelerator=…, strategy=…, devices=…)",
            )
        strategy = argument(call, "strategy")
        text = module.source(strategy) if strategy is not None else "'auto'"
        if not _REPLICATED.fullmatch(text):
            raise UsageError(
                f"{module.path}:{call.lineno}: strategy={text} was given; expected 'ddp' or 'auto'",
                hint="LockstepStrategy keeps a whole model on each rank; a shared model needs "
                "lockstep.Run with strategy='fsdp' or 'pipeline'",
            )
        edits += [Edit("argument", call, "", name) for name in _PROCESSES]
        edits.append(Edit("argument", call, "LockstepStrategy()", "strategy"))
    imports = [one for one in module.tree.body if isinstance(one, ast.Import | ast.ImportFrom)]
    edits.append(
        Edit("after", imports[-1], "from lockstep.integrations.lightning import LockstepStrategy")
    )
    return editor.apply(module, edits)


def _imports(module: Module) -> list[_Import]:
    statements = [one for one in ast.walk(module.tree) if isinstance(one, ast.ImportFrom)]
    return [
        _Import(statement, alias, _ADAPTERS[name])
        for statement in statements
        for alias in statement.names
        if (name := f"{statement.module}.{alias.name}") in _ADAPTERS
    ]


def _replaced(text: str, found: list[_Import]) -> str:
    """Return the source `text` of a script, with the names in `found` imported from adapter modules."""
    lines = text.split("\n")
    for one in sorted(found, key=lambda one: -one.statement.lineno):
        first, last = one.statement.lineno - 1, one.statement.end_lineno or one.statement.lineno
        statement = "\n".join(lines[first:last])
        bound = ast.unparse(one.alias)
        rest = []
        if len(one.statement.names) > 1:
            name = r"\b" + r"\s+".join(bound.split()) + r"\b"
            head, word, names = statement.partition("import")
            rest = [head + word + re.sub(rf",\s*{name}|{name}\s*,\s*", "", names, count=1)]
        indent = statement[: len(statement) - len(statement.lstrip())]
        lines[first:last] = [*rest, f"{indent}from {one.adapter} import {bound}"]
    return "\n".join(lines)
