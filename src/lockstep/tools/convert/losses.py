"""Questions to the user about losses that are not means over samples.

A run averages the gradients of replicas, which is right only for such means.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from lockstep.tools.check.assignments import binds
from lockstep.tools.check.rules.microbatches import counts_otherwise
from lockstep.tools.check.script import Script
from lockstep.tools.check.syntax import dotted, method, root
from lockstep.tools.convert import questions
from lockstep.tools.convert.draft import Draft, origins, sent_backward

#: Divisors that count samples or their elements, and divisors that count anything else.
_OF_SAMPLES = re.compile(r"\.size\(|\.shape|\blen\(|\.n(umel|element)\(")
_OF_OTHERS = re.compile(r"\.(sum|count_nonzero)\(")


def convert(draft: Draft) -> None:
    """Add a question to the draft for each loss that is a sum, or a mean over anything but samples.

    Scripts of DDP are skipped: the run averages gradients over replicas, as DDP does over ranks.
    """
    script, module = draft.script, draft.module
    _note_shown_means(draft)
    if "ddp" in script.flavours:
        return
    trained = {script.callee(call) for call in module.calls if script.step_loop(call) is not None}
    for call in module.calls:
        words = {(word.arg, ast.unparse(word.value)) for word in call.keywords}
        sums = words & {("reduction", "'sum'"), ("size_average", "False")}
        trains = script.step_loop(call) is not None or module.scope(call) in trained
        if sums and (trains or script.name(call.func).endswith("Loss")):
            draft.ask(call, questions.SUMS)
    for call in script.methods("backward"):
        if asked := _asked(draft, sent_backward(call)):
            draft.ask(*asked)


def _note_shown_means(draft: Draft) -> None:
    """Add a note for each sum of a training loop that the script divides by a length or by another sum."""
    script, module = draft.script, draft.module
    for loop in script.step_loops:
        names = {name for node in ast.walk(loop) for name in _added(node)}
        names = {name for name in names if not binds(loop.body, name)}
        for node in ast.walk(module.scope(loop)):
            match node:
                case ast.BinOp(left=left, op=ast.Div(), right=right):
                    counts = "len(" in ast.unparse(right) or dotted(right) in names
                    if counts and dotted(root(left) or loop) in names:
                        note = questions.SHOWN.format(ast.unparse(node), node.lineno)
                        draft.notes.append(note)


def _added(node: ast.AST) -> Iterator[str]:
    """Yield the variables to which a statement, such as `total += x` or `total = total + x`, adds."""
    match node:
        case ast.AugAssign(target=target, op=ast.Add()) if dotted(target):
            yield dotted(target)
        case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)):
            for target, value in zip(targets, values, strict=False):
                yield from _added(ast.Assign([target], value))
        case ast.Assign(targets=[target], value=ast.BinOp(left=left, op=ast.Add())):
            if dotted(target) and dotted(target) == dotted(left):
                yield dotted(target)


def _asked(draft: Draft, node: ast.expr, depth: int = 6) -> tuple[ast.expr, str] | None:
    """Return (part, question to the user) for a part of the loss that is no mean over samples.

    Such a part of the expression `node` is a sum, or a mean over something else, such as tokens. Return
    `None` without one. Values of variables are followed over `depth` levels.
    """
    match node:
        case ast.Call() if any(counts_otherwise(draft.script, node)):
            return node, questions.WEIGHT
        case ast.Call() if _adds_up(draft.script, node):
            return node, questions.SUMS
        case ast.BinOp(left=left, op=ast.Div(), right=right) if asked := _asked(draft, left, depth):
            if asked[1] != questions.SUMS:  # a weighted mean stays one
                return asked
            text = ast.unparse(right)
            if _OF_OTHERS.search(text):
                return node, questions.WEIGHT
            return None if _OF_SAMPLES.search(text) else (node, questions.SUMS)
    parts = [one for one in _parts(draft, node) if one in draft.module.parents] if depth else []
    return next((asked for part in parts if (asked := _asked(draft, part, depth - 1))), None)


def _adds_up(script: Script, call: ast.Call) -> bool:
    """Whether a call is `x.sum()` or `torch.sum(x)` over all dimensions, where `x` contains no mean."""
    whole = len([*call.args, *call.keywords]) == (script.name(call.func) == "torch.sum")
    return method(call) == "sum" and whole and ".mean(" not in ast.unparse(call)


def _parts(draft: Draft, node: ast.expr) -> list[ast.expr]:
    """Return the expressions of which the value of `node` is directly made.

    They are the operands of `+`, `-` and `*`, and the left operand of other operators. For a variable they
    are the expressions that it is set to; for a call, other expressions from which its value may come.
    """
    match node:
        case ast.BinOp(left=left, op=ast.Mult() | ast.Add() | ast.Sub(), right=right):
            return [left, right]
        case ast.BinOp(left=one) | ast.UnaryOp(operand=one):
            return [one]
        case ast.Name() | ast.Attribute():
            return origins(draft.script, node)
        case ast.Call():
            return [source for source in draft.script.sources(node) if source is not node]
    return []
