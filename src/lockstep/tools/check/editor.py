"""Apply edits to a script with LibCST.

This is a module of its own so that LibCST is imported only for edits.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

import libcst as cst
import libcst.matchers as m
from libcst.metadata import MetadataWrapper, PositionProvider

from lockstep.errors import UsageError
from lockstep.tools.check.fix import PART, Edit
from lockstep.tools.check.source import Module

#: Begins the text of a marker: a string statement that is put where a `with` block is to begin.
_WITH = "lockstep with: "
#: Comments for tools, such as `noqa`, which concern the line on which they are.
_FOR_TOOLS = re.compile(r"#\s*(noqa|type:|pragma|pylint|fmt|isort|lockstep)", re.IGNORECASE)
_COMMA = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
_Statement = cst.BaseStatement | cst.FlattenSentinel[cst.BaseStatement]
#: Line, and column in characters.
_Position = tuple[int, int]


def apply(module: Module, edits: Iterable[Edit]) -> str:
    """Return the source of `module` after `edits`.

    Raises:
        UsageError: if LibCST cannot parse the module, although Python can.
    """
    try:
        tree = MetadataWrapper(cst.parse_module(module.text), unsafe_skip_copy=True)
    except cst.ParserSyntaxError as error:
        where = error.message.partition(": expected")[0].removeprefix("parser error: ")
        raise UsageError(
            f"{module.path}: LibCST, which edits scripts, cannot parse what Python can: {where}",
            hint="write the line in a different way: `x: int = 1` and not `(x): int = 1`, for example",
        ) from None
    return tree.visit(Editor(module, edits)).code


class Editor(cst.CSTTransformer):
    """LibCST transformer that applies edits to the syntax tree of a script.

    Edited expressions are found by their start and end positions, edited statements by their start.
    """

    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self, module: Module, edits: Iterable[Edit]) -> None:
        super().__init__()
        self._expressions: dict[tuple[_Position, _Position], list[Edit]] = defaultdict(list)
        self._statements: dict[_Position, list[Edit]] = defaultdict(list)
        self._left: list[cst.EmptyLine] = []
        self._above: dict[cst.CSTNode, list[cst.EmptyLine]] = {}
        for edit in dict.fromkeys(edits):
            start, end = module.positions(edit.node)
            if isinstance(edit.node, ast.expr):
                self._expressions[start, end].append(edit)
            else:
                self._statements[start].append(edit)

    def _start(self, node: cst.CSTNode) -> _Position:
        start = self.get_metadata(PositionProvider, node).start
        return start.line, start.column

    def on_visit(self, node: cst.CSTNode) -> bool:
        """Move the comments of a deleted statement above `node`, if `node` follows that statement.

        Return whether to visit the children of `node`.
        """
        if isinstance(node, cst.SimpleStatementLine | cst.BaseCompoundStatement) and self._left:
            apart = bool(node.leading_lines) and node.leading_lines[0].comment is None
            if not apart or any(line.comment for line in self._left):
                self._above[node] = self._left
            self._left = []
        return super().on_visit(node)

    def on_leave(self, original_node: cst.CSTNode, updated_node: cst.CSTNode) -> object:  # type: ignore[override]
        """Return `updated_node` with all edits of `original_node` applied."""
        match original_node, updated_node:
            case cst.BaseExpression(), _:
                place = self.get_metadata(PositionProvider, original_node)
                end = place.end.line, place.end.column
                for edit in self._expressions.get((self._start(original_node), end), ()):
                    updated_node = _changed_expression(updated_node, edit)
                return updated_node
            case cst.SimpleStatementLine() | cst.BaseCompoundStatement(), cst.BaseStatement():
                return self._line(original_node, updated_node)
            case cst.SimpleStatementSuite(), cst.SimpleStatementSuite():  # `if test: a = 1`
                body = self._apart(original_node, updated_node)
                nothing = cst.SimpleStatementLine([cst.Pass()])
                return updated_node if body is None else cst.IndentedBlock(body or [nothing])
            case _, cst.IndentedBlock() | cst.Module():
                left, self._left = [line for line in self._left if line.comment], []
                footer = [*left, *updated_node.footer]
                return _under_with(updated_node.with_changes(footer=footer))
        return super().on_leave(original_node, updated_node)

    def _line(
        self,
        original: cst.SimpleStatementLine | cst.BaseCompoundStatement,
        updated: cst.BaseStatement,
    ) -> _Statement | cst.RemovalSentinel:
        if original in self._above:
            updated = _with_lines(updated, [*self._above[original], *_lines(updated)])
        match original, updated:
            case cst.SimpleStatementLine(), cst.SimpleStatementLine(body=[_, _, *_]):
                # `a = 1; b = 2`
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
        """Split a line such as `a = 1; b = 2` into edited statements, each on a line of its own.

        `original`: the line before any edit. `updated`: the same line after edits inside of its statements.
        Return `None` if no statement of the line has an edit.
        """
        if not any(self._start(small) in self._statements for small in original.body):
            return None
        plain = cst.MaybeSentinel.DEFAULT
        lines = [
            cst.SimpleStatementLine([small.with_changes(semicolon=plain)]) for small in updated.body
        ]
        if isinstance(updated, cst.SimpleStatementLine):
            lines[0] = lines[0].with_changes(leading_lines=updated.leading_lines)
        lines[-1] = lines[-1].with_changes(trailing_whitespace=updated.trailing_whitespace)
        made: list[cst.BaseStatement] = []
        for small, line in zip(original.body, lines, strict=True):
            left, self._left = self._left, []
            edited = self._statement(small, _with_lines(line, [*left, *line.leading_lines]))
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
        for edit in self._statements.get(self._start(original), ()):
            match edit.kind, updated:
                case "delete", _:
                    body = []
                    self._left = [*_lines(updated), *_beside(updated)]
                case "splice", cst.If():
                    body = _spliced(updated)
                    self._left = list(getattr(updated.body, "footer", ()))
                case "with", _:
                    # A marker, until `on_leave` of the block puts the block's end under the `with`.
                    text = cst.SimpleString(repr(_WITH + edit.code))
                    before.append(cst.SimpleStatementLine([cst.Expr(text)]))
                case "before", _:
                    empty, rest = _empty_lines(updated)
                    before.append(_with_lines(cst.parse_statement(edit.code), empty))
                    updated = _with_lines(updated, rest)
                case "after", _:
                    after.append(cst.parse_statement(edit.code))
                case _:
                    updated = _changed(updated, edit)
        made = [*before, *([updated] if body is None else body), *after]
        if len(made) == 1:
            return made[0]
        return cst.FlattenSentinel(made) if made else cst.RemoveFromParent()


def _changed_expression(node: cst.CSTNode, edit: Edit) -> cst.BaseExpression:
    """Return the expression that results from applying `edit` to `node`."""
    made = cst.parse_expression(edit.code or "()")
    match edit.kind, node:
        case "argument", cst.Call():
            made = _with_argument(node, edit)
        case "wrap", cst.BaseExpression():
            made = cst.Call(made, [cst.Arg(node)])
        case "prepend", cst.Call(args=args):
            comma = _COMMA if args else cst.MaybeSentinel.DEFAULT
            made = node.with_changes(args=[cst.Arg(made, comma=comma), *args])
        case ("unwrap", cst.Call(args=[cst.Arg(value=value), *_])) | (
            "unwrap",
            cst.Attribute(value=value),
        ):
            made = value
        case "receiver", cst.Call(func=cst.Attribute(value=value)):
            made = cst.Call(made, [cst.Arg(value.with_changes(lpar=[], rpar=[]))])
        case _:
            assert edit.kind == "replace", edit
    return made


def _with_argument(call: cst.Call, edit: Edit) -> cst.Call:
    args = list(call.args)
    names = [arg.keyword and arg.keyword.value for arg in args]
    if not edit.code:
        if edit.name in names:
            gone = args.pop(names.index(edit.name))
            if args and gone is call.args[-1]:
                args[-1] = args[-1].with_changes(
                    comma=gone.comma, whitespace_after_arg=gone.whitespace_after_arg
                )
        return call.with_changes(args=args)
    value = cst.parse_expression(edit.code)
    if edit.name in names:
        index = names.index(edit.name)
        args[index] = args[index].with_changes(value=value)
        return call.with_changes(args=args)
    equal = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
    made = cst.Arg(value, keyword=cst.Name(edit.name), equal=equal)
    if args:
        made = made.with_changes(comma=args[-1].comma)
        args[-1] = args[-1].with_changes(comma=_COMMA)
    return call.with_changes(args=[*args, made])


def _changed(statement: cst.BaseStatement, edit: Edit) -> cst.BaseStatement:
    """Apply an edit to a statement; return the single statement that results."""
    match edit.kind, statement:
        case "comment", _:
            line = cst.EmptyLine(comment=cst.Comment(edit.code))
            statement = _with_lines(statement, [*_lines(statement), line])
        case "parameter", cst.FunctionDef():
            statement = _with_parameter(statement, edit.code)
        case "guard", cst.SimpleStatementLine(leading_lines=lines):
            block = cst.IndentedBlock([statement.with_changes(leading_lines=[])])
            statement = cst.If(cst.parse_expression(edit.code), block, leading_lines=lines)
        case "passes", cst.For():
            statement = _passes(statement, edit.code)
        case "statement", cst.SimpleStatementLine():
            made = cst.parse_statement(edit.code)
            assert isinstance(made, cst.SimpleStatementLine)
            statement = statement.with_changes(body=made.body)
        case "first", cst.For() | cst.While() | cst.FunctionDef():
            suite = statement.body
            assert isinstance(suite, cst.IndentedBlock)
            text = isinstance(statement, cst.FunctionDef) and statement.get_docstring() is not None
            body = [*suite.body[:text], cst.parse_statement(edit.code), *suite.body[text:]]
            statement = statement.with_changes(body=suite.with_changes(body=body))
    return statement


def _passes(loop: cst.For, code: str) -> cst.BaseStatement:
    """Return the `for` loop in `code`, with the body of `loop` distributed over its inner loops.

    String statements with the text `PART` divide the body of `loop`. Each inner loop gets one part.
    """
    block = loop.body
    assert isinstance(block, cst.IndentedBlock)
    parts: list[list[cst.BaseStatement]] = [[]]
    for statement in block.body:
        if _text(statement) == PART:
            parts.append([])
        else:
            assert isinstance(statement, cst.BaseStatement)
            parts[-1].append(statement)
    made = cst.parse_statement(code)
    assert isinstance(made, cst.For)
    assert isinstance(made.body, cst.IndentedBlock)
    body: list[cst.BaseStatement] = []
    left = iter(parts)
    for statement in made.body.body:
        assert isinstance(statement, cst.BaseStatement)
        inner = statement.body if isinstance(statement, cst.For) else None
        whole = [*next(left), *inner.body[1:]] if inner is not None else []
        body.append(statement.with_deep_changes(inner, body=whole) if inner else statement)
    inside = cst.IndentedBlock(body, header=block.header, footer=block.footer)
    return _with_lines(made.with_changes(body=inside), _lines(loop))


def _text(statement: cst.CSTNode) -> str:
    """Return the string of a statement that is a string literal; an empty string for other statements."""
    match statement:
        case cst.SimpleStatementLine(body=[cst.Expr(value=cst.SimpleString() as text)]):
            return str(text.evaluated_value)
    return ""


def _lines(statement: cst.BaseStatement) -> list[cst.EmptyLine]:
    return list(getattr(statement, "leading_lines", ()))


def _with_lines(statement: cst.BaseStatement, lines: Sequence[cst.EmptyLine]) -> cst.BaseStatement:
    return statement.with_changes(leading_lines=list(lines))


def _empty_lines(
    statement: cst.BaseStatement,
) -> tuple[list[cst.EmptyLine], list[cst.EmptyLine]]:
    """Return the lines above a statement in two lists: empty lines up to the first comment, the others."""
    lines = _lines(statement)
    empty = list(itertools.takewhile(lambda line: line.comment is None, lines))
    return empty, lines[len(empty) :]


def _beside(statement: cst.BaseStatement) -> list[cst.EmptyLine]:
    """Return a statement's end-of-line comment as a list of one line; an empty list without a comment.

    Comments for tools, such as `noqa`, are left out.
    """
    block = getattr(statement, "body", None)
    behind = block.header if isinstance(block, cst.IndentedBlock) else None
    if isinstance(statement, cst.SimpleStatementLine):
        behind = statement.trailing_whitespace
    comment = behind.comment if behind is not None else None
    if comment is None or _FOR_TOOLS.match(comment.value):
        return []
    return [cst.EmptyLine(comment=comment)]


def _spliced(node: cst.If) -> list[cst.BaseStatement]:
    """Return the statements in the body of an `if`; comments above the `if` move to the first one."""
    block = node.body
    if isinstance(block, cst.SimpleStatementSuite):
        made = cst.SimpleStatementLine(block.body, trailing_whitespace=block.trailing_whitespace)
        return [made.with_changes(leading_lines=node.leading_lines)]
    assert isinstance(block, cst.IndentedBlock)
    first, *rest = block.body
    return [_with_lines(first, [*node.leading_lines, *_beside(node), *_lines(first)]), *rest]


def _under_with(block: cst.IndentedBlock | cst.Module) -> cst.IndentedBlock | cst.Module:
    """Return `block` with a `with` around the statements after its marker.

    The marker is a string statement that holds the code for the `with`. It is removed. A block without a
    marker is returned unchanged.
    """
    for index, statement in enumerate(block.body):
        code = _text(statement)
        if code.startswith(_WITH):
            first, *others = block.body[index + 1 :]
            empty, lines = _empty_lines(first)
            made = cst.parse_statement(f"with {code.removeprefix(_WITH)}:\n    pass\n")
            inside = cst.IndentedBlock([_with_lines(first, lines), *others])
            made = made.with_changes(body=inside, leading_lines=empty)
            # Empty lines stay empty although the statements are indented.
            empty_line = m.EmptyLine(comment=None, indent=True)
            under = m.replace(made, empty_line, lambda line, _: line.with_changes(indent=False))
            assert isinstance(under, cst.BaseStatement)
            return block.with_changes(body=[*block.body[:index], under])
    return block


def _with_parameter(function: cst.FunctionDef, code: str) -> cst.FunctionDef:
    params = function.params
    names = list(params.params)
    if not code:
        return function.with_changes(params=params.with_changes(params=names[1:]))
    bound = bool(names) and names[0].name.value in ("self", "cls")
    comma = _COMMA
    if bound and isinstance(names[0].comma, cst.Comma):
        comma = names[0].comma  # with its line end, where each parameter has a line
    last = len(names) == bound and not (
        params.kwonly_params or params.star_kwarg or isinstance(params.star_arg, cst.Param)
    )
    made = cst.Param(cst.Name(code), comma=cst.MaybeSentinel.DEFAULT if last else comma)
    head = [name.with_changes(comma=comma) for name in names[:bound]]
    changed = params.with_changes(params=[*head, made, *names[bound:]])
    return function.with_changes(params=changed)
