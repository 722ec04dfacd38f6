"""The transformer that makes a file's edits; apart from `fix.py`, since it needs LibCST to be defined."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence

import libcst as cst
from libcst.metadata import PositionProvider

from lockstep.tools.check.fix import PART, Edit, Place

#: Begins the text of the statement that stands where a `with` is to begin.
_WITH = "lockstep with: "
#: Comments for tools, about the line that they stand on.
_FOR_TOOLS = re.compile(r"#\s*(noqa|type:|pragma|pylint|fmt|isort|lockstep)", re.IGNORECASE)
_Statement = cst.BaseStatement | cst.FlattenSentinel[cst.BaseStatement]


class Editor(cst.CSTTransformer):
    """Makes edits at the places of expressions and statements.

    Args:
        expressions: edits of expressions, by line and column.
        statements: those of statements.
    """

    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(
        self,
        expressions: Mapping[Place, Sequence[Edit]],
        statements: Mapping[Place, Sequence[Edit]],
    ) -> None:
        super().__init__()
        self._expressions, self._statements = expressions, statements
        self._left: list[cst.EmptyLine] = []
        self._above: dict[cst.CSTNode, list[cst.EmptyLine]] = {}

    def _at(self, node: cst.CSTNode) -> Place:
        start = self.get_metadata(PositionProvider, node).start
        return start.line, start.column

    def on_visit(self, node: cst.CSTNode) -> bool:
        """Give the empty lines and comments of a statement that was deleted to the next one."""
        if isinstance(node, cst.SimpleStatementLine | cst.BaseCompoundStatement) and self._left:
            apart = bool(node.leading_lines) and node.leading_lines[0].comment is None
            if not apart or any(line.comment for line in self._left):
                self._above[node] = self._left
            self._left = []
        return super().on_visit(node)

    def on_leave(self, original_node: cst.CSTNode, updated_node: cst.CSTNode) -> object:  # type: ignore[override]
        """Edit a node that is left."""
        if isinstance(original_node, cst.BaseExpression):
            return self._expression(original_node, updated_node)
        if isinstance(original_node, cst.SimpleStatementLine | cst.BaseCompoundStatement):
            assert isinstance(updated_node, cst.BaseStatement)
            return self._line(original_node, updated_node)
        if isinstance(updated_node, cst.SimpleStatementSuite):  # `if test: a = 1`
            assert isinstance(original_node, cst.SimpleStatementSuite)
            body = self._apart(original_node, updated_node)
            nothing = cst.SimpleStatementLine([cst.Pass()])
            return updated_node if body is None else cst.IndentedBlock(body or [nothing])
        if isinstance(updated_node, cst.IndentedBlock | cst.Module):
            left, self._left = [line for line in self._left if line.comment], []
            footer = [*left, *updated_node.footer]
            return _under_with(updated_node.with_changes(footer=footer))
        return super().on_leave(original_node, updated_node)

    def _expression(self, original: cst.BaseExpression, updated: cst.CSTNode) -> cst.CSTNode:
        for edit in self._expressions.get(self._at(original), ()):
            if not _whole(original, edit):
                continue
            if edit.kind == "argument":
                assert isinstance(updated, cst.Call)
                updated = _with_argument(updated, edit)
            elif edit.kind == "replace":
                updated = cst.parse_expression(edit.code)
            elif edit.kind in _AROUND:
                updated = _AROUND[edit.kind](updated, edit.code)
        return updated

    def _line(
        self,
        original: cst.SimpleStatementLine | cst.BaseCompoundStatement,
        updated: cst.BaseStatement,
    ) -> _Statement | cst.RemovalSentinel:
        if original in self._above:
            updated = _with_lines(updated, [*self._above[original], *_lines(updated)])
        if isinstance(updated, cst.SimpleStatementLine) and len(updated.body) > 1:  # `a = 1; b = 2`
            assert isinstance(original, cst.SimpleStatementLine)
            body = self._apart(original, updated)
            if body is None:
                return updated
            return cst.FlattenSentinel(body) if body else cst.RemoveFromParent()
        return self._statement(original, updated)

    def _apart(
        self,
        original: cst.SimpleStatementLine | cst.SimpleStatementSuite,
        updated: cst.SimpleStatementLine | cst.SimpleStatementSuite,
    ) -> list[cst.BaseStatement] | None:
        """Return statements of one line, edited, each on a line of its own; `None` where no edit is."""
        if not any(self._at(one) in self._statements for one in original.body):
            return None
        plain = cst.MaybeSentinel.DEFAULT
        lines = [
            cst.SimpleStatementLine([one.with_changes(semicolon=plain)]) for one in updated.body
        ]
        if isinstance(updated, cst.SimpleStatementLine):
            lines[0] = lines[0].with_changes(leading_lines=updated.leading_lines)
        lines[-1] = lines[-1].with_changes(trailing_whitespace=updated.trailing_whitespace)
        made: list[cst.BaseStatement] = []
        for one, line in zip(original.body, lines, strict=True):
            left, self._left = self._left, []
            edited = self._statement(one, _with_lines(line, [*left, *line.leading_lines]))
            if isinstance(edited, cst.BaseStatement):
                made.append(edited)
            elif isinstance(edited, cst.FlattenSentinel):
                made += edited
        return made

    def _statement(
        self, original: cst.CSTNode, updated: cst.BaseStatement
    ) -> _Statement | cst.RemovalSentinel:
        before: list[cst.BaseStatement] = []
        after: list[cst.BaseStatement] = []
        body: list[cst.BaseStatement] | None = None
        for edit in self._statements.get(self._at(original), ()):
            if edit.kind == "delete":
                body = []
                self._left = [*_lines(updated), *_beside(updated)]
            elif edit.kind == "splice" and isinstance(updated, cst.If):
                body = _spliced(updated)
                self._left = list(getattr(updated.body, "footer", ()))
            elif edit.kind == "with":
                before.append(_marker(edit.code))
            elif edit.kind == "before":
                made = cst.parse_statement(edit.code)
                before.append(_with_lines(made, _empty_lines(updated)))
                updated = _with_lines(updated, _lines(updated)[len(_empty_lines(updated)) :])
            elif edit.kind == "after":
                after.append(cst.parse_statement(edit.code))
            else:
                updated = _changed(updated, edit)
        if body is None and not before and not after:
            return updated
        rest = [updated] if body is None else body
        return (
            cst.FlattenSentinel([*before, *rest, *after])
            if before or rest or after
            else cst.RemoveFromParent()
        )


def _changed(statement: cst.BaseStatement, edit: Edit) -> cst.BaseStatement:
    """Return a statement after an edit that leaves one statement in its place."""
    match edit.kind, statement:
        case "comment", _:
            line = cst.EmptyLine(comment=cst.Comment(edit.code))
            return _with_lines(statement, [*_lines(statement), line])
        case "parameter", cst.FunctionDef():
            statement = _with_parameter(statement, edit.code)
        case "guard", cst.SimpleStatementLine():
            made = cst.parse_statement(f"if {edit.code}:\n    pass\n")
            inside = cst.IndentedBlock(body=[statement.with_changes(leading_lines=[])])
            statement = made.with_changes(body=inside, leading_lines=statement.leading_lines)
        case "passes", cst.For():
            statement = _passes(statement, edit.code)
        case "statement", cst.SimpleStatementLine():
            made = cst.parse_statement(edit.code)
            assert isinstance(made, cst.SimpleStatementLine)
            statement = statement.with_changes(body=made.body)
        case "first", cst.For() | cst.While() | cst.FunctionDef():
            statement = _with_first(statement, cst.parse_statement(edit.code))
    return statement


def _with_first(
    statement: cst.For | cst.While | cst.FunctionDef, made: cst.BaseStatement
) -> cst.BaseStatement:
    block = statement.body
    assert isinstance(block, cst.IndentedBlock)
    text = isinstance(statement, cst.FunctionDef) and statement.get_docstring() is not None
    body = [*block.body[:text], made, *block.body[text:]]
    return statement.with_changes(body=block.with_changes(body=body))


def _passes(loop: cst.For, code: str) -> cst.BaseStatement:
    """Return the loops of `code`, with the parts of a loop's body where their markers stand in it."""
    block = loop.body
    assert isinstance(block, cst.IndentedBlock)
    parts: list[list[cst.BaseStatement]] = [[]]
    for one in block.body:
        if _text(one) == PART:
            parts.append([])
        else:
            assert isinstance(one, cst.BaseStatement)
            parts[-1].append(one)
    made = cst.parse_statement(code).visit(_Parts(parts))
    assert isinstance(made, cst.BaseStatement)
    assert isinstance(made, cst.For)
    assert isinstance(made.body, cst.IndentedBlock)
    body = made.body.with_changes(header=block.header, footer=block.footer)
    return _with_lines(made.with_changes(body=body), _lines(loop))


