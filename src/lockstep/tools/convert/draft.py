"""`Draft`: edits and questions of one conversion, and origins of the script's values."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from lockstep.tools.check.fix import Edit, Kind
from lockstep.tools.check.script import Script
from lockstep.tools.check.source import Function, Loop, Module, Part, dotted

#: Stands for the run in edits, until `home.py` knows what it is called in each function.
RUN = "__run__"
#: How many replicas a converted script has: as many ranks as may share its work.
REPLICAS = 4


class Draft:
    """What is to be changed in a script.

    Args:
        script: the script, as `lockstep check` sees it.

    Attributes:
        edits: changes, in the order in which they are made at one place.
        questions: what could not be decided, by the statement that it is about.
        removed: statements that go.
        notes: what the user should know, and need not answer.
        inside: what has to be under the run, and does not name it: where models are made.
        held: where the models are made that the run is given.
        fading: assignments that go when nothing reads their names any more.
        imports: statements that import what edits name, besides Lockstep.
        seed: the seed of the run, as it is written.
        precision: its precision, as an argument.
    """

    def __init__(self, script: Script) -> None:
        self.script, self.module = script, script.module
        self.edits: list[Edit] = []
        self.questions: dict[ast.stmt, list[str]] = {}
        self.removed: set[ast.stmt] = set()
        self.inside: list[ast.expr] = []
        self.held: set[ast.expr] = set()
        self.fading: set[ast.Assign] = set()
        self.notes: list[str] = []
        self.imports: list[str] = []
        self.seed, self.precision = "0", ""

    def edit(self, kind: Kind, node: ast.expr | ast.stmt, code: str = "", name: str = "") -> None:
        """Add one change."""
        made = Edit(kind, node, code, name)
        if made not in self.edits:
            self.edits.append(made)

    def ask(self, node: ast.AST, text: str) -> None:
        """Leave a question at the statement that a node is part of."""
        texts = self.questions.setdefault(self.line_statement(node), [])
        if text not in texts:
            texts.append(text)

    def remove(self, statement: ast.stmt | None) -> None:
        """Take a statement away."""
        if statement is not None:
            self.removed.add(statement)

    def operand(self, node: ast.expr) -> str:
        """Return an expression as it is written, in parentheses unless it binds as a name does."""
        text = self.module.source(node)
        plain = ast.Name | ast.Attribute | ast.Constant | ast.Call | ast.Subscript
        return text if isinstance(node, plain) else f"({text})"

    def line_statement(self, node: ast.AST) -> ast.stmt:
        """Return the statement of a node that is the first on its line."""
        statement = node if isinstance(node, ast.stmt) else self.module.statement(node)
        assert statement is not None
        parent = self.module.parents.get(statement)
        while isinstance(parent, ast.stmt) and parent.lineno == statement.lineno:
            statement, parent = parent, self.module.parents.get(parent)
        return statement

    def mentions(self, name: str, scope: ast.AST) -> Iterator[ast.Name | ast.Attribute]:
        """Yield where a name, or `self.name`, is read in a scope and what stands in it."""
        for node in ast.walk(scope):
            if not isinstance(node, ast.Name | ast.Attribute) or dotted(node) != name:
                continue
            if isinstance(node.ctx, ast.Load):
                yield node


def root(node: ast.expr) -> ast.expr | None:
    """Return the variable that `model.fc` or `self.model.fc` begins with: `model`, `self.model`."""
    while True:
        match node:
            case ast.Name():
                return node
            case ast.Attribute(value=ast.Name(id="self")):
                return node
            case ast.Attribute(value=value) | ast.Subscript(value=value):
                node = value
            case ast.Call(func=func):
                node = func
            case _:
                return None


def origins(script: Script, node: ast.expr, depth: int = 8) -> list[ast.expr]:
    """Return the expressions, as they stand where they are bound, that a variable has when it is read.

    A name is what was bound to it last before; a parameter what calls give; an element of what a function
    returns is followed into it. An expression that is no variable is its own origin.
    """
    if depth == 0 or not isinstance(node, ast.Name | ast.Attribute):
        return [node]
    found: list[ast.expr] = []
    for module, value in latest(script, node):
        if module is not script.module:
            continue
        if isinstance(value, Part):
            parts = script.project.elements(module, value)
            for home, part in parts:
                if home is module:
                    found += origins(script, part, depth - 1)
        elif isinstance(value, ast.Name | ast.Attribute):
            found += origins(script, value, depth - 1)
        else:
            found.append(value)
    return list(dict.fromkeys(found))


def latest(script: Script, node: ast.Name | ast.Attribute) -> list[tuple[Module, ast.expr | Part]]:
    """Return what was last bound to a variable before it is read, and the files that it stands in."""
    module = script.module
    if isinstance(node, ast.Attribute):
        own = module.enclosing_class(node) if dotted(node).startswith("self.") else None
        values = [
            one
            for one in module.attributes.get((own, dotted(node)), [])
            if not isinstance(one, ast.Constant)
        ]
        return [(module, one) for one in _latest(script, node, values)]
    scope = module.scope(node)
    while True:
        if values := module.bound.get((scope, node.id), []):
            return [(module, one) for one in _latest(script, node, values)]
        if isinstance(scope, Function) and (given := script.project.arguments(scope, node.id)):
            return [(home, value) for home, value in given if home is module]
        if isinstance(scope, ast.Module):
            return []
        scope = module.scope(scope)


def _latest(script: Script, node: ast.expr, values: list[ast.expr | Part]) -> list[ast.expr | Part]:
    """Return the last values that a variable was given before a node in its function, or anywhere."""
    module = script.module

    def place(value: ast.expr | Part) -> ast.expr:
        return value.value if isinstance(value, Part) else value

    def end(value: ast.expr | Part) -> tuple[int, int]:
        one = place(value)
        return one.end_lineno or one.lineno, one.end_col_offset or 0

    here = (node.lineno, node.col_offset)
    same = [one for one in values if module.scope(place(one)) is module.scope(node)]
    before = [one for one in same if end(one) < here and not script.exclusive(place(one), node)]
    found: list[ast.expr | Part] = []
    for one in sorted(before or values, key=end, reverse=True):
        if not found or all(script.exclusive(place(one), place(other)) for other in found):
            found.append(one)
        elif not conditional(module, place(found[-1]), node):
            break
        elif _moves(script, place(found[-1])):
            found[-1] = one
    return found


def _moves(script: Script, value: ast.expr) -> bool:
    """Whether an expression wraps or moves a model that was there before: `nn.DataParallel(model)`."""
    return isinstance(value, ast.Call) and script.name(value.func) in ("DDP", "DataParallel")


def conditional(module: Module, node: ast.AST, other: ast.AST) -> bool:
    """Whether a node stands under a condition that another one does not stand under."""
    above = set(module.above(other))
    return any(
        isinstance(one, ast.If | ast.IfExp) and one not in above for one in module.above(node)
    )


def method_calls(node: ast.AST, *methods: str) -> list[ast.Call]:
    """Return the calls of methods with these names that stand in a node."""
    return [
        one
        for one in ast.walk(node)
        if isinstance(one, ast.Call)
        and isinstance(one.func, ast.Attribute)
        and one.func.attr in methods
    ]


def calls(node: ast.AST, *methods: str) -> int:
    """Return how many calls of methods with these names stand in a node."""
    return len(method_calls(node, *methods))


def sent_backward(call: ast.Call) -> ast.expr:
    """Return what a call of `backward` sends: of a scaled loss the loss."""
    assert isinstance(call.func, ast.Attribute)
    match call.func.value:
        case ast.Call(func=ast.Attribute(attr="scale"), args=[loss]):
            return loss
    return call.func.value


def in_loop(module: Module, node: ast.AST) -> bool:
    """Whether a node stands in a loop of its own function."""
    for one in module.above(node):
        if isinstance(one, Function):
            return False
        if isinstance(one, Loop):
            return True
    return False
