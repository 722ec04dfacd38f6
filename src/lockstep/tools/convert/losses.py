"""Losses that are not means over samples: gradients of a batch as means over its parts."""

from __future__ import annotations

import ast
import re

from lockstep.tools.check.rules.microbatches import counts_otherwise
from lockstep.tools.check.script import Script
from lockstep.tools.convert import questions
from lockstep.tools.convert.draft import Draft, origins, sent_backward

#: In a divisor: the number of samples, or of their elements; the number of others.
_OF_SAMPLES = re.compile(r"\.size\(|\.shape|\blen\(|\.n(umel|element)\(")
_OF_OTHERS = re.compile(r"\.(sum|count_nonzero)\(")


def convert(draft: Draft) -> None:
    """Ask about losses that are sums over samples, or means over something else.

    Not of a DDP script: its ranks put gradients together as replicas do.
    """
    script, module = draft.script, draft.module
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


def _asked(draft: Draft, node: ast.expr, depth: int = 6) -> tuple[ast.expr, str] | None:
    """Return the part of a loss that is asked about, and the question."""
    match node:
        case ast.Call() if any(counts_otherwise(draft.script, node)):
            return node, questions.WEIGHT
        case ast.Call() if _adds_up(draft.script, node):
            return node, questions.SUMS
        case ast.BinOp(left=left, op=ast.Div(), right=right) if _asked(draft, left, depth):
            text = ast.unparse(right)
            if _OF_OTHERS.search(text):
                return node, questions.WEIGHT
            return None if _OF_SAMPLES.search(text) else (node, questions.SUMS)
    parts = [one for one in _parts(draft, node) if one in draft.module.parents] if depth else []
    return next((asked for part in parts if (asked := _asked(draft, part, depth - 1))), None)


def _adds_up(script: Script, call: ast.Call) -> bool:
    """Whether a call is `loss.sum()` or `torch.sum(loss)`, without a dimension, and not of means."""
    whole = len([*call.args, *call.keywords]) == (script.name(call.func) == "torch.sum")
    sums = isinstance(call.func, ast.Attribute) and call.func.attr == "sum"
    return sums and whole and ".mean(" not in ast.unparse(call)


def _parts(draft: Draft, node: ast.expr) -> list[ast.expr]:
    """Return what a value is put together from, or comes from."""
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
