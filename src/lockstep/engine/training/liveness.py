"""Liveness of variables: which variables a running frame reads before it assigns them, from its source.

A loop *carries* a variable if an iteration reads the value that an earlier iteration has assigned. After a
restart such a value is lost: the script does not compute it again, and states that the run saves do not
contain it. The analysis follows the syntax tree from the frame's position. It assumes that the body of a
`for` runs at least once, and that an exception comes from the end of its `try`: names that are assigned
there have their new values afterwards.

A variable *matters* unless all values computed from it are only shown: printed, logged, in a progress bar.
"""

from __future__ import annotations

import ast
import builtins
import dis
import functools
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import CodeType, FrameType
from typing import Any, NamedTuple

from lockstep.engine.training.statements import (
    LOOPS,
    NONE,
    SCOPES,
    Block,
    Names,
    StatementPosition,
    blocks,
    heads,
    is_for,
    names_of,
    parts,
    scope,
    way_of,
)

#: Functions that compute or show values without other effects, and methods that change their object.
_PURE = re.compile(
    r"abs|all|any|arg(max|min)|array|asarray|clone|copy|cpu|detach|dict|divmod|eq|exp|float|format|get|int|"
    r"isfinite|isnan|item|items|join|keys|len|log(\w*[a-z0-9])?|max|mean|median|min|numel|numpy|perf_counter|"
    r"monotonic|pow|round|size|sorted|sqrt|stack|std|strftime|sum|tensor|time|to|tolist|topk|values|print|display|"
    r"info|debug|warning|write(row|rows|lines)?|flush|add_(scalars?|text|image|figure|histogram)|"
    r"set_(postfix|description)(_str)?"
)
#: Targets of assignments that are variables; others, as `group["lr"]`, are parts of objects.
_PLAIN = (ast.Name, ast.Tuple, ast.List, ast.Starred)
_CHANGES = re.compile(
    r"add|append(left)?|clear|extend|insert|pop(left)?|remove|reset|setdefault|update"
)


class Variable(NamedTuple):
    """A variable's name, and whether it is a global of the frame's module or a local of the frame."""

    name: str
    is_global: bool


class VariableUse(NamedTuple):
    """Use of a variable by a loop.

    `line`: line that assigns the variable or, without one, a line that reads it. `matters`: whether values
    computed from the variable have effects besides output. `is_item`: whether the loop's `for` itself
    assigns the variable, as the index of `enumerate`.
    """

    line: int
    matters: bool = True
    is_item: bool = False


Uses = Mapping[Variable, VariableUse]


def carried(frame: FrameType, *, returns: bool = True) -> Uses:
    """Return the variables that the next iteration of a loop reads before it assigns them.

    The loop is the innermost one in which `frame` is running. `returns`: whether the return value of the
    frame's function has effects besides output.
    """
    return _uses(frame, "next", returns)


def carried_around(frame: FrameType, *, returns: bool = True) -> Uses:
    """Return the variables carried between iterations of the second innermost loop of a frame.

    That loop is the one around the innermost loop in which `frame` is running. `returns`: as in `carried`.
    """
    return _uses(frame, "around", returns)


def read_after(frame: FrameType, *, returns: bool = True) -> Uses:
    """Return the variables that the code after a frame's loop reads before it assigns them.

    The loop is the innermost one in which `frame` is running. `returns`: as in `carried`.
    """
    return _uses(frame, "after", returns)


def result_matters(frame: FrameType, *, returns: bool) -> bool:
    """Whether the value of the call in progress in `frame` has effects besides output.

    `returns`: whether the return value of the frame's function has such effects. Output is printing,
    logging and progress bars.
    """
    way = way_of(frame.f_code, frame.f_lasti)
    now = way[-1].now if way else None
    if isinstance(now, ast.Assign | ast.AugAssign | ast.AnnAssign):
        return not names_of(now)[1].isdisjoint(_analysis(frame.f_code, returns)[1])
    is_shown = isinstance(now, ast.Expr) and isinstance(now.value, ast.Call) and _is_pure(now.value)
    return returns if isinstance(now, ast.Return) else not is_shown


def is_at_for(frame: FrameType) -> bool:
    """Whether `frame` is taking the next item of a `for` loop's iterator."""
    return is_for(frame.f_code, frame.f_lasti)


def is_module(frame: FrameType) -> bool:
    """Whether `frame` runs a module's top-level code, whose variables are global."""
    is_function = frame.f_code.co_flags & inspect.CO_OPTIMIZED
    return not is_function and frame.f_locals is frame.f_globals


