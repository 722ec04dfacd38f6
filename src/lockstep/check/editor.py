"""The transformer that makes a file's edits; apart from `fix.py`, since it needs LibCST to be defined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import libcst as cst
from libcst.metadata import PositionProvider

from lockstep.check.fix import Edit, Place

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

    def _at(self, node: cst.CSTNode) -> Place:
        start = self.get_metadata(PositionProvider, node).start
        return start.line, start.column

    def on_leave(self, original_node: cst.CSTNode, updated_node: cst.CSTNode) -> object:  # type: ignore[override]
        """Edit a node that is left."""
        if isinstance(original_node, cst.BaseExpression):
            return self._expression(original_node, updated_node)
        if isinstance(original_node, cst.SimpleStatementLine | cst.BaseCompoundStatement):
            assert isinstance(updated_node, cst.BaseStatement)
            return self._statement(original_node, updated_node)
        return super().on_leave(original_node, updated_node)

    def _expression(self, original: cst.BaseExpression, updated: cst.CSTNode) -> cst.CSTNode:
        for edit in self._expressions.get(self._at(original), ()):
            if edit.kind == "argument" and _whole(original, edit):
                assert isinstance(updated, cst.Call)
                updated = _with_argument(updated, edit)
            elif edit.kind == "replace" and _whole(original, edit):
                updated = cst.parse_expression(edit.code)
        return updated

    def _statement(
        self,
        original: cst.SimpleStatementLine | cst.BaseCompoundStatement,
        updated: cst.BaseStatement,
    ) -> _Statement:
        before: list[cst.BaseStatement] = []
        after: list[cst.BaseStatement] = []
        for edit in self._statements.get(self._at(original), ()):
            made = cst.parse_statement(
                f"if {edit.code}:\n    pass\n" if edit.kind == "guard" else edit.code
            )
            if edit.kind == "first" and isinstance(updated, cst.For | cst.While):
                block = updated.body
                assert isinstance(block, cst.IndentedBlock)
                updated = updated.with_changes(body=block.with_changes(body=[made, *block.body]))
            elif edit.kind == "statement" and isinstance(updated, cst.SimpleStatementLine):
                assert isinstance(made, cst.SimpleStatementLine)
                updated = updated.with_changes(body=made.body)
            elif edit.kind == "guard" and isinstance(updated, cst.SimpleStatementLine):
                assert isinstance(made, cst.If)
                lines = updated.leading_lines
                inside = cst.IndentedBlock(body=[updated.with_changes(leading_lines=[])])
                updated = made.with_changes(body=inside, leading_lines=lines)
            elif edit.kind == "before":
                before.append(made)
            elif edit.kind == "after":
                after.append(made)
        return cst.FlattenSentinel([*before, updated, *after]) if before or after else updated


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
            kept[-1] = kept[-1].with_changes(comma=call.args[-1].comma)
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
