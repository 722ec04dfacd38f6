"""What decides something by the numbers of one rank, or by counting microbatches: questions."""

from __future__ import annotations

import ast

from lockstep.check.source import Loop, dotted
from lockstep.convert import questions
from lockstep.convert.draft import Draft, ancestors

#: Functions whose value is that of their arguments, put together.
_ARITHMETIC = {"sum", "mean", "float", "round", "min", "max"}

#: Methods whose value is that of their object.
_SAME = {"item", "detach", "cpu"}


def convert(draft: Draft) -> None:
    """Ask about learning rates and early ends that follow from what one rank sees."""
    script = draft.script
    for call in script.methods("step"):
        loop, values = script.step_loop(call), [*call.args, *(one.value for one in call.keywords)]
        if isinstance(loop, ast.For) and any(_counts(loop, one) for one in values):
            draft.ask(call, questions.RATE)
        elif loop is None and any(_of_training(draft, one) for one in values):
            draft.ask(call, questions.OWN)
    for node in ast.walk(draft.module.tree):
        if isinstance(node, ast.Assign) and _sets_rate(node) and script.step_loop(node) is not None:
            draft.ask(node, questions.RATE)
        elif isinstance(node, ast.Break) and _leaves_by_training(draft, node):
            draft.ask(node, questions.OWN)


def _counts(loop: ast.For, node: ast.expr) -> bool:
    """Whether an expression has the number that `enumerate` gives in a loop."""
    enumerates = isinstance(loop.iter, ast.Call) and dotted(loop.iter.func) == "enumerate"
    if not enumerates or not isinstance(loop.target, ast.Tuple):
        return False
    number = ast.unparse(loop.target.elts[0])
    return any(isinstance(one, ast.Name) and one.id == number for one in ast.walk(node))


def _sets_rate(node: ast.Assign) -> bool:
    """Whether a statement is `group["lr"] = …`."""
    match node.targets[0]:
        case ast.Subscript(slice=ast.Constant(value="lr")):
            return True
    return False


def _leaves_by_training(draft: Draft, node: ast.Break) -> bool:
    """Whether a loop over epochs is left by what training has returned."""
    tests: list[ast.expr] = []
    for one in ancestors(draft.module, node):
        if isinstance(one, Loop):
            return one in draft.script.epoch_loops and any(_of_training(draft, t) for t in tests)
        if isinstance(one, ast.If):
            tests.append(one.test)
    return False


def _of_training(draft: Draft, node: ast.expr, depth: int = 3) -> bool:
    """Whether a value was computed in a training loop: of each rank's own microbatches."""
    script, module = draft.script, draft.module
    for name in _operands(node):
        for value in script.sources(name):
            if value not in module.parents:
                continue
            if any(one in script.step_loops for one in ancestors(module, value)):
                return True
            called = script.project.callee(module, value) if isinstance(value, ast.Call) else None
            if called is not None and script.level(called.body) is not None:
                return True
            if depth and value is not name and _of_training(draft, value, depth - 1):
                return True
    return False


def _operands(node: ast.expr) -> list[ast.expr]:
    """Return the variables and calls that a value is put together from by arithmetic."""
    parts: list[ast.expr] = []
    match node:
        case ast.Name() | ast.Attribute():
            return [node]
        case ast.Call(func=ast.Attribute(value=owner, attr=method)) if method in _SAME:
            parts = [owner]
        case ast.Call(func=func, args=args) if dotted(func).rpartition(".")[2] in _ARITHMETIC:
            parts = args
        case ast.Call():
            return [node]
        case ast.BinOp(left=left, right=right):
            parts = [left, right]
        case ast.Compare(left=left, comparators=others):
            parts = [left, *others]
        case ast.BoolOp(values=values):
            parts = values
    return [one for part in parts for one in _operands(part)]
