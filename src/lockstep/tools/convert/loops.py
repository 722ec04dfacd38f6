"""Convert loops over epochs, backward passes, gradient clipping and gradient accumulation."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from typing import Any

from lockstep.tools.check.syntax import (
    Loop,
    all_arguments,
    argument,
    dotted,
    last_name,
    method_calls,
    reads,
    root,
    stored,
)
from lockstep.tools.convert import questions
from lockstep.tools.convert.draft import RUN, Draft, latest, origins, sent_backward

_EXITS = ("sys.exit", "exit", "quit", "os._exit", "os.abort")


def convert(draft: Draft) -> None:
    """Edit the draft: use the run's methods to count epochs, run backward passes and clip gradients.

    The user is asked about statements that leave a training loop or skip a part of a batch.
    """
    for loop in draft.script.epoch_loops:
        if draft.script.level(loop.body) == 1:
            # The loop that counts epochs may be further out: an epoch may be a loop over phases.
            counting = (one for one in (loop, *draft.module.above(loop)) if _counted(draft, one)[1])
            _epochs(draft, next(counting, loop))
    for call in draft.script.methods("backward"):
        if any(edit.node is call for edit in draft.edits):
            continue  # `precision.py` has converted this call of a scaled loss
        if draft.script.step_loop(call) is None:
            draft.ask(call, questions.OUTSIDE)
        elif all_arguments(call):
            draft.ask(call, questions.BACKWARD)
        else:
            draft.edit("receiver", call, f"{RUN}.backward")
    for loop in draft.script.step_loops:
        _accumulation(draft, loop)
    _leaving(draft)
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        for call in draft.script.calls(f"torch.nn.utils.{name}"):
            draft.edit("replace", call.func, f"{RUN}.{name}")


def _epochs(draft: Draft, loop: ast.AST) -> None:
    bar, counted = _counted(draft, loop)
    if counted is None or not isinstance(loop, ast.For):
        draft.ask(loop, questions.EPOCHS)
        return
    *start, last = counted.args
    source = draft.module.source
    first = next((one for one in start if ast.unparse(one) != "0"), None)
    count = source(last) if first is None else _difference(draft, first, last)
    draft.edit("replace", counted, _with_bar(draft, counted, count))
    if bar is not None and argument(bar, "total") is None:
        draft.edit("argument", bar, count, "total")
    if first is None:
        return
    parts = [part for one in draft.script.sources(first) for part in ast.walk(one)]
    if any(isinstance(part, ast.Subscript) for part in parts):
        draft.ask(loop, questions.START)
    name = dotted(loop.target)
    if name and reads(name, *loop.body):
        draft.edit("first", loop, f"{name} += {source(first)}")


def _counted(draft: Draft, over: ast.AST) -> tuple[ast.Call | None, ast.Call | None]:
    """Return the calls that a loop iterates over: `tqdm(…)`, and `range(…)` or `trange(…)`.

    `over`: the loop, or the expression that it iterates over. A missing call is `None`.
    """
    match over:
        case ast.For(iter=node) | ast.AsyncFor(iter=node) | ast.NamedExpr(value=node):
            return _counted(draft, node)
    for origin in origins(draft.script, over) if isinstance(over, ast.expr) else ():
        match origin:
            case ast.Call(func=func, args=[ast.Call() as inner, *_]) if last_name(func) == "tqdm":
                return origin, _counted(draft, inner)[1]
            case ast.Call(func=func, args=[_] | [_, _]):
                if last_name(func) in ("range", "trange"):
                    return None, origin
    return None, None


def _with_bar(draft: Draft, counted: ast.Call, count: str) -> str:
    """Return the source of `run.epochs(COUNT)`, inside `tqdm(…)` if the loop had a `trange`.

    `counted` is the call of `range` or `trange`, `count` the source of the number of epochs.
    """
    epochs, source = f"{RUN}.epochs({count})", draft.module.source
    if last_name(counted.func) == "range":
        return epochs
    home = draft.script.name(counted.func).rpartition(".")[0]
    if home and isinstance(counted.func, ast.Name) and "tqdm" not in draft.module.imports:
        draft.imports.append(f"from {home} import tqdm")
    words = [f"{word.arg}={source(word.value)}" for word in counted.keywords]
    bar = source(counted.func).removesuffix("trange") + "tqdm"
    return f"{bar}({', '.join([epochs, f'total={count}', *words])})"


def _difference(draft: Draft, first: ast.expr, last: ast.expr) -> str:
    """Return the source of the difference `last - first`; it is `n` if `last` is `first + n`."""
    match last:
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            for one, other in ((left, right), (right, left)):
                if ast.dump(one) == ast.dump(first):
                    return draft.module.source(other)
    return f"{draft.operand(last)} - {draft.operand(first)}"


# Steps that are not taken in each iteration -------------------------------------------------------------


def _accumulation(draft: Draft, loop: Loop) -> None:
    """Replace an optimizer step every n-th batch by a step for each batch of n times the size.

    The user is asked if this is not certain to compute the same.
    """
    bound = stored(loop)
    for branch in _inside(draft, loop, ast.If):
        number = _modulus(branch.test)
        varies = any(isinstance(one, ast.Name) and one.id in bound for one in ast.walk(branch.test))
        if not method_calls(branch, "step") or not (number or varies):
            continue
        loaders = draft.script.made_by(draft.script.iterated(loop), "DataLoader")
        sizes = [argument(call, "batch_size", 1) for call in loaders]
        divided = [] if number is None else _divisions(draft, loop, number)
        if number is None or not divided or not _accumulates(loop, branch) or not all(sizes):
            draft.ask(branch, questions.EVERY)
            continue
        draft.edit("splice", branch)
        count = draft.module.source(number)
        for size in sizes:
            assert size is not None
            known = [edit for edit in draft.edits if edit.kind == "replace" and edit.node is size]
            factor = known[0].code if known else draft.operand(size)
            draft.edits = [edit for edit in draft.edits if edit not in known]
            draft.edit("replace", size, f"{factor} * {count}")
        for node in divided:
            _undivide(draft, node)
        draft.notes.append(questions.ACCUMULATED.format(count))


def _inside(draft: Draft, loop: Loop, kind: Any) -> Iterator[Any]:
    """Yield the nodes of type `kind`, such as `ast.If`, that are in `loop` but not in an inner loop."""
    for node in (one for one in ast.walk(loop) if isinstance(one, kind)):
        if next(one for one in draft.module.above(node) if isinstance(one, Loop)) is loop:
            yield node


def _accumulates(loop: Loop, branch: ast.If) -> bool:
    """Whether the branch `branch` has all optimizer steps of a loop, and none of its backward passes."""
    updates = ("step", "zero_grad")
    return (
        not branch.orelse
        and len(method_calls(branch, *updates)) == len(method_calls(loop, *updates))
        and not method_calls(branch, "backward")
        and bool(method_calls(loop, "backward"))
    )


def _modulus(test: ast.expr) -> ast.expr | None:
    """Return `n` of a condition such as `(i + 1) % n == 0`; `None` for other conditions.

    A further condition for the last batch, `or i + 1 == len(loader)`, may follow.
    """
    first = test
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.Or):
        first, *others = test.values
        if not all(isinstance(one, ast.Compare) and "len(" in ast.unparse(one) for one in others):
            return None
    match first:
        case ast.Compare(left=ast.BinOp(op=ast.Mod(), right=number), ops=[ast.Eq()]):
            return number
    return None


def _divisions(draft: Draft, loop: Loop, number: ast.expr) -> list[ast.AugAssign | ast.BinOp]:
    """Return the divisions of losses by `number`, the number of accumulated batches, for removal.

    The result also has matching expressions, such as `loss * n` for a log, or `len(loader) / n`. It is
    empty if some loss is not divided.
    """
    same = ast.dump(number)
    sent = [_divided(draft, sent_backward(call), same) for call in method_calls(loop, "backward")]
    if not all(sent):
        return []
    found = list(dict.fromkeys(itertools.chain(*sent)))
    names = {  # `loss` of `loss = loss / n`
        dotted(one.target) if isinstance(one, ast.AugAssign) else draft.script.bound_name(one)
        for one in found
    } - {""}
    loaders = set(draft.script.made_by(draft.script.iterated(loop), "DataLoader"))
    for node in ast.walk(draft.module.tree):
        if isinstance(node, ast.BinOp) and ast.dump(node.right) == same and node not in found:
            length = isinstance(node.op, ast.Div | ast.FloorDiv) and _length(draft, node, loaders)
            logged = isinstance(node.op, ast.Mult) and dotted(root(node.left) or loop) in names
            if length or (logged and draft.module.scope(node) is draft.module.scope(loop)):
                found.append(node)
    return found


def _divided(draft: Draft, node: ast.expr, same: str) -> list[ast.AugAssign | ast.BinOp]:
    """Return the divisions of the loss `node` by a number, which `ast.dump` writes as `same`.

    A variable is followed to the values assigned to it; if one of them is not divided, the list is empty.
    """
    match node:
        case ast.BinOp(op=ast.Div(), right=right) if ast.dump(right) == same:
            above = draft.module.parents.get(node)
            return [above if isinstance(above, ast.AugAssign) else node]
        case ast.BinOp(op=ast.Mult() | ast.Div(), left=left):
            return _divided(draft, left, same)
        case ast.Name() | ast.Attribute():
            values = [value for value in latest(draft.script, node) if isinstance(value, ast.expr)]
            found = [_divided(draft, value, same) for value in values]
            return list(itertools.chain(*found)) if all(found) else []
    return []


def _length(draft: Draft, node: ast.BinOp, loaders: set[ast.Call]) -> bool:
    """Whether the left operand of `node` contains `len(…)` of one of `loaders`."""
    calls = [one for one in ast.walk(node.left) if isinstance(one, ast.Call)]
    lengths = [call.args[0] for call in calls if dotted(call.func) == "len"]
    return any(loaders.intersection(draft.script.made_by(one, "DataLoader")) for one in lengths)


def _undivide(draft: Draft, node: ast.AugAssign | ast.BinOp) -> None:
    if isinstance(node, ast.AugAssign):
        draft.removed.add(node)
        return
    above = draft.module.parents.get(node)
    inner = isinstance(above, ast.BinOp | ast.UnaryOp | ast.Attribute)
    left = draft.operand(node.left) if inner else draft.module.source(node.left)
    draft.edit("replace", node, left)
    if isinstance(above, ast.Assign) and ast.unparse(above.targets[0]) == ast.unparse(node.left):
        draft.removed.add(above)  # `loss = loss / n`


def _leaving(draft: Draft) -> None:
    """Add questions to `draft` about statements that end a training loop or skip part of a batch."""
    script, module = draft.script, draft.module
    for loop in script.step_loops:
        for jump in _inside(draft, loop, ast.Break | ast.Continue):
            leaves = isinstance(jump, ast.Break)
            draft.ask(jump, questions.LEAVES if leaves else questions.SKIPS)
        for node in ast.walk(loop):
            if isinstance(node, ast.Return) and module.scope(node) is module.scope(loop):
                draft.ask(node, questions.LEAVES)
    for node in ast.walk(module.tree):
        if exits(draft, node) and script.step_loop(node) is not None:
            draft.ask(node, questions.LEAVES)


def exits(draft: Draft, node: ast.AST) -> bool:
    """Whether `node` ends the script, such as `sys.exit()`, or raises an exception of the script's own."""
    if isinstance(node, ast.Call):
        return draft.script.name(node.func) in _EXITS
    match node:
        case ast.Raise(exc=ast.Call(func=raised) | (ast.Name() as raised)):
            return dotted(raised) in {"SystemExit", "KeyboardInterrupt", *draft.module.classes}
    return False
