"""Find variables that carry a value from one iteration of a training loop into a later loss.

The user is asked about them, since the iterations of a converted loop are microbatches.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from lockstep.tools.check.assignments import assigned_before, counter, head
from lockstep.tools.check.syntax import (
    Loop,
    dotted,
    method_calls,
    root,
    statements,
    stored,
    variables,
)
from lockstep.tools.convert import questions
from lockstep.tools.convert.draft import Draft, sent_backward

#: Methods that change the elements of a container.
_FILLS = ("append", "extend", "appendleft", "add", "push", "insert", "update", "pop", "enqueue")


@dataclass(frozen=True)
class _Binding:
    """A statement of a loop, with the names that it assigns or changes and the names that it reads."""

    node: ast.stmt
    names: set[str]  # assigned, or of containers whose elements change
    read: set[str]


def convert(draft: Draft) -> None:
    """Add questions to `draft` about variables whose value in one iteration enters a later loss."""
    for loop in draft.script.step_loops:
        bindings = [_binding(one) for one in statements(loop.body)]
        changed = counter(loop).union(*(binding.names for binding in bindings))
        early = {
            name: binding.node
            for binding in reversed(bindings)
            for name in binding.read & changed
            if not assigned_before(draft.module, loop, binding.node, name)
        }
        for name in sorted(early.keys() & _used(draft, loop, bindings, early.keys())):
            draft.ask(early[name], questions.CARRIED.format(name))


def _binding(statement: ast.stmt) -> _Binding:
    own_part = head(statement)
    filled = None
    match statement:
        case ast.AugAssign(target=target) | ast.Assign(targets=[ast.Subscript() as target]):
            filled = root(target)
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=owner, attr=attr))) if attr in _FILLS:
            filled = owner
    own = {dotted(filled)} if filled is not None else set()
    read = {dotted(variable) for variable in variables(own_part, context=ast.Load)}
    return _Binding(statement, (stored(own_part) | own) - {""}, (read | own) - {""})


def _used(
    draft: Draft, loop: Loop, bindings: Sequence[_Binding], early: AbstractSet[str]
) -> set[str]:
    """Return the variables on which a loop's losses depend, in the same iteration or in a later one.

    `bindings` are the statements of the loop that assign. Only the variables in `early` keep a value from
    one iteration to the next.
    """
    sent: list[ast.AST] = [sent_backward(call) for call in method_calls(loop, "backward")]
    sent += [node for node in ast.walk(loop) if draft.script.runs_backward(node)]
    used = {dotted(variable) for variable in variables(*sent)}
    last = max((getattr(one, "lineno", 0) for one in sent), default=0)
    count = 0
    while count != len(used):
        count = len(used)
        for binding in bindings:
            if binding.names & used and (binding.node.lineno <= last or binding.names & early):
                tests = draft.tests(binding.node, loop)
                used |= binding.read | {dotted(part) for part in variables(*tests)}
    return used
