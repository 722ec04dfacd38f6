"""Loops and steps: `run.epochs`, `run.backward`, clipping, accumulation."""

from __future__ import annotations

import ast
from typing import Any

from lockstep.check.arguments import argument
from lockstep.check.source import Loop, dotted
from lockstep.convert import questions
from lockstep.convert.draft import RUN, Draft, ancestors, calls, origins

_CLIPPING = {
    "torch.nn.utils.clip_grad_norm_": "clip_grad_norm_",
    "torch.nn.utils.clip_grad_norm": "clip_grad_norm_",
    "torch.nn.utils.clip_grad.clip_grad_norm_": "clip_grad_norm_",
    "torch.nn.utils.clip_grad_value_": "clip_grad_value_",
}


def convert(draft: Draft) -> None:
    """Let the run count epochs and send losses backward."""
    for loop in draft.script.epoch_loops:
        if draft.script.level(loop.body) == 1:
            _epochs(draft, _counting(draft, loop))
    for call in draft.script.methods("backward"):
        if not any(edit.node is call for edit in draft.edits):  # of a loss that is scaled
            _backward(draft, call)
    for loop in draft.script.step_loops:
        _accumulation(draft, loop)
        _leaving(draft, loop)
    _sums(draft)
    for name, method in _CLIPPING.items():
        for call in draft.script.calls(name):
            draft.edit("callee", call, f"{RUN}.{method}")


def _counting(draft: Draft, loop: Loop) -> Loop:
    """Return the loop that counts epochs: this one, or one around it, as around phases of an epoch."""
    around = [one for one in ancestors(draft.module, loop) if isinstance(one, Loop)]
    for one in (loop, *around):
        if isinstance(one, ast.For) and _range(one.iter):
            return one
    return loop


def _epochs(draft: Draft, loop: Loop) -> None:
    counted = None if isinstance(loop, ast.While) else _range(loop.iter)
    if counted is None or not isinstance(loop, ast.For):
        draft.ask(loop, questions.EPOCHS)
        return
    first, last = counted
    source = draft.module.source
    if first is None or (isinstance(first, ast.Constant) and first.value == 0):
        draft.edit("replace", loop.iter, f"{RUN}.epochs({source(last)})")
        return
    draft.edit("replace", loop.iter, f"{RUN}.epochs({_difference(draft, first, last)})")
    read = isinstance(loop.target, ast.Name) and any(
        draft.mentions(loop.target.id, statement) for statement in loop.body
    )
    if read:
        draft.edit("first", loop, f"{source(loop.target)} += {source(first)}")


def _range(node: ast.expr) -> tuple[ast.expr | None, ast.expr] | None:
    """Return where a `range`, also one with a bar, begins and ends."""
    if not isinstance(node, ast.Call) or not node.args:
        return None
    name = dotted(node.func).rpartition(".")[2]
    if name == "tqdm":
        return _range(node.args[0])
    if name not in ("range", "trange") or len(node.args) > 2:
        return None
    return (None, node.args[0]) if len(node.args) == 1 else (node.args[0], node.args[1])


def _difference(draft: Draft, first: ast.expr, last: ast.expr) -> str:
    """Return how many there are from `first` up to `last`, as one would write it."""
    match last:
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            for one, other in ((left, right), (right, left)):
                if ast.dump(one) == ast.dump(first):
                    return draft.module.source(other)
    return f"{draft.operand(last)} - {draft.operand(first)}"


def _backward(draft: Draft, call: ast.Call) -> None:
    if draft.script.step_loop(call) is None:
        draft.ask(call, questions.OUTSIDE)
    elif call.args or call.keywords:
        draft.ask(call, questions.BACKWARD)
    else:
        draft.edit("owner", call, f"{RUN}.backward")


# Steps that are not taken in each iteration -------------------------------------------------------------


def _accumulation(draft: Draft, loop: Loop) -> None:
    """Make of a step that every n-th batch takes one batch that is n times as large."""
    for branch in _inside(draft, loop, ast.If):
        number = _modulus(branch.test)
        if not calls(branch, "step") or not (number or _varies(loop, branch.test)):
            continue
        sized = [argument(one, "batch_size", 1) for one in _loaders(draft, loop)]
        divided = [] if number is None else _divisions(draft, loop, number)
        if number is None or not divided or not _accumulates(loop, branch) or not all(sized):
            draft.ask(branch, questions.EVERY)
            continue
        draft.edit("splice", branch)
        count = draft.module.source(number)
        for size in sized:
            assert size is not None
            draft.edit("replace", size, f"{_factor(draft, size)} * {count}")
        for node in divided:
            _undivide(draft, node)
        draft.notes.append(questions.ACCUMULATED.format(count))


def _factor(draft: Draft, node: ast.expr) -> str:
    """Return an expression as a factor; what it is to be replaced by already counts."""
    known = [edit.code for edit in draft.edits if edit.kind == "replace" and edit.node is node]
    draft.edits = [
        edit for edit in draft.edits if not (edit.kind == "replace" and edit.node is node)
    ]
    return known[0] if known else draft.operand(node)


