"""State that a loop carries from one iteration into a later loss: iterations become microbatches."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from lockstep.tools.check.source import Function, Loop, dotted
from lockstep.tools.convert import questions
from lockstep.tools.convert.draft import Draft, method_calls, root, sent_backward

#: Methods that put something into a container.
_FILLS = ("append", "extend", "appendleft", "add", "push", "insert", "update", "pop", "enqueue")


@dataclass(frozen=True)
class _Binding:
    """A statement of a loop, what it binds or fills, and what it reads."""

    node: ast.stmt
    names: set[str]
    read: set[str]


def convert(draft: Draft) -> None:
    """Ask about variables that an iteration leaves to the next, and that a loss follows from."""
    for loop in draft.script.step_loops:
        bindings = [_binding(one) for one in _statements(loop.body)]
        changed = _numbers(loop).union(*(one.names for one in bindings))
        early = {
            name: one.node
            for one in reversed(bindings)
            for name in one.read & changed
            if not _bound_before(draft, loop, one.node, name)
        }
        for name in sorted(early.keys() & _used(draft, loop, bindings, early.keys())):
            draft.ask(early[name], questions.CARRIED.format(name))


def stored(node: ast.AST) -> set[str]:
    """Return the variables and attributes that a node binds."""
    return {dotted(one) for one in _variables(node) if not isinstance(one.ctx, ast.Load)} - {""}


def binds(statements: Sequence[ast.stmt], name: str) -> bool:
    """Whether statements bind a name whichever way they take; loops are taken to have an iteration."""
    for one in statements:
        match one:
            case ast.If(body=body, orelse=orelse):
                bound = binds(body, name) and binds(orelse, name)
            case ast.With() | ast.For() | ast.While() | ast.Try():
                bound = name in stored(_head(one)) or binds(one.body, name)
            case _:
                bound = name in stored(one)
        if bound:
            return True
    return False


def _variables(node: ast.AST) -> Iterator[ast.Name | ast.Attribute]:
    for one in ast.walk(node):
        if isinstance(one, ast.Name | ast.Attribute):
            yield one


def _statements(block: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield statements and those inside, in their order."""
    for one in block:
        if isinstance(one, Function | ast.ClassDef):
            continue
        yield one
        for name in ("body", "orelse", "handlers", "finalbody"):
            yield from _statements(getattr(one, name, ()))


def _head(statement: ast.stmt) -> ast.AST:
    """Return a statement without the blocks in it."""
    match statement:
        case ast.If(test=test) | ast.While(test=test):
            return test
        case ast.For(target=target, iter=over):
            return ast.Tuple([target, over])
        case ast.With(items=items):
            return ast.Tuple(
                [part for one in items for part in (one.context_expr, one.optional_vars) if part]
            )
    return ast.Tuple([]) if hasattr(statement, "body") else statement


def _binding(statement: ast.stmt) -> _Binding:
    head = _head(statement)
    read = {dotted(one) for one in _variables(head) if isinstance(one.ctx, ast.Load)} - {""}
    names = stored(head)
    match statement:
        case ast.AugAssign(target=target):
            filled = root(target)
        case ast.Assign(targets=[ast.Subscript() as target]):
            filled = root(target)
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=owner, attr=attr))) if attr in _FILLS:
            filled = owner
        case _:
            filled = None
    own = {dotted(filled)} - {""} if filled is not None else set()
    return _Binding(statement, names | own, read | own)


def _used(
    draft: Draft, loop: Loop, bindings: Sequence[_Binding], early: AbstractSet[str]
) -> set[str]:
    """Return what the losses of a loop follow from, in an iteration and by `early` ones in later ones."""
    script, module = draft.script, draft.module
    sent: list[ast.AST] = [sent_backward(call) for call in method_calls(loop, "backward")]
    for call in ast.walk(loop):
        called = script.callee(call) if isinstance(call, ast.Call) else None
        if called is not None and script.level(called.body) is not None:
            sent.append(call)
    used = {dotted(one) for node in sent for one in _variables(node)}
    last = max((getattr(one, "lineno", 0) for one in sent), default=0)
    count = 0
    while count != len(used):
        count = len(used)
        for one in bindings:
            if one.names & used and (one.node.lineno <= last or one.names & early):
                tests = [
                    n.test
                    for n in module.above(one.node)
                    if isinstance(n, ast.If) and loop in module.above(n)
                ]
                used |= one.read | {dotted(part) for test in tests for part in _variables(test)}
    return used


def _numbers(loop: Loop) -> set[str]:
    """Return the name that counts a loop's iterations."""
    match loop:
        case ast.For(target=ast.Tuple(elts=[ast.Name(id=name), *_]), iter=ast.Call(func=func)):
            return {name} if dotted(func) == "enumerate" else set()
    return set()


def _bound_before(draft: Draft, loop: Loop, node: ast.stmt, name: str) -> bool:
    """Whether an iteration has certainly bound a name when it comes to a statement."""
    current: ast.AST = node
    while current is not loop:
        above = draft.module.parents[current]
        for block in (getattr(above, one, []) for one in ("body", "orelse", "finalbody")):
            if current in block and binds(block[: block.index(current)], name):
                return True
        own = stored(_head(above)) if isinstance(above, ast.stmt) else set()
        if name in own - (_numbers(loop) if above is loop else set()):
            return True
        current = above
    return False
