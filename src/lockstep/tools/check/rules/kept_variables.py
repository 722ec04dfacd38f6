"""The rule on variables that a resumed run does not restore (family LS6)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from lockstep.tools.check.assignments import assigned_before, binds
from lockstep.tools.check.rule import Violation, rule
from lockstep.tools.check.script import SHOWS, Script
from lockstep.tools.check.syntax import (
    Loop,
    all_arguments,
    blocks,
    dotted,
    last_name,
    method,
    operands,
    reads,
    root,
    statements,
    stored,
    variables,
)

#: Calls whose result may be the first value of a variable.
_FIRST_VALUES = {"float", "int", "deepcopy", "state_dict", "tensor"}


@rule(
    "LS601",
    "value that decides later and is not kept",
    "this decides in a later epoch, and a run that resumes after a crash starts with its first value: keep it in run.state(…)",
    "corrupts",
    why="""A resumed run passes over the epochs that are done, so a variable of the script has its first value. A value
    that decides something later, such as the best accuracy so far, is part of the state. So is an object of a class of
    your own, such as one for early stopping: `run.register` saves it by its `state_dict`.""",
    example="""
      import lockstep

      with lockstep.Run("toy", seed=0, replicas=2) as run:
    -     best = 0.0
    +     state = run.state(best=0.0)
          for epoch in run.epochs(10):
              accuracy = run.mean(measure())
    -         if accuracy > best:
    -             best = accuracy
    +         if accuracy > state.best:
    +             state.best = accuracy
                  run.save(best=accuracy)
    """,
)
def not_registered(script: Script) -> Iterator[Violation]:
    """Find variables and objects of the script that an epoch loop changes, and that decide something later.

    A variable decides if the loop tests it in a later epoch, or if the script reads it after the loop. An
    object, such as one of a class for early stopping, decides if the loop tests a result of it.
    """
    for loop in script.module.loops:
        over = script.iterated(loop)
        if isinstance(over, ast.Call) and dotted(over.func).endswith(".epochs"):
            yield from _changed_variables(script, loop)
            yield from _changed_objects(script, loop)


def _changed_variables(script: Script, loop: Loop) -> Iterator[Violation]:
    first: dict[str, ast.stmt] = {}
    for node in statements(loop.body):
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign) and node.value is not None:
            for name in stored(node):
                first.setdefault(name, node)
    tested = {name for branch in _branches(loop) for name in _carried(script, loop, branch)}
    for name, node in first.items():
        if not _begins_before(script, loop, name):
            continue
        if name in tested:
            use = "decides in a later epoch"
        elif not binds(loop.body, name) and _read_after(script, loop, name):
            use = "is read after the last epoch"
        else:
            continue
        message = f"{name} {use}, and a run that resumes after a crash starts with its first value: keep it in run.state(…)"
        yield Violation(node, message)


def _carried(script: Script, loop: Loop, branch: ast.If) -> Iterator[str]:
    """Yield the variables whose values from earlier epochs a condition tests.

    A variable of this epoch, such as `better` of `better = score > best`, is followed to those that its
    value has.
    """
    for name in map(dotted, variables(branch.test)):
        if not assigned_before(script.module, loop, branch, name):
            yield name
            continue
        for node in statements(loop.body):
            if isinstance(node, ast.Assign) and name in stored(node):
                for part in map(dotted, variables(node.value)):
                    if not assigned_before(script.module, loop, node, part):
                        yield part


def _changed_objects(script: Script, loop: Loop) -> Iterator[Violation]:
    """Find objects of the script's own classes whose methods keep a result that the loop tests."""
    registered = {
        value
        for call in script.methods("register", "state", "model")
        for arg in all_arguments(call)
        for value in script.sources(arg)
    }
    seen: set[str] = set()
    for branch in _branches(loop):
        for use in [value for one in operands(branch.test) for value in _values(script, loop, one)]:
            owner = root(use)
            name = "" if owner is None else dotted(owner)
            made = _made_before(script, loop, owner)
            if name in seen or registered.intersection(made):
                continue
            if any(_keeps(script, one, use, owner) for one in made):
                seen.add(name)
                message = f"{name} decides in a later epoch, and a run that resumes after a crash starts with a new one: give it to run.register(…)"
                yield Violation(branch, message)