def _inside(draft: Draft, loop: Loop, *kind: type[ast.stmt]) -> list[Any]:
    """Return the nodes of a kind whose innermost loop is this one."""
    found = []
    for node in ast.walk(loop):
        if isinstance(node, kind):
            nearest = next(one for one in ancestors(draft.module, node) if isinstance(one, Loop))
            if nearest is loop:
                found.append(node)
    return found


def _accumulates(loop: Loop, branch: ast.If) -> bool:
    """Whether all steps of a loop are in a branch, and all of its backward passes before it."""
    updates = ("step", "zero_grad")
    return (
        not branch.orelse
        and calls(branch, *updates) == calls(loop, *updates)
        and not calls(branch, "backward")
        and calls(loop, "backward") > 0
    )


def _varies(loop: Loop, test: ast.expr) -> bool:
    """Whether a condition reads what the loop binds."""
    stored = {
        one.id
        for one in ast.walk(loop)
        if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)
    }
    return any(isinstance(one, ast.Name) and one.id in stored for one in ast.walk(test))


def _modulus(test: ast.expr) -> ast.expr | None:
    """Return `n` of `(i + 1) % n == 0`, also beside `i + 1 == len(loader)`."""
    first = test.values[0] if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.Or) else test
    match first:
        case ast.Compare(left=ast.BinOp(op=ast.Mod(), right=number), ops=[ast.Eq()]):
            return number
    return None


def _loaders(draft: Draft, loop: Loop) -> list[ast.Call]:
    given = draft.script.iterated(loop)
    return [] if given is None else draft.script.made_by(given, "DataLoader")


def _divisions(draft: Draft, loop: Loop, number: ast.expr) -> list[ast.AugAssign | ast.BinOp]:
    """Return where the loop divides losses by a number, and where the length of its loader is divided.

    None where no loss is: a loss that is a sum over batches is another one when the batch is larger.
    """
    same = ast.dump(number)
    found: list[ast.AugAssign | ast.BinOp] = []
    for node in ast.walk(loop):
        if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div):
            if ast.dump(node.value) == same and "loss" in ast.unparse(node.target):
                found.append(node)  # `loss /= n`
        elif (
            isinstance(node, ast.BinOp)
            and isinstance(node.op, ast.Div)
            and ast.dump(node.right) == same
            and "loss" in ast.unparse(node.left)
        ):
            found.append(node)
    if not found:
        return []
    loaders = set(_loaders(draft, loop))
    for node in ast.walk(draft.module.tree):
        if isinstance(node, ast.BinOp) and ast.dump(node.right) == same and node not in found:
            length = isinstance(node.op, ast.Div | ast.FloorDiv) and _length(draft, node, loaders)
            logged = isinstance(node.op, ast.Mult) and "loss" in ast.unparse(node.left)
            if length or (logged and draft.module.scope(node) is draft.module.scope(loop)):
                found.append(node)
    return found


def _length(draft: Draft, node: ast.BinOp, loaders: set[ast.Call]) -> bool:
    """Whether a number is computed from the length of one of some loaders."""
    return any(
        isinstance(one, ast.Call)
        and dotted(one.func) == "len"
        and loaders.intersection(draft.script.made_by(one.args[0], "DataLoader"))
        for one in ast.walk(node.left)
    )


def _undivide(draft: Draft, node: ast.AugAssign | ast.BinOp) -> None:
    if isinstance(node, ast.AugAssign):
        draft.remove(node)
        return
    above = draft.module.parents.get(node)
    inner = isinstance(above, ast.BinOp | ast.UnaryOp | ast.Attribute)
    left = draft.operand(node.left) if inner else draft.module.source(node.left)
    draft.edit("replace", node, left)
    if isinstance(above, ast.Assign) and ast.unparse(above.targets[0]) == ast.unparse(node.left):
        draft.remove(above)  # `loss = loss / n`


def _leaving(draft: Draft, loop: Loop) -> None:
    for node in _inside(draft, loop, ast.Break, ast.Return):
        draft.ask(node, questions.LEAVES)
    for node in _inside(draft, loop, ast.Continue):
        draft.ask(node, questions.SKIPS)


# Losses that are sums ------------------------------------------------------------------------------------


def _sums(draft: Draft) -> None:
    """Ask about losses of training that are sums over samples."""
    script, module = draft.script, draft.module
    trained = {
        called
        for call in module.calls
        if script.step_loop(call) is not None and (called := script.project.callee(module, call))
    }
    for call in module.calls:
        trains = script.step_loop(call) is not None or module.scope(call) in trained
        if _takes_sum(call) and (trains or script.name(call.func).endswith("Loss")):
            draft.ask(call, questions.SUMS)
    for call in script.methods("backward"):
        assert isinstance(call.func, ast.Attribute)
        for value in origins(script, call.func.value):
            summing = value.func if isinstance(value, ast.Call) else None
            if isinstance(summing, ast.Attribute) and summing.attr == "sum":
                draft.ask(value, questions.SUMS)


def _takes_sum(call: ast.Call) -> bool:
    return any(
        (one.arg, ast.unparse(one.value)) in (("reduction", "'sum'"), ("size_average", "False"))
        for one in call.keywords
    )
