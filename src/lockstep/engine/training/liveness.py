"""Liveness of variables: what a running frame reads before it writes it, found in its source.

A loop *carries* a variable if its next iteration reads what an earlier one has left there. Such a variable
is neither made anew by the script nor part of what a run saves.

The way from where the frame stands is followed through its syntax tree. Two things are taken as they mostly
are, or every name that is used after a loop would count as carried: the body of a `for` runs at least once,
and an exception comes from the end of its `try`.

A variable *matters* unless all that is computed from it is shown: printed, logged, in a progress bar.
"""

from __future__ import annotations

import ast
import builtins
import dis
import functools
import inspect
import itertools
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
    Stand,
    blocks,
    heads,
    imported,
    is_for,
    names_of,
    parts,
    scope,
    way_of,
)

#: Calls that change nothing but what is shown, and calls that change the container that they are made on.
_PURE = re.compile(
    r"abs|all|any|arg(max|min)|array|asarray|clone|copy|cpu|detach|dict|divmod|eq|exp|float|format|get|int|"
    r"isfinite|isnan|item|items|join|keys|len|log(\w*[a-z0-9])?|max|mean|median|min|numel|numpy|perf_counter|"
    r"monotonic|pow|round|size|sorted|sqrt|stack|std|strftime|sum|tensor|time|to|tolist|topk|values|print|display|"
    r"info|debug|warning|write(row|rows|lines)?|flush|add_(scalars?|text|image|figure|histogram)|"
    r"set_(postfix|description)(_str)?"
)
_CHANGES = re.compile(
    r"add|append(left)?|clear|extend|insert|pop(left)?|remove|reset|setdefault|update"
)


class Variable(NamedTuple):
    """A variable of a frame: one of its own, or one of its module."""

    name: str
    is_global: bool


class Use(NamedTuple):
    """How a loop uses a variable.

    Attributes:
        line: where it is written, or else read.
        matters: whether more than output is computed from it.
        is_item: whether the loop itself assigns it, as the index of `enumerate`.
    """

    line: int
    matters: bool = True
    is_item: bool = False


Uses = Mapping[Variable, Use]


def carried(frame: FrameType, *, returns: bool = True) -> Uses:
    """Return the variables that are read before they are written if the loop of `frame` goes on.

    Args:
        frame: a frame of the script.
        returns: whether it matters what its function returns.
    """
    return _uses(frame, "next", returns)


def carried_around(frame: FrameType, *, returns: bool = True) -> Uses:
    """Return the variables that the next loop around the one of `frame` carries; none without one."""
    return _uses(frame, "around", returns)


def read_after(frame: FrameType, *, returns: bool = True) -> Uses:
    """Return the variables that are read behind the loop that `frame` stands at before they are written."""
    return _uses(frame, "after", returns)


def result_matters(frame: FrameType, *, returns: bool) -> bool:
    """Whether more than output is computed from the result of the call that `frame` is in."""
    way = way_of(frame.f_code, frame.f_lasti)
    now = way[-1].now if way else None
    if isinstance(now, ast.Assign | ast.AugAssign | ast.AnnAssign):
        return not names_of(now)[1].isdisjoint(_analysis(frame.f_code, returns)[1])
    is_shown = isinstance(now, ast.Expr) and isinstance(now.value, ast.Call) and _is_pure(now.value)
    return returns if isinstance(now, ast.Return) else not is_shown


def is_at_for(frame: FrameType) -> bool:
    """Whether `frame` stands at a `for`, which asks its iterator for the next item."""
    return is_for(frame.f_code, frame.f_lasti)


def is_module(frame: FrameType) -> bool:
    """Whether the variables of `frame` are those of its module."""
    is_function = frame.f_code.co_flags & inspect.CO_OPTIMIZED
    return not is_function and frame.f_locals is frame.f_globals


@functools.cache
def globals_of(code: CodeType) -> Names:
    """Return which variables of its module a function, and those in it, read."""
    own = (op.argval for op in dis.get_instructions(code) if op.opname == "LOAD_GLOBAL")
    inner = (globals_of(one) for one in code.co_consts if isinstance(one, CodeType))
    return frozenset(own).union(*inner)


def _uses(frame: FrameType, question: str, returns: bool) -> Uses:
    code = frame.f_code
    own = {*code.co_varnames, *code.co_cellvars, *code.co_freevars}
    found = _answer(code, frame.f_lasti, question, returns)
    return {Variable(name, name not in own): use for name, use in found.items()}


@functools.cache
def _answer(code: CodeType, offset: int, question: str, returns: bool) -> Mapping[str, Use]:
    way = way_of(code, offset)
    if not way:
        return {}
    reads = _Reads()
    _follow(way, reads, question, at_for=is_for(code, offset))
    given, matter = _analysis(code, returns)
    found = {
        **{name: line for name, line in reads.found.items() if name not in given},
        **reads.items,
    }
    return {
        name: Use(reads.written.get(name, line), name in matter, name in reads.items)
        for name, line in found.items()
    }


# --- read before it is written ----------------------------------------------------------------------