def _values(script: Script, loop: Loop, node: ast.expr) -> list[ast.expr]:
    """Return `node`, or for a variable the values that `loop` assigns to it."""
    if not isinstance(node, ast.Name):
        return [node]
    bound = script.module.bound.get((script.module.scope(loop), node.id), ())
    return [one for one in bound if isinstance(one, ast.expr) and loop in script.module.above(one)]


def _made_before(script: Script, loop: Loop, owner: ast.expr | None) -> list[ast.Call]:
    """Return the calls that make the object in the variable `owner` before `loop`, in the same function.

    For `self.x` these are the values assigned in `__init__`.
    """
    module = script.module
    match owner:
        case ast.Attribute():
            made = [one for one in module.assigned(owner) if isinstance(one, ast.Call)]
            return [one for one in made if getattr(module.scope(one), "name", "") == "__init__"]
        case ast.Name(id=name):
            bound = module.bound.get((module.scope(loop), name), ())
            return [one for one in bound if isinstance(one, ast.Call) and one.lineno < loop.lineno]
    return []


def _keeps(script: Script, made: ast.Call, use: ast.expr, owner: ast.expr | None) -> bool:
    """Whether `use` is a result that depends on earlier calls of an object in `owner`, which `made` makes.

    The object is of a class of the script. `use` is a call of a method that adds to an attribute or assigns
    one under a condition, or it is such an attribute. Modules do not count: `run.model` saves their state.
    """
    kind = script.project.definition(script.module, made.func)
    if not isinstance(kind, ast.ClassDef) or any(
        re.search("Module|Dataset", last_name(base)) for base in kind.bases
    ):
        return False
    kept = {
        one.name: _kept_attributes(one)
        for one in kind.body
        if isinstance(one, ast.FunctionDef) and one.name not in ("__init__", "load_state_dict")
    }
    match use:
        case ast.Call(func=func) if func is owner:
            return bool(kept.get("__call__"))
        case ast.Call(func=ast.Attribute(value=value, attr=name)) if value is owner:
            return bool(kept.get(name))
        case ast.Attribute(value=value, attr=attr) if value is owner:
            return any(f"self.{attr}" in names for names in kept.values())
    return False


def _kept_attributes(method: ast.FunctionDef) -> set[str]:
    """Return the attributes of `self` to which a method adds, or that it assigns under a condition."""
    added = [node for node in ast.walk(method) if isinstance(node, ast.AugAssign)]
    branches = [
        part
        for node in ast.walk(method)
        if isinstance(node, ast.If)
        for part in node.body + node.orelse
    ]
    return {one for one in stored(*added, *branches) if one.startswith("self.")}


def _branches(loop: Loop) -> Iterator[ast.If]:
    """Yield the `if` statements of a loop that do more than show values."""
    for node in statements(loop.body):
        if isinstance(node, ast.If) and not all(map(_only_shows, [*node.body, *node.orelse])):
            yield node


def _only_shows(statement: ast.stmt) -> bool:
    match statement:
        case ast.Expr(value=ast.Call(func=func) as call):
            return (last_name(func) or method(call)) in SHOWS
    return False


def _begins_before(script: Script, loop: Loop, name: str) -> bool:
    """Whether the variable `name` gets a first value, such as a constant, before `loop`."""
    values = script.module.bound.get((script.module.scope(loop), name), ())
    return any(
        isinstance(value, ast.expr) and value.lineno < loop.lineno and _is_first_value(value)
        for value in values
    )


def _is_first_value(value: ast.expr) -> bool:
    match value:
        case ast.Constant() | ast.UnaryOp():
            return True
        case ast.Tuple(elts=elements) | ast.List(elts=elements):
            return all(map(_is_first_value, elements))
        case ast.Dict(values=values):
            return all(map(_is_first_value, values))
        case ast.Attribute():  # such as `math.inf`
            return value.attr in ("inf", "nan")
        case ast.Call(func=func):
            return (last_name(func) or method(value)) in _FIRST_VALUES
    return False


def _read_after(script: Script, loop: Loop, name: str) -> bool:
    """Whether the variable `name` is read behind `loop` before it is assigned anew."""
    block = next(one for one in blocks(script.module.parents[loop]) if loop in one)
    for statement in block[block.index(loop) + 1 :]:
        if reads(name, statement):
            return True
        if binds([statement], name):
            return False
    return False
