"""Remove code that a conversion leaves unused: branches, functions, names, imports."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterator

from lockstep.tools.check.syntax import Function, dotted, reads
from lockstep.tools.convert.draft import RUN, Draft


def clear(draft: Draft) -> None:
    """Mark empty `if` branches, empty functions and unread assignments in the draft as removed.

    A branch or function is empty if other edits remove all of its statements.
    """
    count = -1
    while count != len(draft.removed):
        count = len(draft.removed)
        for node in ast.walk(draft.module.tree):
            if isinstance(node, ast.If) and not node.orelse and set(node.body) <= draft.removed:
                draft.removed.add(node)
            elif isinstance(node, Function):
                _remove_empty(draft, node)
        _unread(draft)


def _remove_empty(draft: Draft, function: Function) -> None:
    """Mark a function and all calls of it as removed, if all statements of its body are removed.

    The function stays if some call of it is not a statement of its own.
    """
    body = {
        statement
        for statement in function.body
        if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))
    }
    calls = [draft.alone(call) for _, call in draft.script.callers(function)]
    if body and body <= draft.removed and None not in calls:
        draft.removed.update([function, *(call for call in calls if call is not None)])


def _unread(draft: Draft) -> None:
    """Mark assignments such as `rank = …` and `sampler = …` as removed if no remaining code reads them."""
    numbers = re.compile(rf"{RUN}\.(world\.\w+|replicas)")
    ranks = [edit.node for edit in draft.edits if numbers.fullmatch(edit.code)]
    parents = {draft.module.parents.get(node) for node in ranks}
    assignments = draft.droppable | {one for one in parents if isinstance(one, ast.Assign)}
    dead, words = set(gone(draft)), _words(draft)
    for statement in assignments - draft.removed:
        target = statement.targets[0]
        own = isinstance(target, ast.Name) or dotted(target).startswith("self.")
        if own and _is_unread(draft, dotted(target), dead, words):
            draft.removed.add(statement)


def _is_unread(draft: Draft, name: str, dead: set[ast.AST], words: set[str]) -> bool:
    """Whether no code of the converted script reads the variable `name`.

    `dead` are the syntax nodes that edits remove, `words` the names in the code that edits add.
    """
    return name not in words and dead.issuperset(reads(name, draft.module.tree))


def _words(draft: Draft) -> set[str]:
    """Return the names in the code that edits add to the script."""
    return {word for edit in draft.edits for word in re.findall(r"(?<![.\w])\w+", edit.code)}


def gone(draft: Draft) -> Iterator[ast.AST]:
    """Yield the syntax nodes of the script that the draft's edits delete or replace."""
    for statement in draft.removed:
        yield from ast.walk(statement)
    for edit in draft.edits:
        taken: list[ast.AST] = []
        match edit.kind, edit.node:
            case "replace", node:
                taken = [node]
            case "unwrap", ast.Call(func=func, args=[_, *others], keywords=keywords):
                taken = [func, *others, *keywords]
            case "argument", ast.Call(keywords=keywords):
                taken = [word.value for word in keywords if word.arg == edit.name]
        for part in taken:
            yield from ast.walk(part)


def imports(draft: Draft) -> None:
    """Remove the imports of names that the converted script does not use."""
    dead, words = set(gone(draft)), _words(draft)
    for statement in draft.module.tree.body:
        if not isinstance(statement, ast.Import | ast.ImportFrom):
            continue
        names = {one: (one.asname or one.name).partition(".")[0] for one in statement.names}
        left = [
            one
            for one, name in names.items()
            if not reads(name, draft.module.tree) or not _is_unread(draft, name, dead, words)
        ]
        if not left:
            draft.removed.add(statement)
        elif len(left) < len(names) and statement.lineno == statement.end_lineno:
            shorter = copy.copy(statement)
            shorter.names = left
            draft.edit("statement", statement, ast.unparse(shorter))
