"""Several updates per batch, as of a GAN: one pass over the microbatches for each (`run.batches`)."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from lockstep.tools.check.fix import PART
from lockstep.tools.check.source import Loop, dotted
from lockstep.tools.convert import carried, questions
from lockstep.tools.convert.draft import RUN, Draft, calls, sent_backward

#: What reads a tensor without its graph.
_NUMBERS = ("detach", "item", "data", "shape", "size")


def convert(draft: Draft) -> None:
    """Give each update of a batch a pass of its own, and add up the losses of one update."""
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
    """Return where in a body the work for each update begins: after a step, if another backward follows."""
    starts, stepped, sent = [0], False, False
    for index, statement in enumerate(body):
        sends = calls(statement, "backward") > 0
        if sends and stepped:
            starts.append(1 + max(n for n in range(index) if calls(body[n], "step")))
            stepped = False
        sent = sent or sends
        stepped = stepped or (sent and calls(statement, "step") > 0)
    return starts


def _one_backward(draft: Draft, part: Sequence[ast.stmt]) -> None:
    """Send the sum of losses backward where each was sent by itself."""
    sent = [
        (one, one.value)
        for one in part
        if isinstance(one, ast.Expr) and isinstance(one.value, ast.Call) and is_backward(one.value)
    ]
    if len(sent) < 2:
        return
    losses = [sent_backward(call) for _, call in sent]
    inner = {node for one in losses for node in ast.walk(one)}
    if any(edit.node in inner for edit in draft.edits) or not _may_join(part, sent):
        draft.ask(sent[0][0], questions.BACKWARD)
        return
    *earlier, (_, last) = sent
    for statement, call in earlier:
        draft.edits = [edit for edit in draft.edits if edit.node is not call]
        draft.remove(statement)
    draft.edits = [edit for edit in draft.edits if edit.node is not last]
    total = " + ".join(draft.operand(one) for one in losses)
    draft.edit("replace", last, f"{RUN}.backward({total})")


def _may_join(part: Sequence[ast.stmt], sent: Sequence[tuple[ast.stmt, ast.Call]]) -> bool:
    """Whether losses may be added up: without gradients of their own, and not bound again in between."""
    if any(
        call.args or {word.arg for word in call.keywords} - {"retain_graph"} for _, call in sent
    ):
        return False
    first, last = part.index(sent[0][0]), part.index(sent[-1][0])
    for statement, _ in sent[:-1]:
        read = {one.id for one in _names(statement)}
        after = part[max(first, part.index(statement)) : last]
        stored = {n.id for one in after for n in _names(one) if isinstance(n.ctx, ast.Store)}
        if read & stored:
            return False
    return True


def is_backward(call: ast.Call) -> bool:
    """Whether a call is one of a method `backward`."""
    return isinstance(call.func, ast.Attribute) and call.func.attr == "backward"


def _two_passes(draft: Draft, loop: Loop, second: int) -> None:
    """Write a loop over batches, with a pass for each update; what the second needs is kept."""
    taken, first = _taken(loop), loop.body[:second]
    needed = _needed(first, loop.body[second:])
    undecided = _keeps_attributes(first, loop.body[second:]) or any(
        not carried.binds(first, name)
        or (_goes_through(draft, loop.body[second:], name) and _has_graph(draft, first, name))
        for name in needed
    )
    if taken is None or not isinstance(loop, ast.For) or undecided:
        draft.ask(loop, questions.UPDATES)
        return
    source = draft.module.source
    loader, number, target = taken
    names = {one.id for one in ast.walk(draft.module.tree) if isinstance(one, ast.Name)}
    batch, kept = (
        ("batch" if "batch" not in names else "global_batch"),
        ("kept" if "kept" not in names else "kept_values"),
    )
    head = (
        f"for {source(number)}, {batch} in enumerate({RUN}.batches({source(loader)})):"
        if number
        else f"for {batch} in {RUN}.batches({source(loader)}):"
    )
    item = source(target)
    lines = [head]
    if needed:
        lines.append(f"    {kept} = []  # of each microbatch, for the second pass")
    lines += [f"    for {item} in {batch}:", f"        {PART!r}"]
    if needed:
        values = f"({', '.join(needed)}{',' * (len(needed) == 1)})"
        lines.append(f"        {kept}.append({values})")
        inner = f"({item})" if isinstance(target, ast.Tuple) and not item.startswith("(") else item
        lines.append(f"    for {inner}, {values} in zip({batch}, {kept}):")
    else:
        lines.append(f"    for {item} in {batch}:")
    lines.append(f"        {PART!r}")
    draft.edit("passes", loop, "\n".join(lines) + "\n")
    draft.edit("before", loop.body[second], repr(PART))


def _taken(loop: Loop) -> tuple[ast.expr, ast.expr | None, ast.expr] | None:
    """Return the loader of a loop, the number of a batch if it is counted, and what a batch is called."""
    if not isinstance(loop, ast.For):
        return None
    match loop.iter, loop.target:
        case ast.Call(func=ast.Name(id="enumerate"), args=[loader, *_]), ast.Tuple(
            elts=[number, target]
        ):
            return (loader, number, target) if dotted(loader) else None
        case (ast.Name() | ast.Attribute()) as loader, target:
            return loader, None, target
    return None


def _needed(first: Sequence[ast.stmt], second: Sequence[ast.stmt]) -> list[str]:
    """Return the names that the first statements bind and the second ones read before they bind them."""
    bound = {
        name.id
        for one in first
        for name in ast.walk(one)
        if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
    }
    found: dict[str, None] = {}
    again: set[str] = set()
    for statement in second:
        names = list(_names(statement))
        found.update(
            {
                one.id: None
                for one in names
                if isinstance(one.ctx, ast.Load) and one.id in bound - again
            }
        )
        again |= {one.id for one in names if isinstance(one.ctx, ast.Store)}
    return list(found)


def _keeps_attributes(first: Sequence[ast.stmt], second: Sequence[ast.stmt]) -> bool:
    """Whether the second statements read an attribute that the first ones set."""
    set_, read = (
        {
            dotted(node)
            for one in part
            for node in ast.walk(one)
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, kind)
        }
        for part, kind in ((first, ast.Store), (second, ast.Load))
    )
    return bool(set_ & read)


def _goes_through(draft: Draft, second: Sequence[ast.stmt], name: str) -> bool:
    """Whether statements read a value otherwise than as numbers."""
    parents = draft.module.parents
    reads = [one for part in second for one in _names(part) if one.id == name]
    return any(
        not (isinstance(above := parents.get(one), ast.Attribute) and above.attr in _NUMBERS)
        for one in reads
    )


def _has_graph(draft: Draft, first: Sequence[ast.stmt], name: str) -> bool:
    """Whether a model may have computed a value: the second update would go through its graph."""
    for statement in first:
        for node in ast.walk(statement):
            if isinstance(node, ast.Assign) and any(
                isinstance(one, ast.Name) and one.id == name for one in node.targets
            ):
                detached = ast.unparse(node.value).endswith((".detach()", ".item()"))
                if not detached and any(_runs_model(draft, one) for one in ast.walk(node.value)):
                    return True
    return False


def _runs_model(draft: Draft, node: ast.AST) -> bool:
    """Whether a node calls something that the script has made, and no function of it."""
    if not isinstance(node, ast.Call):
        return False
    root = node.func
    if isinstance(root, ast.Attribute) and dotted(root.value) == "self":
        return draft.script.callee(node) is None
    return isinstance(root, ast.Name) and any(
        isinstance(one, ast.Call) for one in draft.script.sources(root)
    )


def _names(statement: ast.stmt) -> Iterator[ast.Name]:
    for node in ast.walk(statement):
        if isinstance(node, ast.Name):
            yield node
