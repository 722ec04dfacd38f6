"""Parse one file, a script or a notebook, and index its names, calls and syntax nodes."""

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

from lockstep.tools.check.syntax import Function, Loop, Scope, dotted, method, start

_IGNORE = re.compile(r"#\s*lockstep:\s*ignore(?:\[(?P<codes>[^\]]*)\])?")
#: Lines of a cell that only IPython can execute.
_MAGIC = re.compile(r"^(\s*)[%!?].*$", re.MULTILINE)
#: Qualified names of classes and functions, and the short names that rules use for them.
_SHORT = {
    "torch.nn.parallel.DistributedDataParallel": "DDP",
    "torch.nn.parallel.distributed.DistributedDataParallel": "DDP",
    "torch.nn.DataParallel": "DataParallel",
    "torch.nn.parallel.DataParallel": "DataParallel",
    "torch.nn.modules.batchnorm.SyncBatchNorm": "torch.nn.SyncBatchNorm",
    "torch.nn.utils.clip_grad_norm": "torch.nn.utils.clip_grad_norm_",
    "torch.nn.utils.clip_grad.clip_grad_norm_": "torch.nn.utils.clip_grad_norm_",
    "torch.utils.data.dataloader.DataLoader": "DataLoader",
    "torch.utils.data.DataLoader": "DataLoader",
    "torch.utils.data.DistributedSampler": "DistributedSampler",
    "torch.utils.data.distributed.DistributedSampler": "DistributedSampler",
    "torch.utils.data.dataset.random_split": "torch.utils.data.random_split",
    "torch.distributed.fsdp.FullyShardedDataParallel": "FSDP",
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": "FSDP",
    "torch.distributed.fsdp.fully_shard": "fully_shard",
    "torch.distributed._composable.fsdp.fully_shard": "fully_shard",
    "accelerate.Accelerator": "Accelerator",
    "lightning.Fabric": "Fabric",
    "lightning.fabric.Fabric": "Fabric",
    "lightning_fabric.Fabric": "Fabric",
}
_PREFIXES = {
    "torch.distributed.distributed_c10d.": "dist.",
    "torch.distributed.": "dist.",
    "torch.multiprocessing.": "mp.",
    "multiprocessing.": "mp.",
}


@dataclass(frozen=True)
class UnpackedElement:
    """One variable of an unpacking assignment `model, data = make()`: the unpacked value, and an index."""

    value: ast.expr
    index: int


@dataclass(frozen=True)
class ParseError:
    """A syntax error of a file: line and column, both counted from 1, and the message."""

    line: int
    column: int
    message: str


@dataclass(frozen=True)
class Cell:
    """A code cell of a notebook: its number from 1, and its lines in the joined text of all cells."""

    number: int
    offset: int
    lines: int


