"""The rule on variables that a resumed run does not restore (family LS6)."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from lockstep.tools.check.assignments import assigned_before, binds
from lockstep.tools.check.rule import Violation, rule
from lockstep.tools.check.script import Script
from lockstep.tools.check.syntax import Loop, dotted, last_name, method, root, variables

#: Functions and methods that only show their arguments.
_SHOWS = {
    "print", "write", "debug", "info", "warning", "log", "add_scalar", "add_scalars",
    "set_description", "set_postfix",
}  # fmt: skip
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
    tested = {
        one.id
        for branch in _branches(script, loop)
        for one in _names(branch.test)
        if not assigned_before(script.module, loop, branch, one.id)
    }
    first: dict[str, ast.stmt] = {}
    for node in _inside(script, loop):
        for name in _assigned(node):
            first.setdefault(name, node)
    for name, node in first.items():
        if not _begins_before(script, loop, name):
            continue
        if name in tested:
            yield Violation(node, _message(name, "decides in a later epoch"))
        elif not binds(loop.body, name) and _read_after(script, loop, name):
            yield Violation(node, _message(name, "is read after the last epoch"))


def _message(name: str, use: str) -> str:
    return f"{name} {use}, and a run that resumes after a crash starts with its first value: keep it in run.state(…)"


def _changed_objects(script: Script, loop: Loop) -> Iterator[Violation]:
    """Find objects of the script's own classes whose attributes the loop changes and tests."""
    registered = {
        value
        for call in script.methods("register", "state")
        for arg in [*call.args, *(keyword.value for keyword in call.keywords)]
        for value in script.sources(arg)
    }
    seen = set()
    for branch in _branches(script, loop):
        tests = [value for one in _operands(branch.test) for value in (one, *script.sources(one))]
        for use in tests:
            owner = root(use)
            if owner is None or dotted(owner) in seen:
                continue
            made = [one for one in script.sources(owner) if isinstance(one, ast.Call)]
            kept = [one for one in made if one.lineno < loop.lineno and _keeps(script, one, use)]
            if kept and not registered.intersection(made):
                name = dotted(owner)
                seen.add(name)
                message = f"{name} decides in a later epoch, and a run that resumes after a crash starts with a new one: give it to run.register(…)"
                yield Violation(branch, message)


def _keeps(script: Script, made: ast.Call, use: ast.expr) -> bool:
    """Whether `use` is a result of an object, which `made` makes, that a method of the object changes.

    The object is of a class of the script. `use` is a call of a method that assigns attributes, or an
    attribute that methods assign. Modules do not count: `run.model` saves their state.
    """
    owner = script.project.definition(script.module, made.func)
    if not isinstance(owner, ast.ClassDef) or "Module" in map(last_name, owner.bases):
        return False
    changes = {
        one.name: {dotted(target) for target in variables(one, context=ast.Store)}
        for one in owner.body
        if isinstance(one, ast.FunctionDef) and one.name not in ("__init__", "load_state_dict")
    }
    match use:
        case ast.Call(func=ast.Attribute(value=ast.Name(), attr=name)):
            pass
        case ast.Call(func=ast.Name()):
            name = "__call__"
        case ast.Attribute(value=ast.Name(), attr=attr):
            return any(f"self.{attr}" in names for names in changes.values())
        case _:
            return False
    return any(one.startswith("self.") for one in changes.get(name, ()))


def _branches(script: Script, loop: Loop) -> Iterator[ast.If]:
    """Yield the `if` statements of a loop that do more than show values."""
    for node in _inside(script, loop):
        if isinstance(node, ast.If) and not all(map(_only_shows, [*node.body, *node.orelse])):
            yield node


def _inside(script: Script, loop: Loop) -> Iterator[ast.stmt]:
    scope = script.module.scope(loop)
    inside = (node for node in ast.walk(loop) if isinstance(node, ast.stmt) and node is not loop)
    return iter(
        sorted(
            (one for one in inside if script.module.scope(one) is scope), key=lambda one: one.lineno
        )
    )


def _only_shows(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Call)
        and (last_name(statement.value.func) in _SHOWS or method(statement.value) in _SHOWS)
    )


def _names(node: ast.AST) -> Iterator[ast.Name]:
    return (one for one in ast.walk(node) if isinstance(one, ast.Name))


def _operands(test: ast.expr) -> list[ast.expr]:
    """Return the parts of a condition that are joined by `and`, `or`, `not` and comparisons."""
    match test:
        case ast.BoolOp(values=parts):
            pass
        case ast.UnaryOp(operand=part):
            parts = [part]
        case ast.Compare(left=left, comparators=others):
            parts = [left, *others]
        case _:
            return [test]
    return [one for part in parts for one in _operands(part)]


def _assigned(node: ast.stmt) -> set[str]:
    match node:
        case ast.Assign(targets=targets):
            return {
                one.id
                for target in targets
                for one in _names(target)
                if isinstance(one.ctx, ast.Store)
            }
        case ast.AugAssign(target=ast.Name(id=name)) | ast.AnnAssign(target=ast.Name(id=name)):
            return {name}
    return set()


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
    parent = script.module.parents[loop]
    block = next(
        block
        for one in ("body", "orelse", "finalbody")
        if isinstance(block := getattr(parent, one, None), list) and loop in block
    )
    for statement in block[block.index(loop) + 1 :]:
        if any(one.id == name and isinstance(one.ctx, ast.Load) for one in _names(statement)):
            return True
        if binds([statement], name):
            return False
    return False