class _Parts(cst.CSTTransformer):
    def __init__(self, parts: list[list[cst.BaseStatement]]) -> None:
        super().__init__()
        self._left = iter(parts)

    def leave_SimpleStatementLine(  # noqa: N802
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine | cst.FlattenSentinel[cst.BaseStatement]:
        """Put the next part in the place of a marker."""
        return (
            cst.FlattenSentinel(next(self._left)) if _text(updated_node) == PART else updated_node
        )


def _text(statement: cst.CSTNode) -> str:
    """Return the text that is a statement of its own, or an empty one."""
    match statement:
        case cst.SimpleStatementLine(body=[cst.Expr(value=cst.SimpleString() as text)]):
            return str(text.evaluated_value)
    return ""


def _lines(statement: cst.BaseStatement) -> list[cst.EmptyLine]:
    return list(getattr(statement, "leading_lines", ()))


def _with_lines(statement: cst.BaseStatement, lines: Sequence[cst.EmptyLine]) -> cst.BaseStatement:
    return statement.with_changes(leading_lines=list(lines))


def _empty_lines(statement: cst.BaseStatement) -> list[cst.EmptyLine]:
    """Return the empty lines above a statement, before any comment."""
    return list(itertools.takewhile(lambda line: line.comment is None, _lines(statement)))


def _beside(statement: cst.BaseStatement) -> list[cst.EmptyLine]:
    """Return the comment behind a statement, or behind the head of one with a block, as a line."""
    block = getattr(statement, "body", None)
    behind = block.header if isinstance(block, cst.IndentedBlock) else None
    if isinstance(statement, cst.SimpleStatementLine):
        behind = statement.trailing_whitespace
    comment = behind.comment if behind is not None else None
    if comment is None or _FOR_TOOLS.match(comment.value):
        return []
    return [cst.EmptyLine(comment=comment)]


def _spliced(node: cst.If) -> list[cst.BaseStatement]:
    """Return the body of an `if`; what stands above it stands above the first statement."""
    block = node.body
    if isinstance(block, cst.SimpleStatementSuite):
        made = cst.SimpleStatementLine(block.body, trailing_whitespace=block.trailing_whitespace)
        return [made.with_changes(leading_lines=node.leading_lines)]
    assert isinstance(block, cst.IndentedBlock)
    first, *rest = block.body
    return [_with_lines(first, [*node.leading_lines, *_beside(node), *_lines(first)]), *rest]


def _marker(code: str) -> cst.SimpleStatementLine:
    """Return a statement that stands where a `with` begins, until its block is left."""
    return cst.SimpleStatementLine([cst.Expr(cst.SimpleString(repr(_WITH + code)))])


def _under_with(block: cst.IndentedBlock | cst.Module) -> cst.IndentedBlock | cst.Module:
    """Put what follows a marker in a block under its `with`."""
    for index, one in enumerate(block.body):
        code = _text(one)
        if code.startswith(_WITH):
            inside = list(block.body[index + 1 :])
            lines = _empty_lines(inside[0])
            inside[0] = _with_lines(inside[0], _lines(inside[0])[len(lines) :])
            made = cst.parse_statement(f"with {code.removeprefix(_WITH)}:\n    pass\n")
            made = made.with_changes(body=cst.IndentedBlock(inside), leading_lines=lines)
            return block.with_changes(body=[*block.body[:index], made.visit(_NoIndent())])
    return block


class _NoIndent(cst.CSTTransformer):
    """Leaves empty lines empty where statements come to stand deeper."""

    def leave_EmptyLine(  # noqa: N802
        self, original_node: cst.EmptyLine, updated_node: cst.EmptyLine
    ) -> cst.EmptyLine:
        """Take the indentation off a line without a comment."""
        return updated_node if updated_node.comment else updated_node.with_changes(indent=False)


def _with_parameter(function: cst.FunctionDef, code: str) -> cst.FunctionDef:
    params = function.params
    bound = bool(params.params) and params.params[0].name.value in ("self", "cls")
    if not code:
        return function.with_changes(params=params.with_changes(params=params.params[1:]))
    comma: cst.Comma = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
    if bound and isinstance(params.params[0].comma, cst.Comma):
        comma = params.params[0].comma  # with its line end, where each parameter has a line
    last = len(params.params) == bound and not (
        params.kwonly_params or params.star_kwarg or isinstance(params.star_arg, cst.Param)
    )
    made = cst.Param(cst.Name(code), comma=cst.MaybeSentinel.DEFAULT if last else comma)
    head = [one.with_changes(comma=comma) for one in params.params[:bound]]
    changed = params.with_changes(params=[*head, made, *params.params[bound:]])
    return function.with_changes(params=changed)


def _call(code: str, *values: cst.BaseExpression) -> cst.Call:
    return cst.Call(cst.parse_expression(code), [cst.Arg(value) for value in values])


def _wrap(node: cst.CSTNode, code: str) -> cst.CSTNode:
    assert isinstance(node, cst.BaseExpression)
    return _call(code, node)


def _callee(node: cst.CSTNode, code: str) -> cst.CSTNode:
    assert isinstance(node, cst.Call)
    return node.with_changes(func=cst.parse_expression(code))


def _given(node: cst.CSTNode, code: str) -> cst.CSTNode:
    assert isinstance(node, cst.Call)
    comma = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
    made = cst.Arg(
        cst.parse_expression(code), comma=comma if node.args else cst.MaybeSentinel.DEFAULT
    )
    return node.with_changes(args=[made, *node.args])


def _inside(node: cst.CSTNode, code: str) -> cst.CSTNode:
    if isinstance(node, cst.Call):
        return node.args[0].value
    assert isinstance(node, cst.Attribute)
    return node.value


def _owner(node: cst.CSTNode, code: str) -> cst.CSTNode:
    assert isinstance(node, cst.Call)
    assert isinstance(node.func, cst.Attribute)
    value = node.func.value.with_changes(lpar=[], rpar=[])
    return _call(code, value)


_AROUND = {"wrap": _wrap, "callee": _callee, "given": _given, "inside": _inside, "owner": _owner}


def _whole(node: cst.BaseExpression, edit: Edit) -> bool:
    """Whether a node is the one of an edit: `a.b(c)` and `a` begin at one place."""
    import ast

    code = cst.Module([]).code_for_node(node)
    try:
        tree = ast.parse(f"({code}\n)", mode="eval").body
    except SyntaxError:
        return False
    return ast.dump(tree) == ast.dump(edit.node)


def _with_argument(call: cst.Call, edit: Edit) -> cst.Call:
    kept = [arg for arg in call.args if arg.keyword is None or arg.keyword.value != edit.name]
    if not edit.code:
        if kept and len(kept) < len(call.args) and call.args[-1] not in kept:
            last = call.args[-1]
            kept[-1] = kept[-1].with_changes(
                comma=last.comma, whitespace_after_arg=last.whitespace_after_arg
            )
        return call.with_changes(args=kept)
    value = cst.parse_expression(edit.code)
    equal = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
    made = cst.Arg(value, keyword=cst.Name(edit.name), equal=equal)
    if len(kept) < len(call.args):  # in the place of what was there
        args = [
            arg.with_changes(value=value) if arg.keyword and arg.keyword.value == edit.name else arg
            for arg in call.args
        ]
        return call.with_changes(args=args)
    if kept and isinstance(kept[-1].comma, cst.Comma):
        made = made.with_changes(comma=kept[-1].comma)
    comma = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
    head = [*kept[:-1], kept[-1].with_changes(comma=comma)] if kept else []
    return call.with_changes(args=[*head, made])