class Module:
    """A parsed file, and tables in which rules look up its names.

    Attributes:
        text: the source; of a notebook, the code cells one after the other.
        errors: positions that cannot be parsed; `tree` is empty, or lacks the notebook cells with errors.
        cells: the code cells of a notebook; empty for a script.
        parents: the parent of each syntax node.
        imports: names bound by imports, and the qualified names that they stand for.
        bound: by scope and name, the values assigned to the name.
        attributes: values assigned to dotted names: `self.model` in a class, `args.lr` anywhere.
    """

    def __init__(
        self, path: Path, text: str, cells: tuple[Cell, ...] = (), encoding: str = "utf-8"
    ) -> None:
        self.path, self.cells, self.encoding = path, cells, encoding
        self.errors: list[ParseError] = []
        self.text = self._without_broken_cells(text) if cells else text
        self.tree = self._parse(self.text) or ast.Module([], [])
        self.parents: dict[ast.AST, ast.AST] = {}
        self.calls: list[ast.Call] = []
        self.functions: list[Function] = []
        self.classes: dict[str, ast.ClassDef] = {}
        self.loops: list[Loop] = []
        self.imports: dict[str, str] = {}
        self.bound: dict[tuple[Scope, str], list[ast.expr | UnpackedElement]] = defaultdict(list)
        self.attributes: dict[tuple[ast.ClassDef | None, str], list[ast.expr | UnpackedElement]]
        self.attributes = defaultdict(list)
        self._matches: dict[str, list[str]] = {}
        self._index()

    def _parse(self, text: str, offset: int = 0) -> ast.Module | None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about invalid escapes in strings
                return ast.parse(text)
        except SyntaxError as error:
            line, column = (error.lineno or 1) + offset, max(error.offset or 1, 1)
            message = f"{error.msg}: not valid Python 3"
        except (ValueError, RecursionError) as error:
            line, column, message = 1 + offset, 1, str(error)
        self.errors.append(ParseError(line, column, message))
        return None

    def _without_broken_cells(self, text: str) -> str:
        """Return `text` with empty lines in place of the notebook cells that cannot be parsed."""
        lines = text.split("\n")
        for cell in self.cells:
            inside = slice(cell.offset, cell.offset + cell.lines)
            if self._parse("\n".join(lines[inside]), cell.offset) is None:
                lines[inside] = [""] * cell.lines
        return "\n".join(lines)

    def _index(self) -> None:
        stack: list[ast.AST] = [self.tree]
        others: list[ast.AST] = []  # names need the parents of all nodes
        while stack:
            node = stack.pop()
            for child in ast.iter_child_nodes(node):
                self.parents[child] = node
                stack.append(child)
            match node:
                case ast.Call():
                    self.calls.append(node)
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    self.functions.append(node)
                case ast.ClassDef():
                    self.classes[node.name] = node
                case ast.For() | ast.AsyncFor() | ast.While():
                    self.loops.append(node)
                case _:
                    others.append(node)
        for node in others:
            self._bind_names(node)
        self.calls.sort(key=start)
        self.loops.sort(key=lambda loop: loop.lineno)

    def _bind_names(self, node: ast.AST) -> None:
        match node:
            case ast.Import(names=names):
                for alias in names:
                    first = alias.name.partition(".")[0]
                    self.imports[alias.asname or first] = alias.name if alias.asname else first
            case ast.ImportFrom(module=module, names=names, level=level):
                base = "." * level + (f"{module}." if module else "")
                self.imports |= {name.asname or name.name: base + name.name for name in names}
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    self._bind(target, value)
            case ast.AnnAssign(value=ast.expr() as value) | ast.NamedExpr(value=value):
                self._bind(node.target, value)
            case ast.AugAssign():
                joined = ast.copy_location(ast.BinOp(node.target, node.op, node.value), node)
                self.parents[joined] = node
                self._bind(node.target, joined)
            case ast.withitem(optional_vars=ast.expr() as target):
                self._bind(target, node.context_expr)

    def _bind(self, target: ast.expr, value: ast.expr | UnpackedElement) -> None:
        match target:
            case ast.Name():
                self.bound[self.scope(target), target.id].append(value)
            case ast.Attribute():
                self.attributes[self._attribute_key(target)].append(value)
            case ast.Tuple(elts=targets) | ast.List(elts=targets) if isinstance(value, ast.expr):
                values = value.elts if isinstance(value, ast.Tuple | ast.List) else []
                same = len(values) == len(targets)
                for index, element in enumerate(targets):
                    self._bind(element, values[index] if same else UnpackedElement(value, index))

    def _attribute_key(self, node: ast.Attribute) -> tuple[ast.ClassDef | None, str]:
        name = dotted(node)
        return self.enclosing_class(node) if name.startswith("self.") else None, name

    def assigned(self, node: ast.Attribute) -> list[ast.expr | UnpackedElement]:
        """Return the values assigned to an attribute, such as `self.x` or `args.lr`.

        For `self.x` they are the values assigned in its class, otherwise in the whole file.
        """
        return self.attributes.get(self._attribute_key(node), [])

    # Names -----------------------------------------------------------------------------------------

    def name(self, node: ast.AST) -> str:
        """Return the qualified name of a variable or attribute, shortened where usual (`DDP`), or ""."""
        text = dotted(node)
        first, dot, rest = text.partition(".")
        if first not in self.imports:
            return text
        full = self.imports[first] + dot + rest
        if full in _SHORT:
            return _SHORT[full]
        prefix = next((one for one in _PREFIXES if full.startswith(one)), "")
        return _PREFIXES.get(prefix, "") + full.removeprefix(prefix)

    @cached_property
    def free_functions(self) -> dict[str, Function]:
        """Functions of the file that are not methods, by name; the first if several have the same name."""
        free = [function for function in self.functions if self.enclosing_class(function) is None]
        return {function.name: function for function in reversed(free)}

    @cached_property
    def calls_by_name(self) -> dict[str, list[ast.Call]]:
        """Calls by the qualified name of the called function, in the order of the source."""
        found: dict[str, list[ast.Call]] = defaultdict(list)
        for call in self.calls:
            found[self.name(call.func)].append(call)
        return found

    @cached_property
    def called(self) -> set[str]:
        """Names of the functions and methods that the module calls; a method's name begins with a dot."""
        return {*self.calls_by_name, *(f".{method(call)}" for call in self.calls)}

    def findall(self, pattern: str) -> list[str]:
        """Return the matches of the regular expression `pattern` in the source; results are cached."""
        if pattern not in self._matches:
            self._matches[pattern] = re.findall(pattern, self.text)
        return self._matches[pattern]

    # Places ----------------------------------------------------------------------------------------

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the syntax nodes that contain `node`, innermost first."""
        return (parent for parent, _ in self.ancestry(node))

    def ancestry(self, node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
        """Yield the nodes that contain `node`, innermost first, each with its child around `node`."""
        while (parent := self.parents.get(node)) is not None:
            yield parent, node
            node = parent

    def scope(self, node: ast.AST) -> Scope:
        """Return the innermost function, lambda or module that contains `node`."""
        return next((one for one in self.above(node) if isinstance(one, Scope)), self.tree)

    def enclosing_class(self, node: ast.AST) -> ast.ClassDef | None:
        """Return the innermost class that contains `node`; `None` if there is none."""
        return next((one for one in self.above(node) if isinstance(one, ast.ClassDef)), None)

    def statement(self, node: ast.AST) -> ast.stmt | None:
        """Return the innermost statement that is or contains `node`."""
        nodes = (node, *self.above(node))
        return next((one for one in nodes if isinstance(one, ast.stmt)), None)

    def exclusive(self, one: ast.AST, other: ast.AST) -> bool:
        """Whether two nodes are in different branches of the same `if`, so that never both are executed."""
        branches = self._branches(other)
        return any(
            branches.get(node, branch) != branch for node, branch in self._branches(one).items()
        )

    def _branches(self, node: ast.AST) -> dict[ast.AST, bool]:
        """Return each `if` around a node, and whether the node is in its body rather than in its `else`."""
        found: dict[ast.AST, bool] = {}
        for parent, child in self.ancestry(node):
            if isinstance(parent, ast.If | ast.IfExp) and child is not parent.test:
                body = parent.body if isinstance(parent, ast.If) else [parent.body]
                found[parent] = child in body
        return found

    def earlier(self, one: ast.expr, other: ast.expr) -> bool:
        """Whether `one` precedes `other` in the same function, not in different branches of an `if`."""
        same = self.scope(one) is self.scope(other)
        return same and start(one) < start(other) and not self.exclusive(one, other)

    @cached_property
    def iterators(self) -> list[tuple[ast.ClassDef, Function]]:
        """The `__iter__` methods of subclasses of IterableDataset, each with its class."""
        return [
            (owner, statement)
            for owner in self.classes.values()
            if any(dotted(base).endswith("IterableDataset") for base in owner.bases)
            for statement in owner.body
            if isinstance(statement, Function) and statement.name == "__iter__"
        ]

    def is_dataset(self, node: ast.AST) -> bool:
        """Whether `node` is in a class with a base class whose name contains `Dataset`."""
        owner = self.enclosing_class(node)
        return owner is not None and any("Dataset" in ast.unparse(base) for base in owner.bases)

    def source(self, node: ast.expr) -> str:
        """Return the source text of an expression."""
        return ast.get_source_segment(self.text, node) or ast.unparse(node)

    def place(self, line: int) -> tuple[int | None, int]:
        """Return the number of a line's notebook cell (else `None`), and of the line in the cell."""
        for cell in self.cells:
            if cell.offset < line <= cell.offset + cell.lines:
                return cell.number, line - cell.offset
        return None, line

    def positions(self, node: ast.expr | ast.stmt) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the positions (line, column) at which a node begins and ends.

        Lines count from 1, columns from 0 in characters; the columns in Python's syntax tree are in bytes.
        """
        end = node.end_lineno or node.lineno, node.end_col_offset or 0
        first, last = (
            (line, len(self._lines[line - 1].encode()[:offset].decode()))
            for line, offset in (start(node), end)
        )
        return first, last

    @cached_property
    def _lines(self) -> list[str]:
        return self.text.split("\n")

    @cached_property
    def ignored(self) -> dict[int, set[str] | None]:
        """By line, the rule codes in the `# lockstep: ignore` comment there; `None` means all rules."""
        found: dict[int, set[str] | None] = {}
        if "lockstep:" not in self.text or not self.tree.body:
            return found
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            matched = _IGNORE.search(token.string) if token.type == tokenize.COMMENT else None
            if matched:
                codes = matched["codes"]
                listed = None if codes is None else set(re.findall(r"[^\s,]+", codes))
                found[token.start[0]] = listed
        return found


def read(path: Path) -> Module:
    """Parse a script or a notebook; the returned module has the positions of syntax errors in `errors`.

    Raises:
        OSError: if the file cannot be read.
    """
    content = path.read_bytes()
    encoding = "utf-8"
    cells: tuple[Cell, ...] = ()
    try:
        if path.suffix == ".ipynb":
            text, cells = _notebook(content)
        else:
            encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
            text = content.decode(encoding)
    except (SyntaxError, ValueError, KeyError, TypeError) as error:
        notebook = f"not a notebook of format 4: {error!r}"
        message = notebook if path.suffix == ".ipynb" else f"cannot be decoded: {error}"
        module = Module(path, "")
        module.errors.append(ParseError(1, 1, message))
        return module
    return Module(path, text, cells, encoding)


def _notebook(content: bytes) -> tuple[str, tuple[Cell, ...]]:
    """Return the joined code of a notebook's cells, without IPython commands, and each cell's position."""
    joined: list[str] = []
    cells = []
    for number, cell in enumerate(json.loads(content)["cells"], 1):
        if cell["cell_type"] == "code":
            text = "".join(cell["source"])
            other = text.lstrip().startswith("%%")  # a cell of another language
            text = re.sub(r"[^\n]+", "", text) if other else _MAGIC.sub(r"\1pass", text)
            lines = text.split("\n")
            cells.append(Cell(number, len(joined), len(lines)))
            joined += lines
    return "\n".join(joined), tuple(cells)
