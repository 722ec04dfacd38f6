"""Convert loops with several optimizer steps per batch, as in GANs.

Each optimizer step gets its own loop over the microbatches of the batch.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

from lockstep.tools.check.assignments import binds
from lockstep.tools.check.fix import PART
from lockstep.tools.check.syntax import Loop, dotted, method, method_calls, stored, variables
from lockstep.tools.convert import questions
from lockstep.tools.convert.draft import RUN, Draft, sent_backward

#: Attributes that read a tensor without its autograd graph.
_NUMBERS = ("detach", "item", "data", "shape", "size")


def convert(draft: Draft) -> None:
    """Edit loops with two optimizer steps per batch: each step gets its own loop over microbatches.

    Several calls of `backward` before a step are joined. The user is asked about loops with more than two
    steps per batch.
    """
    for loop in draft.script.step_loops:
        starts = _starts(loop.body)
        ends = [*starts[1:], len(loop.body)]
        for start, end in zip(starts, ends, strict=True):
            _one_backward(draft, loop.body[start:end])
        if len(starts) > 2:
            draft.ask(loop, questions.UPDATES)
        elif len(starts) == 2:
            _two_passes(draft, loop, starts[1])


def _starts(body: Sequence[ast.stmt]) -> list[int]:
    """Return the indices in a loop's body at which its updates of parameters begin.

    An update ends with an optimizer step. The next update begins if `backward` is called again after it.
    """
    starts, stepped, sent = [0], False, False
    for index, statement in enumerate(body):
        sends = bool(method_calls(statement, "backward"))
        if sends and stepped:
            starts.append(1 + max(n for n in range(index) if method_calls(body[n], "step")))
            stepped = False
        sent = sent or sends
        stepped = stepped or (sent and bool(method_calls(statement, "step")))
    return starts


def _one_backward(draft: Draft, part: Sequence[ast.stmt]) -> None:
    """Replace several calls of `backward` before an optimizer step by one call, on the sum of the losses.

    `part` are the statements up to the step. The user is asked if the calls cannot be joined.
    """
    sent = [
        (one, one.value)
        for one in part
        if isinstance(one, ast.Expr)
        and isinstance(one.value, ast.Call)
        and method(one.value) == "backward"
    ]
    if len(sent) < 2:
        return
    losses = [sent_backward(call) for _, call in sent]
    inner = {node for loss in losses for node in ast.walk(loss)}
    if any(edit.node in inner for edit in draft.edits) or not _may_join(part, sent):
        draft.ask(sent[0][0], questions.BACKWARD)
        return
    draft.removed.update(statement for statement, _ in sent[:-1])
    calls = [call for _, call in sent]
    draft.edits = [edit for edit in draft.edits if edit.node not in calls]
    total = " + ".join(draft.operand(loss) for loss in losses)
    draft.edit("replace", calls[-1], f"{RUN}.backward({total})")


def _may_join(part: Sequence[ast.stmt], sent: Sequence[tuple[ast.stmt, ast.Call]]) -> bool:
    """Whether one `backward` of the sum of the losses gives the same gradients as the calls in `sent`.

    `part` are the statements of the update; `sent` are its statements that call `backward`, with the calls.
    """
    words = {word.arg for _, call in sent for word in call.keywords}
    if words - {"retain_graph"} or any(call.args for _, call in sent):
        return False
    last = part.index(sent[-1][0])
    return not any(
        _names(ast.Load, statement) & _names(ast.Store, *part[part.index(statement) : last])
        for statement, _ in sent[:-1]
    )


def _two_passes(draft: Draft, loop: Loop, second: int) -> None:
    """Edit a loop with two optimizer steps per batch: each step gets its own loop over the microbatches.

    The statements of the body from index `second` on are those of the second inner loop. Values that they
    need from the first inner loop are kept in a list.
    """
    taken, first, rest = _taken(loop), loop.body[:second], loop.body[second:]
    needed = _needed(first, rest)
    read = {
        dotted(one) for one in variables(*rest, context=ast.Load) if isinstance(one, ast.Attribute)
    }
    undecided = read & stored(*first) or any(
        not binds(first, name)
        or (_goes_through(draft, rest, name) and _has_graph(draft, first, name))
        for name in needed
    )
    if taken is None or undecided:
        draft.ask(loop, questions.UPDATES)
        return
    loader, number, target = ("" if one is None else draft.module.source(one) for one in taken)
    names = _names(ast.expr_context, draft.module.tree)
    batch = "batch" if "batch" not in names else "global_batch"
    kept = "kept" if "kept" not in names else "kept_values"
    head = f"for {batch} in {RUN}.batches({loader}):"
    if number:
        head = f"for {number}, {batch} in enumerate({RUN}.batches({loader})):"
    lines = [head, f"    for {target} in {batch}:", "        pass"]
    if needed:
        values = f"({', '.join(needed)}{',' * (len(needed) == 1)})"
        lines.insert(1, f"    {kept} = []  # of each microbatch, for the second pass")
        lines.append(f"        {kept}.append({values})")
        bare = isinstance(taken[2], ast.Tuple) and not target.startswith("(")
        lines.append(
            f"    for {f'({target})' if bare else target}, {values} in zip({batch}, {kept}):"
        )
    else:
        lines.append(f"    for {target} in {batch}:")
    lines.append("        pass")
    draft.edit("passes", loop, "\n".join(lines) + "\n")
    draft.edit("before", rest[0], repr(PART))


def _taken(loop: Loop) -> tuple[ast.expr, ast.expr | None, ast.expr] | None:
    """Return a loop's loader, counter and batch variable; `None` if it has another form.

    The loop is `for batch in loader` or `for counter, batch in enumerate(loader)`; without `enumerate`, the
    counter is `None`.
    """
    match loop:
        case ast.For(
            iter=ast.Call(func=ast.Name(id="enumerate"), args=[loader, *_]),
            target=ast.Tuple(elts=[number, target]),
        ) if dotted(loader):
            return loader, number, target
        case ast.For(iter=(ast.Name() | ast.Attribute()) as loader, target=target):
            return loader, None, target
    return None


def _needed(first: Sequence[ast.stmt], second: Sequence[ast.stmt]) -> list[str]:
    """Return the variables that the statements `first` assign and `second` read before assigning them."""
    bound = _names(ast.Store, *first)
    found: dict[str, None] = {}
    for statement in second:
        reads = [dotted(one) for one in variables(statement, context=ast.Load)]
        found.update({name: None for name in reads if name in bound})
        bound -= _names(ast.Store, statement)
    return list(found)


def _goes_through(draft: Draft, second: Sequence[ast.stmt], name: str) -> bool:
    """Return whether the statements `second` may need the autograd graph of the variable `name`.

    They do not if they only read attributes such as `name.detach()`, `name.item()` or `name.shape`.
    """
    reads = [one for one in variables(*second) if dotted(one) == name]
    above = [draft.module.parents[one] for one in reads]
    return any(not isinstance(one, ast.Attribute) or one.attr not in _NUMBERS for one in above)


def _has_graph(draft: Draft, first: Sequence[ast.stmt], name: str) -> bool:
    """Whether the statements `first` may assign the output of a model to the variable `name`.

    Values that end with `.detach()` or `.item()` do not count.
    """
    nodes = [node for statement in first for node in ast.walk(statement)]
    values = [
        node.value
        for node in nodes
        if isinstance(node, ast.Assign) and name in [dotted(target) for target in node.targets]
    ]
    return any(
        not ast.unparse(value).endswith((".detach()", ".item()"))
        and any(_runs_model(draft, part) for part in ast.walk(value))
        for value in values
    )


def _runs_model(draft: Draft, node: ast.AST) -> bool:
    """Whether `node` is a call of an object that the script has made, such as a model."""
    if not isinstance(node, ast.Call):
        return False
    func = node.func
    if isinstance(func, ast.Attribute) and dotted(func.value) == "self":
        return draft.script.callee(node) is None
    return isinstance(func, ast.Name) and bool(draft.script.made_by(func))


def _names(context: type[ast.expr_context], *nodes: ast.AST) -> set[str]:
    """Return the names of the variables that nodes read (`ast.Load`) or assign (`ast.Store`)."""
    found = variables(*nodes, context=context)
    return {one.id for one in found if isinstance(one, ast.Name)}