@functools.cache
def globals_of(code: CodeType) -> Names:
    """Return the names of global variables that the function with the code object `code` reads.

    Names that functions defined inside of it read are included.
    """
    own = (op.argval for op in dis.get_instructions(code) if op.opname == "LOAD_GLOBAL")
    inner = (globals_of(one) for one in code.co_consts if isinstance(one, CodeType))
    return frozenset(own).union(*inner)


def _uses(frame: FrameType, question: str, returns: bool) -> Uses:
    code = frame.f_code
    own = {*code.co_varnames, *code.co_cellvars, *code.co_freevars}
    found = _answer(code, frame.f_lasti, question, returns)
    return {Variable(name, name not in own): use for name, use in found.items()}


@functools.cache
def _answer(code: CodeType, offset: int, question: str, returns: bool) -> Mapping[str, VariableUse]:
    way = way_of(code, offset)
    if not way:
        return {}
    reads = _Reads()
    _follow(way, reads, question, at_for=is_for(code, offset))
    items, matter = _analysis(code, returns)
    found = {name: line for name, line in reads.found.items() if name not in items} | reads.items
    return {
        name: VariableUse(reads.written.get(name, line), name in matter, name in reads.items)
        for name, line in found.items()
    }


# --- read before it is written ----------------------------------------------------------------------


class _Reads:
    """Collects the names of variables that statements read before assigning, or assign.

    Each name is stored with a line number of the script.
    """

    def __init__(self) -> None:
        self.found: dict[str, int] = {}  # that are read before they are assigned
        self.items: dict[str, int] = {}  # of `watched`, that are read
        self.written: dict[str, int] = {}  # that are assigned
        self.watched = NONE  # items of the loop, which it assigns before its body

    def evaluate(self, nodes: Iterable[ast.AST], assigned: Names, line: int) -> Names:
        """Collect the names that the expressions `nodes` read and assign, in line `line`.

        Return `assigned`, the names assigned before, together with the names that `nodes` assign.
        """
        loads, stores = _names(nodes)
        self.found = dict.fromkeys(loads - assigned, line) | self.found
        self.items |= dict.fromkeys(loads & self.watched, line)
        self.written = dict.fromkeys(stores, line) | self.written
        return assigned | stores

    def block(self, statements: Block, assigned: Names | None) -> Names | None:
        """Collect the names that `statements` read; return the names surely assigned after them.

        `assigned`: names assigned before the statements. Here and in the result, `None` means code that is
        not reached, as after `return`.
        """
        for statement in statements:
            if assigned is None:
                break
            assigned = self.statement(statement, assigned)
        return assigned

    def statement(self, one: ast.stmt, assigned: Names) -> Names | None:
        """Collect the names that the statement `one` reads; return the names assigned after it.

        `assigned`: names assigned before the statement. The result has only names that are assigned for
        certain; it is `None` if the code after the statement is not reached, as after `return`.
        """
        assigned = self.evaluate(heads(one), assigned, one.lineno)
        if isinstance(one, ast.Break | ast.Continue | ast.Return | ast.Raise):
            return None
        if isinstance(one, SCOPES):
            return assigned
        first, choice, last = parts(one)
        after = self.block(first, assigned)
        if after is None and (choice or isinstance(one, LOOPS)):  # its body is always left
            after = assigned
        if after is not None and choice:
            ends = [end for part in choice if (end := self.block(part, after)) is not None]
            after = frozenset.intersection(*ends) if ends else None
        return self.block(last, after)


def _follow(
    way: Sequence[StatementPosition], reads: _Reads, question: str, *, at_for: bool
) -> None:
    """Collect in `reads` the variables that the script reads after its current position.

    Args:
        way: the current position, as `way_of` returns it.
        reads: collects the names of the variables.
        question: where the code to analyze begins: `next` is the next iteration of the innermost
            loop, `around` the next iteration of the loop around that one, and `after` the code
            behind the innermost loop.
        at_for: whether the current position is a `for` that is about to take its next item.
    """
    stands, assigned = list(way), NONE
    here: Any = stands[-1].now
    if question == "around":
        while stands and not isinstance(stands[-1].owner, LOOPS):
            stands.pop()
        here = stands[-1].owner if stands else None
        stands = stands[:-1]
    if here is None or (question == "after" and at_for):
        pass
    elif isinstance(here, LOOPS) and (at_for or question == "around"):
        head = here.test if isinstance(here, ast.While) else here.target
        assigned = reads.evaluate([head], assigned, here.lineno)
        source = getattr(here, "iter", None)
        # As `enumerate(…)`; `run.epochs(…)` gives a resumed run the right ones.
        counts = isinstance(source, ast.Call) and getattr(source.func, "attr", "") != "epochs"
        reads.watched = assigned if question == "next" and counts else NONE
        assigned = reads.block(here.body, assigned) or assigned
    elif blocks(here) and not isinstance(here, SCOPES):
        assigned = reads.statement(here, assigned) or assigned
    else:
        assigned = names_of(here)[1]
    for owner, block, index in reversed(stands):
        assigned = reads.block(block[index + 1 :], assigned) or assigned
        if isinstance(owner, LOOPS):
            assigned = reads.statement(owner, assigned) or assigned


