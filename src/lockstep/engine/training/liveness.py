"""Liveness of variables: what a running frame reads before it writes it, found in its bytecode.

A loop *carries* a variable if its next iteration reads what an earlier one has left there. Such a variable
is neither made anew by the script nor part of what a run saves.

Every path from where the frame stands is followed. Two things are taken as they mostly are, or every name
that is printed after a loop would count as carried: a `for` that is reached from above runs its body at
least once, and an exception comes from the end of its `try`.
"""

from __future__ import annotations

import bisect
import dis
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple

_ACCESS = re.compile(
    r"(LOAD|STORE|DELETE)_(FAST|NAME|GLOBAL|DEREF|CLASSDEREF|CLOSURE|FROM_DICT_OR_(?:GLOBALS|DEREF))"
)
_GLOBAL = ("GLOBAL", "FROM_DICT_OR_GLOBALS")
_RETURNS = frozenset({"RETURN_VALUE", "RETURN_CONST"})
_ENDS = _RETURNS | {"RAISE_VARARGS", "RERAISE"}
_JUMPS = frozenset({"JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT"})
_HAS_TARGET = frozenset((*dis.hasjrel, *dis.hasjabs))


class Variable(NamedTuple):
    """A variable of a frame: one of its own, or one of its module."""

    name: str
    is_global: bool


Names = frozenset[Variable]
#: Variables, each with the line where the loop writes it, or else reads it.
Lines = Mapping[Variable, int]


class _Access(NamedTuple):
    variable: Variable
    is_read: bool
    line: int


def carried(frame: FrameType) -> Lines:
    """Return the variables that are read before they are written if the loop of `frame` goes on.

    Functions of the same module count as readers of its variables, and nested functions as readers of
    those that they close over.
    """
    return _answer(frame, _Graph.carried)


def carried_around(frame: FrameType) -> Lines:
    """Return the variables that the next loop around the one of `frame` carries; none without one."""
    return _answer(frame, _Graph.carried_around)


def read_after(frame: FrameType) -> Lines:
    """Return the variables that are read behind the loop that `frame` stands at before they are written."""
    return _answer(frame, _Graph.read_after)


def is_at_for(frame: FrameType) -> bool:
    """Whether `frame` stands at a `for`, which asks its iterator for the next item."""
    return _graph(frame.f_code, is_module(frame)).is_loop(frame.f_lasti)


def is_module(frame: FrameType) -> bool:
    """Whether the variables of `frame` are those of its module."""
    is_function = frame.f_code.co_flags & inspect.CO_OPTIMIZED
    return not is_function and frame.f_locals is frame.f_globals


#: Answers by question, code, place and module; each keeps its code, so that the id stays its own.
_answers: dict[tuple[Any, ...], tuple[CodeType, Lines]] = {}


def _answer(frame: FrameType, question: Callable[[_Graph, int, Names], Names]) -> Lines:
    code, variables = frame.f_code, frame.f_globals
    key = question, id(code), frame.f_lasti, id(variables), len(variables)
    if key not in _answers:
        outside = _read_by_functions(variables)
        if not is_module(frame):
            outside = {**outside, **_read_by_nested(code)}
        graph = _graph(code, is_module(frame))
        here = graph.at(frame.f_lasti)
        found = question(graph, here, frozenset(outside))
        lines = {
            one: graph.line_in_loop(one, here) or outside.get(one, 0) or graph.line(one)
            for one in found
        }
        _answers[key] = code, lines
    return _answers[key][1]


@functools.cache
def _graph(code: CodeType, is_module: bool) -> _Graph:
    return _Graph(code, is_module)


