"""One file, parsed: a script, a module or a notebook's cells."""

from __future__ import annotations

import ast
import io
import json
import re
import tokenize
import warnings
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef
Loop = ast.For | ast.AsyncFor | ast.While
#: Where a name is bound: a function, or the module.
Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.Module

_IGNORE = re.compile(r"#\s*lockstep:\s*ignore(?:\[(?P<codes>[^\]]*)\])?")
#: Lines of a cell that IPython takes, and Python does not.
_MAGIC = re.compile(r"^(\s*)[%!?].*$", re.MULTILINE)


@dataclass(frozen=True)
class Part:
    """One element of a value that several names are bound to together: `model, data = make()`."""

    value: ast.expr
    index: int


@dataclass(frozen=True)
class Broken:
    """A place that Python cannot parse; lines and columns from 1, as in findings."""

    line: int
    column: int
    message: str


@dataclass(frozen=True)
class Cell:
    """A code cell of a notebook: its number from 1, and the line of the joined text before its first."""

    number: int
    offset: int
    lines: int


class Module:
    """A parsed file and the tables that rules look names up in.

    Attributes:
        path: the file.
        text: its source; of a notebook, the code cells one after the other.
        broken: what could not be parsed, and is left out of `tree`.
        cells: the code cells, of a notebook.
        encoding: that of the file.
        parents: of each node, the one that it stands in.
        imports: names bound by imports, and what they stand for: `dist` is `torch.distributed`.
        bound: values bound to a name in a scope.
        attributes: values assigned to dotted names: `self.model` in a class, `args.lr` anywhere.
    """

    def __init__(
        self, path: Path, text: str, cells: tuple[Cell, ...] = (), encoding: str = "utf-8"
    ) -> None:
        self.path, self.cells, self.encoding = path, cells, encoding
        self.broken: list[Broken] = []
        self.text = self._without_broken_cells(text) if cells else text
        self.tree = self._parse(self.text) or ast.Module([], [])
        self.parents: dict[ast.AST, ast.AST] = {}
        self.calls: list[ast.Call] = []
        self.functions: list[Function] = []
        self.classes: dict[str, ast.ClassDef] = {}
        self.loops: list[Loop] = []
        self.imports: dict[str, str] = {}
        self.bound: dict[tuple[Scope, str], list[ast.expr | Part]] = defaultdict(list)
        self.attributes: dict[tuple[ast.ClassDef | None, str], list[ast.expr | Part]]
        self.attributes = defaultdict(list)
        self._index()

    def _parse(self, text: str, offset: int = 0) -> ast.Module | None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of invalid escapes in strings: not ours to say
                return ast.parse(text)
        except SyntaxError as error:
            place = (error.lineno or 1) + offset, max(error.offset or 1, 1)
            self.broken.append(Broken(*place, f"{error.msg}: not valid Python 3"))
        except (ValueError, RecursionError) as error:
            self.broken.append(Broken(1 + offset, 1, str(error)))
        return None

    def _without_broken_cells(self, text: str) -> str:
        """Return the text with the cells that cannot be parsed as empty lines."""
        lines = text.split("\n")
        for cell in self.cells:
            inside = slice(cell.offset, cell.offset + cell.lines)
            if self._parse("\n".join(lines[inside]), cell.offset) is None:
                lines[inside] = [""] * cell.lines
        return "\n".join(lines)

    def _index(self) -> None:
        stack: list[ast.AST] = [self.tree]
        while stack:
            node = stack.pop()
            for child in ast.iter_child_nodes(node):
                self.parents[child] = node
                stack.append(child)
            self._note(node)
        self.calls.sort(key=lambda call: (call.lineno, call.col_offset))
        self.loops.sort(key=lambda loop: loop.lineno)

    def _note(self, node: ast.AST) -> None:
        match node:
            case ast.Call():
                self.calls.append(node)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self.functions.append(node)
            case ast.ClassDef():
                self.classes[node.name] = node
            case ast.For() | ast.AsyncFor() | ast.While():
                self.loops.append(node)
            case ast.Import() | ast.ImportFrom():
                self._import(node)
            case _:
                self._assign(node)

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        base = "" if isinstance(node, ast.Import) else "." * node.level + (node.module or "")
        for alias in node.names:
            if isinstance(node, ast.Import):
                first = alias.name.partition(".")[0]
                self.imports[alias.asname or first] = alias.name if alias.asname else first
            else:
                dot = "" if base.endswith(".") else "."
                self.imports[alias.asname or alias.name] = f"{base}{dot}{alias.name}"

    def _assign(self, node: ast.AST) -> None:
        match node:
            case ast.Assign():
                for target in node.targets:
                    self._bind(target, node.value)
            case ast.AnnAssign(value=ast.expr() as value) | ast.NamedExpr(value=value):
                self._bind(node.target, value)
            case ast.AugAssign():
                joined = ast.copy_location(ast.BinOp(node.target, node.op, node.value), node)
                self.parents[joined] = node
                self._bind(node.target, joined)
            case ast.withitem(optional_vars=ast.expr() as target):
                self._bind(target, node.context_expr)

    def _bind(self, target: ast.expr, value: ast.expr | Part) -> None:
        match target:
            case ast.Name():
                self.bound[self.scope(target), target.id].append(value)
            case ast.Attribute():
                own = self.enclosing_class(target) if dotted(target).startswith("self.") else None
                self.attributes[own, dotted(target)].append(value)
            case ast.Tuple(elts=targets) | ast.List(elts=targets) if isinstance(value, ast.expr):
                given = value.elts if isinstance(value, ast.Tuple | ast.List) else None
                for index, one in enumerate(targets):
                    same = given is not None and len(given) == len(targets)
                    self._bind(one, given[index] if given and same else Part(value, index))

    @cached_property
    def free_functions(self) -> dict[str, Function]:
        """The functions that are no methods, by name; of several, the first."""
        free = [one for one in self.functions if self.enclosing_class(one) is None]
        return {one.name: one for one in reversed(free)}

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield what a node stands in, from the inside."""
        while (parent := self.parents.get(node)) is not None:
            yield parent
            node = parent

    def scope(self, node: ast.AST) -> Scope:
        """Return the function, or the module, that a node stands in."""
        while (parent := self.parents.get(node)) is not None:
            node = parent
            if isinstance(node, Function | ast.Lambda | ast.Module):
                return node
        return self.tree

    def enclosing_class(self, node: ast.AST) -> ast.ClassDef | None:
        """Return the class whose body a node stands in."""
        while (parent := self.parents.get(node)) is not None:
            node = parent
            if isinstance(node, ast.ClassDef):
                return node
        return None

    def statement(self, node: ast.AST) -> ast.stmt | None:
        """Return the statement that a node is part of."""
        current: ast.AST | None = node
        while current is not None and not isinstance(current, ast.stmt):
            current = self.parents.get(current)
        return current

    def source(self, node: ast.expr) -> str:
        """Return an expression as it is written."""
        return ast.get_source_segment(self.text, node) or ast.unparse(node)

    def place(self, line: int) -> tuple[int | None, int]:
        """Return the number of the cell of a line, `None` outside notebooks, and the line in it."""
        for cell in self.cells:
            if cell.offset < line <= cell.offset + cell.lines:
                return cell.number, line - cell.offset
        return None, line

    @cached_property
    def ignored(self) -> dict[int, set[str] | None]:
        """Of each line with an ignore comment: its codes, or `None` for all."""
        found: dict[int, set[str] | None] = {}
        if "lockstep:" not in self.text:
            return found
        try:
            for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
                matched = _IGNORE.search(token.string) if token.type == tokenize.COMMENT else None
                if matched:
                    codes = matched["codes"]
                    said = None if codes is None else set(re.findall(r"[^\s,]+", codes))
                    found[token.start[0]] = said
        except (tokenize.TokenError, SyntaxError):
            pass  # said by `broken`
        return found


def read(path: Path) -> Module:
    """Return a file, parsed; what cannot be parsed is in its `broken`.

    Raises:
        OSError: if the file cannot be read.
    """
    content = path.read_bytes()
    if path.suffix == ".ipynb":
        return _notebook(path, content)
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        return Module(path, content.decode(encoding), encoding=encoding)
    except (SyntaxError, UnicodeDecodeError) as error:
        module = Module(path, "")
        module.broken.append(Broken(1, 1, f"cannot be decoded: {error}"))
        return module


def _notebook(path: Path, content: bytes) -> Module:
    try:
        cells = json.loads(content)["cells"]
        sources = [
            (number, "".join(cell["source"]))
            for number, cell in enumerate(cells, 1)
            if cell["cell_type"] == "code"
        ]
    except (ValueError, KeyError, TypeError) as error:
        module = Module(path, "")
        module.broken.append(Broken(1, 1, f"not a notebook of format 4: {error!r}"))
        return module
    joined: list[str] = []
    placed = []
    for number, text in sources:
        lines = _plain(text).split("\n")
        placed.append(Cell(number, len(joined), len(lines)))
        joined += lines
    return Module(path, "\n".join(joined), tuple(placed))


def _plain(text: str) -> str:
    """Return a cell without IPython's own lines."""
    if text.lstrip().startswith("%%"):
        return re.sub(r"[^\n]+", "", text)
    return _MAGIC.sub(r"\1pass", text)


def dotted(node: ast.AST) -> str:
    """Return `a.b.c` for names and attributes of names, otherwise an empty text."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    return ".".join([node.id, *reversed(parts)])
