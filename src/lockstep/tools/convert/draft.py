"""Collect a conversion's edits and questions to the user, and find where variables get values."""

from __future__ import annotations

import ast
import itertools

from lockstep.tools.check.fix import Edit, Kind
from lockstep.tools.check.script import Script
from lockstep.tools.check.source import UnpackedElement
from lockstep.tools.check.syntax import Function, Variable, receiver, start

#: Placeholder in the code of edits, which `run_scope.py` replaces by the variable that holds the run, such
#: as `run` or `self.run`.
RUN = "__run__"
#: Number of replicas of a converted script, which is the largest number of ranks that it can use.
REPLICAS = 4


class Draft:
    """The changes to one script, collected by all modules of the conversion before any is applied.

    Attributes:
        edits: changes of expressions and statements; several of one expression are made in this order.
        questions: questions to the user, by the statement that each is about.
        removed: statements to delete.
        notes: messages for the user that need no answer.
        within_run: expressions that make models; they have to be inside the `with` of the run.
        models: expressions that make the models passed to the run.
        droppable: assignments to delete if nothing reads their variables any more.
        imports: statements that import names used in edits, besides Lockstep.
        seed: source text of the run's seed.
        precision: source text of the run's argument `precision`; empty without one.
    """

    def __init__(self, script: Script) -> None:
        self.script, self.module = script, script.module
        self.edits: list[Edit] = []
        self.questions: dict[ast.stmt, list[str]] = {}
        self.removed: set[ast.stmt] = set()
        self.within_run: list[ast.expr] = []
        self.models: set[ast.expr] = set()
        self.droppable: set[ast.Assign] = set()
        self.notes: list[str] = []
        self.imports: list[str] = []
        self.seed, self.precision = "0", ""

    def edit(self, kind: Kind, node: ast.expr | ast.stmt, code: str = "", name: str = "") -> None:
        """Add one edit, such as the replacement of `node` by `code`; the arguments are those of `Edit`."""
        made = Edit(kind, node, code, name)
        if made not in self.edits:
            self.edits.append(made)

    def ask(self, node: ast.AST, text: str) -> None:
        """Add the question `text` to the user, about the statement that contains `node`."""
        texts = self.questions.setdefault(self.line_statement(node), [])
        if text not in texts:
            texts.append(text)

    def alone(self, call: ast.Call) -> ast.Expr | None:
        """Return the statement that consists of only this call; `None` if there is none."""
        parent = self.module.parents.get(call)
        return parent if isinstance(parent, ast.Expr) else None

    def operand(self, node: ast.expr) -> str:
        """Return the source of an expression, in parentheses if these may be needed as an operand."""
        text = self.module.source(node)
        plain = ast.Name | ast.Attribute | ast.Constant | ast.Call | ast.Subscript
        return text if isinstance(node, plain) else f"({text})"

    def line_statement(self, node: ast.AST) -> ast.stmt:
        """Return the statement of `node`, or the outermost one around it that begins on the same line."""
        statement = self.module.statement(node)
        assert statement is not None
        parent = self.module.parents.get(statement)
        while isinstance(parent, ast.stmt) and parent.lineno == statement.lineno:
            statement, parent = parent, self.module.parents.get(parent)
        return statement

    def tests(self, node: ast.AST, within: ast.AST | None = None) -> list[ast.expr]:
        """Return the conditions of the `if` statements around `node`, up to the node `within` if given."""
        above = itertools.takewhile(lambda one: one is not within, self.module.above(node))
        return [one.test for one in above if isinstance(one, ast.If)]


def origins(script: Script, node: ast.expr, depth: int = 8) -> list[ast.expr]:
    """Return the expressions in the script's file from which `node` may get its value.

    Follows assignments, arguments of calls and return values of functions back to the first expression,
    over `depth` levels. If `node` is not a variable, returns `[node]`.
    """
    if depth == 0 or not isinstance(node, Variable):
        return [node]
    found: list[ast.expr] = []
    for value in latest(script, node):
        parts = [value] if isinstance(value, ast.expr) else []
        if isinstance(value, UnpackedElement):
            elements = script.project.elements(script.module, value)
            parts = [part for home, part in elements if home is script.module]
        found += (origin for part in parts for origin in origins(script, part, depth - 1))
    return list(dict.fromkeys(found))


def latest(script: Script, node: Variable) -> list[ast.expr | UnpackedElement]:
    """Return the values that the variable `node` may have where it is read.

    They come from assignments, or from the arguments of calls.
    """
    module = script.module
    if isinstance(node, ast.Attribute):
        values = [one for one in module.assigned(node) if not isinstance(one, ast.Constant)]
        return _latest(script, node, values)
    scope = module.scope(node)
    while True:
        if values := module.bound.get((scope, node.id), []):
            return _latest(script, node, values)
        if isinstance(scope, Function) and (given := script.project.arguments(scope, node.id)):
            return [value for home, value in given if home is module]
        if isinstance(scope, ast.Module):
            return []
        scope = module.scope(scope)


def _latest(
    script: Script, node: ast.expr, values: list[ast.expr | UnpackedElement]
) -> list[ast.expr | UnpackedElement]:
    """Return the one of `values` that is assigned last before `node`.

    If different branches assign different values, return each value that may be the last.
    """
    module = script.module
    conditions = set(module.above(node))

    def place(value: ast.expr | UnpackedElement) -> ast.expr:
        return value.value if isinstance(value, UnpackedElement) else value

    def end(value: ast.expr | UnpackedElement) -> tuple[int, int]:
        bound = place(value)
        return bound.end_lineno or bound.lineno, bound.end_col_offset or 0

    same = [one for one in values if module.scope(place(one)) is module.scope(node)]
    earlier = [one for one in same if end(one) < start(node)]
    before = [one for one in earlier if not module.exclusive(place(one), node)]
    found: list[ast.expr | UnpackedElement] = []
    for value in sorted(before or values, key=end, reverse=True):
        if all(module.exclusive(place(value), place(other)) for other in found):
            found.append(value)
            continue
        last = place(found[-1])
        above = set(module.above(last)) - conditions
        if not any(isinstance(parent, ast.If | ast.IfExp) for parent in above):
            break
        if isinstance(last, ast.Call) and script.name(last.func) in ("DDP", "DataParallel"):
            found[-1] = value  # a wrapper: follow the model that it wraps
    return found


def sent_backward(call: ast.Call) -> ast.expr:
    """Return the `loss` of a call such as `loss.backward()` or `scaler.scale(loss).backward()`."""
    match receiver(call):
        case ast.Call(func=ast.Attribute(attr="scale"), args=[loss]):
            return loss
    return receiver(call)
