"""Removal of code that a conversion leaves unused: branches, functions, names, imports."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from collections.abc import Set as AbstractSet

from lockstep.tools.check.source import Function, dotted
from lockstep.tools.convert.draft import RUN, Draft


def clear(draft: Draft) -> None:
    """Take away what has nothing left to do: empty branches, empty functions, names that nothing reads."""
    count = -1
    while count != len(draft.removed):
        count = len(draft.removed)
        for node in ast.walk(draft.module.tree):
            if isinstance(node, ast.If) and not node.orelse and set(node.body) <= draft.removed:
                draft.remove(node)
            elif isinstance(node, Function) and _empty(draft, node):
                _remove_function(draft, node)
        _unread(draft)


def _empty(draft: Draft, function: Function) -> bool:
    body = [
        one
        for one in function.body
        if not (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant))
    ]
    return bool(body) and set(body) <= draft.removed


def _remove_function(draft: Draft, function: Function) -> None:
    sites = draft.script.project.sites.get(function, [])
    statements = [home.statement(site.call) for home, site in sites if home is draft.module]
    alone = all(
        isinstance(one, ast.Expr) and one.value is site.call
        for one, (_, site) in zip(statements, sites, strict=False)
    )
    if alone and len(statements) == len(sites):
        draft.remove(function)
        for one in statements:
            draft.remove(one)


def _unread(draft: Draft) -> None:
    """Remove assignments of ranks and samplers that nothing reads any more."""
    numbers = re.compile(rf"{RUN}\.(world\.\w+|replicas)")
    ranks = [edit.node for edit in draft.edits if numbers.fullmatch(edit.code)]
    faded = draft.fading | {
        statement
        for node in ranks
        if isinstance(statement := draft.module.parents.get(node), ast.Assign)
    }
    dead, words = set(gone(draft)), _words(draft)
    for statement in faded - draft.removed:
        target = statement.targets[0]
        own = isinstance(target, ast.Name) or dotted(target).startswith("self.")
        if own and _is_unread(draft, dotted(target), dead, words):
            draft.remove(statement)


def _is_unread(
    draft: Draft, name: str, dead: AbstractSet[ast.AST], words: AbstractSet[str]
) -> bool:
    """Whether a name that was read is read no more."""
    return name not in words and all(one in dead for one in draft.mentions(name, draft.module.tree))


def _words(draft: Draft) -> set[str]:
    """Return the names in what is put into the script."""
    return {word for edit in draft.edits for word in re.findall(r"(?<![.\w])\w+", edit.code)}


def gone(draft: Draft) -> Iterator[ast.AST]:
    """Yield the nodes that the edits take out of the script."""
    for statement in draft.removed:
        yield from ast.walk(statement)
    for edit in draft.edits:
        for node in _taken(edit.kind, edit.node, edit.name):
            yield from ast.walk(node)


def _taken(kind: str, node: ast.AST, name: str) -> list[ast.AST]:
    """Return what one edit takes out."""
    match kind, node:
        case "replace", _:
            return [node]
        case "callee" | "inside", ast.Call():
            rest = [*node.args[1:], *node.keywords] if kind == "inside" else []
            return [node.func, *rest]
        case "argument", ast.Call():
            return [one.value for one in node.keywords if one.arg == name]
    return []


def imports(draft: Draft) -> None:
    """Take away imports of what was used, and is no more."""
    dead, words = set(gone(draft)), _words(draft)
    for statement in draft.module.tree.body:
        if not isinstance(statement, ast.Import | ast.ImportFrom):
            continue
        names = {one: (one.asname or one.name).partition(".")[0] for one in statement.names}
        left = [
            one
            for one, name in names.items()
            if not any(draft.mentions(name, draft.module.tree))
            or not _is_unread(draft, name, dead, words)
        ]
        if not left:
            draft.remove(statement)
        elif len(left) < len(names) and statement.lineno == statement.end_lineno:
            statement_code = ast.unparse(_with_names(statement, left))
            draft.edit("statement", statement, statement_code)


def _with_names(statement: ast.Import | ast.ImportFrom, left: list[ast.alias]) -> ast.stmt:
    if isinstance(statement, ast.Import):
        return ast.Import(left)
    return ast.ImportFrom(statement.module, left, statement.level)