# --- what matters -----------------------------------------------------------------------------------


class _Flow(NamedTuple):
    """Data flow of a statement: the variables that it reads, and those that it assigns or changes.

    `acts` has the variables whose values affect more than output, such as arguments of calls other than
    `print`. `is_change`: whether the statement changes objects in place. `is_item`: whether it is a `for`,
    which assigns its items.
    """

    reads: Names
    writes: Names
    acts: Names = NONE
    is_change: bool = False
    is_item: bool = False


@functools.cache
def _analysis(code: CodeType, returns: bool) -> tuple[Names, Names]:
    """Return two sets of variables of the function `code`: loop variables, and those that matter.

    Loop variables, such as `epoch`, are assigned only by `for` statements; a restarted script assigns them
    again. Variables that matter affect more than output. `returns`: whether the function's return value
    affects more than output.
    """
    flows = list(_flows(scope(code).body, NONE, returns))
    items = NONE.union(*(one.writes for one in flows if one.is_item))
    own = [one.writes for one in flows if not (one.is_item or one.is_change)]
    matter, before = NONE.union(*(one.acts for one in flows)), None
    while matter != before:
        before = matter
        for one in flows:
            matter |= one.reads if not one.writes.isdisjoint(matter) else NONE
    return items.difference(*own), matter


def _flows(block: Block, control: Names, returns: bool) -> Iterator[_Flow]:
    """Yield the data flow of each statement in `block`, also of statements inside of others.

    `control`: variables in conditions around the statements, which count as read by each of them.
    `returns`: whether the function's return value affects more than output.
    """
    for one in block:
        evaluated = heads(one)
        loads, stores = _names(evaluated)
        reads, acts = control | loads, NONE.union(*map(_acts, evaluated))
        is_left = isinstance(one, ast.Break | ast.Continue | ast.Raise)
        is_set = isinstance(one, ast.Assign) and not all(
            isinstance(to, _PLAIN) for to in one.targets
        )
        if is_left or is_set or (returns and isinstance(one, ast.Return)):
            acts |= reads
        if changed := frozenset(_changed(one)):
            yield _Flow(reads, changed, is_change=True)
        is_item = isinstance(one, ast.For)
        yield _Flow(reads, stores, acts | control if acts else acts, is_item=is_item)
        for inner in blocks(one) if not isinstance(one, SCOPES) else ():
            yield from _flows(inner, reads, returns)


def _names(nodes: Iterable[ast.AST]) -> tuple[Names, Names]:
    found = [names_of(node) for node in nodes]
    return NONE.union(*(one[0] for one in found)), NONE.union(*(one[1] for one in found))


def _changed(statement: Any) -> Iterator[str]:
    """Yield variables whose objects a statement changes in place: `a += …`, `a[0] += …`, `a.append(…)`."""
    if isinstance(statement, ast.AugAssign):
        yield _base(statement.target)
    elif isinstance(statement, ast.Expr):
        calls = (one for one in ast.walk(statement) if isinstance(one, ast.Call))
        yield from (_base(one.func) for one in calls if _is_change(one))


def _base(node: Any) -> str:
    """Return the variable that an expression begins with, as `a` of `a.b[0].c()`, or an empty text."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def _acts(node: ast.AST) -> Names:
    """Return the variables in `node` that are arguments of calls, or of `yield`, `assert` etc.

    Left out are calls without effects besides output, such as `print`, and calls that only change an object
    in place, such as `append`.
    """
    if isinstance(node, SCOPES):
        return NONE
    found = NONE.union(*map(_acts, ast.iter_child_nodes(node)))
    is_call = isinstance(node, ast.Call) and not (_is_pure(node) or _is_change(node))
    is_given = isinstance(node, ast.Yield | ast.YieldFrom | ast.Await | ast.Assert | ast.Delete)
    return found | names_of(node)[0] if is_call or is_given else found


def _is_pure(call: ast.Call) -> bool:
    is_builtin = isinstance(call.func, ast.Name) and isinstance(
        getattr(builtins, call.func.id, None), type
    )
    return is_builtin or _PURE.fullmatch(_called(call)) is not None


def _is_change(call: ast.Call) -> bool:
    return _base(call.func) != _called(call) and _CHANGES.fullmatch(_called(call)) is not None


def _called(call: ast.Call) -> str:
    return str(getattr(call.func, "attr", getattr(call.func, "id", "")))