class _Reads:
    """Goes through statements, and collects what they read before they assign it.

    Attributes:
        found: the names, with the lines of the statements.
        items: those of `watched` that are read.
        written: where names are written first on the way.
        watched: names that are looked for.
    """

    def __init__(self) -> None:
        self.found: dict[str, int] = {}
        self.items: dict[str, int] = {}
        self.written: dict[str, int] = {}
        self.watched = NONE

    def evaluate(self, nodes: Iterable[ast.AST], assigned: Names, line: int) -> Names:
        """Evaluate parts of a statement; return what is assigned then."""
        names = [names_of(node) for node in nodes]
        loads, stores = (
            NONE.union(*(one[0] for one in names)),
            NONE.union(*(one[1] for one in names)),
        )
        self.found = dict.fromkeys(loads - assigned, line) | self.found
        self.items |= dict.fromkeys(loads & self.watched, line)
        self.written = dict.fromkeys(stores, line) | self.written
        return assigned | stores

    def block(self, statements: Block, assigned: Names | None) -> Names | None:
        """Go through a block; return what all ways to its end assign, `None` without such a way."""
        for statement in statements:
            if assigned is None:
                break
            assigned = self.statement(statement, assigned)
        return assigned

    def statement(self, one: ast.stmt, assigned: Names) -> Names | None:
        """Go through a statement, as `block` does."""
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


def _follow(way: Sequence[Stand], reads: _Reads, question: str, *, at_for: bool) -> None:
    """Go through the next pass of a loop, and what comes behind it."""
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
        is_watched = question == "next" and isinstance(getattr(here, "iter", None), ast.Call)
        reads.watched = assigned if is_watched else NONE
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
    """What a statement computes: `writes` from `reads`; `acts` is what calls in it get.

    Attributes:
        origins: names of the objects that `writes` may name, too.
        is_change: whether it changes objects that `writes` name.
        is_item: whether a loop does it.
    """

    reads: Names
    writes: Names
    acts: Names
    origins: Names
    is_change: bool = False
    is_item: bool = False


@functools.cache
def _analysis(code: CodeType, returns: bool) -> tuple[Names, Names]:
    """Return the variables that nothing but loops assign, which a script that starts again has, too.

    Also those from which more than output is computed.
    """
    flows = list(_flows(scope(code).body, NONE, returns))
    items = NONE.union(*(one.writes for one in flows if one.is_item))
    own = [one for one in flows if not (one.is_item or one.is_change)]
    origins: dict[str, Names] = {}
    modules = imported(code.co_filename)
    for one in flows:
        for name in one.writes:
            origins[name] = origins.get(name, NONE) | (one.origins - modules)
    matter = NONE.union(*(one.acts for one in flows))
    for _ in flows:  # at most: each round adds a statement, or is the last
        before = matter
        for one in flows:
            changed = one.writes if one.is_change else ()
            names = one.writes.union(*(origins[name] for name in changed))
            matter |= one.reads if not names.isdisjoint(matter) else NONE
        if matter == before:
            break
    return items.difference(*(one.writes for one in own)), matter


def _flows(block: Block, control: Names, returns: bool) -> Iterator[_Flow]:
    """Return what statements compute, where `control` decides whether they are run."""
    for one in itertools.chain.from_iterable(map(_assignments, block)):
        evaluated = heads(one)
        names = [names_of(head) for head in evaluated]
        loads = NONE.union(*(read for read, _ in names))
        stores = NONE.union(*(written for _, written in names))
        reads, acts = control | loads, NONE.union(*map(_acts, evaluated))
        is_left = isinstance(one, ast.Break | ast.Continue | ast.Raise)
        if is_left or (returns and isinstance(one, ast.Return)):
            acts |= reads
        changed = frozenset(_changed(one))
        if changed:
            yield _Flow(reads, changed, NONE, NONE, is_change=True)
        calls = (
            call for head in evaluated for call in ast.walk(head) if isinstance(call, ast.Call)
        )
        called = {call.func.id for call in calls if isinstance(call.func, ast.Name)}
        origins = NONE if isinstance(one, ast.AugAssign) else loads - called
        acts = acts | control if acts else acts
        yield _Flow(
            reads, stores, acts, origins, is_item=isinstance(one, ast.For) and not _goes_on(one)
        )
        for inner in blocks(one) if not isinstance(one, SCOPES) else ():
            yield from _flows(inner, reads, returns)


def _assignments(statement: ast.stmt) -> Iterator[ast.stmt]:
    """Return `a, b = c, d` as two statements, any other one as it is."""
    match statement:
        case ast.Assign(targets=[ast.Tuple(elts=own)], value=ast.Tuple(elts=values)):
            if len(own) == len(values):
                pairs = zip(own, values, strict=True)
                yield from (ast.Assign([target], value) for target, value in pairs)
                return
    yield statement


def _goes_on(loop: ast.For) -> bool:
    """Whether a loop takes items beside those of the run, which begin anew after a crash."""
    calls = [one for one in ast.walk(loop.iter) if isinstance(one, ast.Call)]
    is_beside = any(_called(one) in ("zip", "enumerate") for one in calls)
    return is_beside and any(_called(one) in ("epochs", "batches") for one in calls)


def _changed(statement: Any) -> Iterator[str]:
    """Return whose objects a statement changes: by `a.b = …`, `a[0] += …`, `a += …` or `a.append(…)`."""
    is_aug, parts = isinstance(statement, ast.AugAssign), []
    if is_aug or isinstance(statement, ast.Assign | ast.AnnAssign):
        targets = getattr(statement, "targets", [getattr(statement, "target", None)])
        parts = [one for one in targets if is_aug or not isinstance(one, ast.Name)]
    elif isinstance(statement, ast.Expr):
        parts = [
            one.func for one in ast.walk(statement) if isinstance(one, ast.Call) and _is_change(one)
        ]
    yield from filter(None, map(_base, parts))


def _base(node: Any) -> str:
    """Return the variable that `a.b[0].c()` begins with; nothing where that is none."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def _acts(node: ast.AST) -> Names:
    """Return the names that are given to what may have effects: calls of what is not known, and `yield`."""
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