class _Graph:
    """The instructions of a code object, and the ways between them.

    A node is an instruction. Each `FOR_ITER` has a second one: reached by the jump at the end of its body.

    Attributes:
        ops: the instructions.
    """

    def __init__(self, code: CodeType, is_module: bool) -> None:
        self.ops: list[dis.Instruction] = []
        self._index: dict[int, int] = {}  # of an instruction, by its offset or its prefix's
        bytecode = dis.Bytecode(code)
        for op in bytecode:
            self._index[op.offset] = len(self.ops)
            if op.opname != "EXTENDED_ARG":
                self.ops.append(op)
        self._offsets = [op.offset for op in self.ops]
        hidden = self._of_comprehensions(bytecode.exception_entries)  # type: ignore[attr-defined]
        self._accesses = [
            [] if i in hidden else list(_accesses(op, is_module)) for i, op in enumerate(self.ops)
        ]
        for i, names in hidden.items():
            kept = _accesses(self.ops[i], is_module)
            self._accesses[i] = [one for one in kept if one.variable.name not in names]
        self._nexts = self._edges(bytecode.exception_entries)  # type: ignore[attr-defined]
        self._bits: dict[Variable, int] = {}
        self._for_targets = {i: self._targets(i) for i in self._loops()}

    def is_loop(self, offset: int) -> bool:
        """Whether a `for` stands at `offset`."""
        return self.ops[self.at(offset)].opname == "FOR_ITER"

    def _loops(self) -> Iterator[int]:
        return (i for i, op in enumerate(self.ops) if op.opname == "FOR_ITER")

    def at(self, offset: int) -> int:
        """Return the instruction at `offset`, which may point into what is cached behind it."""
        while offset not in self._index and offset > 0:
            offset -= 2
        return self._index.get(offset, 0)

    # --- the ways --------------------------------------------------------------------------------

    def _edges(self, entries: Iterable[Any]) -> list[list[int]]:
        """Return what follows each node: `2 * i` is instruction `i`, `2 * i + 1` it after its jump back."""
        nexts: list[list[int]] = []
        for i, op in enumerate(self.ops):
            below = [] if op.opname in _ENDS or op.opname in _JUMPS else [2 * (i + 1)]
            if op.opcode not in _HAS_TARGET:
                nexts += [below, below]
                continue
            target = self._index[op.argval]
            is_back = target <= i and self.ops[target].opname == "FOR_ITER"
            both = [*below, 2 * target + is_back]
            nexts += [below, both] if op.opname == "FOR_ITER" else [both, both]
        handlers: dict[int, int] = {}
        for entry in entries:
            last = self._before(entry.end)
            handlers[entry.target] = max(handlers.get(entry.target, last), last)
        for target, last in handlers.items():
            for node in (2 * last, 2 * last + 1):
                nexts[node] = [*nexts[node], 2 * self._index[target]]
        return nexts

    def _before(self, end: int) -> int:
        """Return the last instruction before the offset `end`."""
        return bisect.bisect_left(self._offsets, end) - 1

    def _of_comprehensions(self, entries: Iterable[Any]) -> dict[int, set[str]]:
        """Return for instructions the names that are an inlined comprehension's own there.

        From Python 3.12 on it saves a variable of the same name before, and restores it behind.
        """
        hidden: dict[int, set[str]] = {}
        spans = [(entry.start, entry.end) for entry in entries]
        for i, op in enumerate(self.ops):
            if op.opname != "LOAD_FAST_AND_CLEAR":
                continue
            end = min((span for span in spans if span[0] >= op.offset), default=(0, 0))[1]
            stop = next(
                (
                    j
                    for j in range(i + 1, len(self.ops))
                    if self._offsets[j] >= end and self._stores(j, op.argval)
                ),
                i,
            )
            for j in range(i, stop + 1):
                hidden.setdefault(j, set()).add(op.argval)
        return hidden

    def _stores(self, i: int, name: str) -> bool:
        return any(
            one.variable.name == name and not one.is_read for one in _accesses(self.ops[i], False)
        )

    # --- what is live ----------------------------------------------------------------------------

    def carried(self, here: int, outside: Names) -> Names:
        """Return what is live in the next iteration; `outside` is read by other code."""
        live = self._live(here, outside)
        counter = self._counter(here, live)
        return (self._named(live, self._nexts[2 * here]) - self._given_by_loops()) | counter

    def carried_around(self, here: int, outside: Names) -> Names:
        """Return what is live where the loop around `here`, which is not its own, goes on."""
        targets = [
            target
            for i, op in enumerate(self.ops)
            if op.opcode in _HAS_TARGET and (target := self._index[op.argval]) <= here <= i
        ]
        around = max((one for one in targets if one != here), default=None)
        if around is None:
            return frozenset()
        return self._named(self._live(here, outside), [2 * around]) - self._given_by_loops()

    def read_after(self, here: int, outside: Names) -> Names:
        """Return what is live behind the loop at instruction `here`, or behind that instruction."""
        is_loop = self.ops[here].opname == "FOR_ITER"
        ways = self._nexts[2 * here + 1][1:] if is_loop else self._nexts[2 * here]
        return self._named(self._live(here, outside), ways)

    def _named(self, live: list[int], nodes: Iterable[int]) -> Names:
        bits = functools.reduce(int.__or__, (live[node] for node in nodes), 0)
        return frozenset(one for one, bit in self._bits.items() if bits & bit)

    def _live(self, here: int, outside: Names) -> list[int]:
        """Return what is live before each node, as bits: read on a way from there before it is written."""
        read = sum(self._bits.setdefault(one, 1 << len(self._bits)) for one in outside)
        again = 2 * here + (self.ops[here].opname == "FOR_ITER")
        reads, kept = self._effects()
        live = [0] * (len(self._nexts) + 2)
        changed = True
        while changed:
            changed = False
            for node in reversed(range(len(self._nexts))):
                now = read if node == again or self.ops[node // 2].opname in _RETURNS else 0
                for following in self._nexts[node]:
                    now |= live[following]
                now = reads[node // 2] | (now & kept[node // 2])
                if now != live[node]:
                    live[node], changed = now, True
        return live

    def _effects(self) -> tuple[list[int], list[int]]:
        """Return for each instruction what it reads, and what it does not write, as bits."""
        reads, kept = [0] * len(self.ops), [-1] * len(self.ops)
        for i, accesses in enumerate(self._accesses):
            for one in reversed(accesses):
                bit = self._bits.setdefault(one.variable, 1 << len(self._bits))
                if one.is_read:
                    reads[i] |= bit
                else:
                    reads[i], kept[i] = reads[i] & ~bit, kept[i] & ~bit
        return reads, kept

    # --- targets of loops ------------------------------------------------------------------------

    def _targets(self, loop: int) -> list[tuple[int, Variable]]:
        """Return the variables that a `for` assigns, each with the instruction that does it."""
        found: list[tuple[int, Variable]] = []
        open_, i = 1, loop + 1
        while open_ > 0 and i < len(self.ops):
            op = self.ops[i]
            stores = [one.variable for one in self._accesses[i] if not one.is_read]
            if op.opname == "UNPACK_SEQUENCE":
                open_ += (op.arg or 0) - 1
            elif stores:
                found += [(i, one) for one in stores]
                open_ -= len(stores)
            else:
                break
            i += 1
        return found

    def _given_by_loops(self) -> Names:
        """Return the variables that nothing but loops assign: a script that starts again has them, too."""
        at = {pair for targets in self._for_targets.values() for pair in targets}
        others = {
            one.variable
            for i, accesses in enumerate(self._accesses)
            for one in accesses
            if not one.is_read and (i, one.variable) not in at
        }
        return frozenset(variable for _, variable in at if variable not in others)

    def _counter(self, here: int, live: list[int]) -> Names:
        """Return the index of `for index, … in enumerate(…)` where it is used: nothing keeps its count."""
        targets = self._for_targets.get(here, [])
        if len(targets) < 2 or not self._enumerates(here):
            return frozenset()
        last, index = targets[-1][0], targets[0][1]
        return frozenset({index} & self._named(live, [2 * (last + 1)]))

    def _enumerates(self, loop: int) -> bool:
        """Whether the iterator of a `for` is made by `enumerate`, the first name of its expression."""
        start = next((i for i in reversed(range(loop)) if self.ops[i].opname == "GET_ITER"), 0)
        line = _line(self.ops[loop])
        names: list[str] = []
        for i in range(start, -1, -1):
            if _line(self.ops[i]) != line or self.ops[i].opname.startswith(("STORE", "FOR_ITER")):
                break
            names += [one.variable.name for one in self._accesses[i]]
        return names[-1:] == ["enumerate"]

    # --- lines -----------------------------------------------------------------------------------

    def line_in_loop(self, variable: Variable, here: int) -> int:
        """Return the line where the innermost loop around `here` that has `variable` writes or reads it."""
        spans = (range(i, self._index[self.ops[i].argval]) for i in self._loops())
        around = sorted((one for one in spans if here in one), key=len)
        return next((line for one in around if (line := self.line(variable, one))), 0)

    def line(self, variable: Variable, within: range | None = None) -> int:
        """Return the line of the last write to `variable`, else of the first read; 0 without one."""
        parts = self._accesses if within is None else self._accesses[within.start : within.stop]
        own = [one for accesses in parts for one in accesses if one.variable == variable]
        writes = [one.line for one in own if not one.is_read]
        return [*writes[-1:], *(one.line for one in own), 0][0]


def _accesses(op: dis.Instruction, is_module: bool) -> Iterator[_Access]:
    """Return what an instruction reads and writes, in this order; some do two things."""
    if isinstance(op.argval, CodeType):  # of a function that is made, and mostly used, here
        yield from (_Access(one, True, line) for one, line in _globals_of(op.argval).items())
    kinds = _ACCESS.findall(op.opname)
    names = op.argval if isinstance(op.argval, tuple) else (op.argval,)
    for (verb, where), name in zip(kinds, names, strict=False):
        is_global = where in _GLOBAL or (is_module and where == "NAME")
        yield _Access(Variable(name, is_global), verb == "LOAD", _line(op))


def _line(op: dis.Instruction) -> int:
    return (op.positions.lineno if op.positions else 0) or 0


# --- readers outside of the frame ------------------------------------------------------------------


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Return a code object, and those of what it defines."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


@functools.cache
def _globals_of(code: CodeType) -> Mapping[Variable, int]:
    """Return what a function, and those in it, read of the module's variables."""
    return {
        one.variable: one.line
        for part in _codes(code)
        for op in dis.get_instructions(part)
        for one in _accesses(op, False)
        if one.is_read and one.variable.is_global
    }


@functools.cache
def _read_by_nested(code: CodeType) -> Mapping[Variable, int]:
    """Return which variables of a function the functions in it read."""
    own = {*code.co_cellvars, *code.co_freevars}
    nested = (part for part in _codes(code) if part is not code)
    return {
        Variable(one.variable.name, False): one.line
        for part in nested
        for op in dis.get_instructions(part)
        for one in _accesses(op, False)
        if one.is_read and one.variable.name in own and one.variable.name in part.co_freevars
    }


#: Of a module by the id of its variables: their number, and what functions read of them.
_known: dict[int, tuple[int, Mapping[Variable, int]]] = {}


def _read_by_functions(variables: Mapping[str, Any]) -> Mapping[Variable, int]:
    """Return which variables of a module its functions and methods read."""
    number, found = _known.get(id(variables), (-1, {}))
    if number != len(variables):
        found = {}
        for function in _functions(variables):
            found |= _globals_of(function.__code__)
        _known[id(variables)] = (len(variables), found)
    return found


def _functions(variables: Mapping[str, Any]) -> Iterator[FunctionType]:
    for value in list(variables.values()):
        own = list(vars(value).values()) if _is_class_of(value, variables) else [value]
        for one in own:
            function = inspect.getattr_static(one, "__func__", one)
            # What a decorator such as torch.no_grad() has wrapped.
            while isinstance(function, FunctionType) and "__wrapped__" in vars(function):
                function = vars(function)["__wrapped__"]
            if isinstance(function, FunctionType) and function.__globals__ is variables:
                yield function


def _is_class_of(value: Any, variables: Mapping[str, Any]) -> bool:
    return type(value) is type and value.__module__ == variables.get("__name__")
