"""Which variables of a running loop its next iteration reads, and which the code behind it reads."""

from __future__ import annotations

import contextlib
import itertools
import linecache
import sys
import textwrap
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from lockstep.engine.training import liveness

_numbers = itertools.count()


class Probe:
    """An iterator that looks at the frame that asks for its second item."""

    def __init__(self, look: Callable[[FrameType], liveness.Uses]) -> None:
        self._look = look
        self.uses: dict[str, liveness.VariableUse] = {}

    def __iter__(self) -> Iterator[int]:
        yield 0
        frame = sys._getframe(1)
        self.uses = {one.name: use for one, use in self._look(frame).items()}
        yield 1

    def step(self, *_: object) -> float:
        """Do what the script cannot see."""
        return 1.0

    def log(self, **_: object) -> None:
        """Show something."""

    def looks(self) -> None:
        """Look at the frame that calls this, as a point inside a function of the script is."""
        frame = sys._getframe(1)
        self.uses = {one.name: use for one, use in self._look(frame).items()}


def run(
    body: str,
    names: str,
    look: Callable[[FrameType], liveness.Uses] = liveness.carried,
    *,
    in_function: bool = True,
) -> dict[str, liveness.VariableUse]:
    """Return which of `names` are found, with their uses, in a function or a module of this text."""
    probe = Probe(look)
    text = textwrap.dedent(body).strip("\n")
    if in_function:
        text = "def main():\n" + textwrap.indent(text, "    ") + "\nmain()"
    space: dict[str, Any] = {"train": probe, "probe": probe, "__name__": "script"}
    file = f"script-{next(_numbers)}.py"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    exec(compile(text, file, "exec"), space)  # noqa: S102 - what is under test reads frames
    # Batches are items of the loop, too: only numbers count among them.
    items = names.split() if look is liveness.carried else []
    uses = {name: use for name, use in probe.uses.items() if name in names.split()}
    return {name: use for name, use in uses.items() if not (use.is_item and name == "x" in items)}


#: A script, the names that are looked for, and those of them that its loop carries.
CARRIED = {
    "product": ("ratio = 1.0\nfor x in train:\n    ratio *= 0.8", "ratio x", "ratio"),
    "best": ("best = 0\nfor x in train:\n    best = max(best, x)", "best", "best"),
    "list": ("losses = []\nfor x in train:\n    losses.append(x)", "losses", "losses"),
    "printed after": ("for x in train:\n    loss = x\nprint(loss)", "loss", ""),
    "read first": ("y = 0\nfor x in train:\n    z = y\n    y = x", "y z", "y"),
    "some passes": ("b = 0\nfor x in train:\n    if x:\n        b = x\nprint(b)", "b", "b"),
    "both branches": (
        "for x in train:\n    if x:\n        b = x\n    else:\n        b = 1\nprint(b)",
        "b",
        "",
    ),
    "enumerate": ("for i, x in enumerate(train):\n    y = i", "i x y", "i"),
    "enumerate, unread": ("for i, x in enumerate(train):\n    y = x", "i x y", ""),
    "enumerate, after": ("for i, x in enumerate(train):\n    y = x\nprint(i)", "i y", "i"),
    "enumerate of others": ("for a, b in [(1, 2)]:\n    for x in train:\n        y = a", "a", ""),
    "epoch": ("for epoch in range(2):\n    for x in train:\n        y = epoch", "epoch y", ""),
    "reset in the epoch": (
        "for epoch in range(2):\n    total = 0\n    for x in train:\n        total += x",
        "total",
        "total",
    ),
    "made in the epoch": (
        "for epoch in range(2):\n    for x in train:\n        loss = x\n    print(loss)",
        "loss",
        "",
    ),
    "changed by the epoch": (
        "r = 1\nfor epoch in range(2):\n    for x in train:\n        y = x\n    r *= 2",
        "r",
        "r",
    ),
    "while": (
        "n = 0\nit = iter(train)\nnext(it)\nwhile n < 1:\n    y = next(it)\n    n += 1",
        "n y",
        "n",
    ),
    "try": (
        "bad = 0\nfor x in train:\n    try:\n        y = x\n    except E:\n        bad += 1",
        "bad y",
        "bad",
    ),
    "try, its own": (
        "for x in train:\n    try:\n        y = x\n        z = y\n    except E:\n        print(y)",
        "y z",
        "",
    ),
    "finally": (
        "n = 0\nfor x in train:\n    try:\n        y = x\n    finally:\n        n += 1",
        "n y",
        "n",
    ),
    "with": ("n = 0\nfor x in train:\n    with open('/dev/null'):\n        n += x", "n", "n"),
    "with around": (
        "import io\nn = 0\nwith io.StringIO() as f:\n    for x in train:\n        y = x\nprint(y)",
        "y n",
        "",
    ),
    "comprehension": ("p = 1\nfor x in train:\n    q = [p for p in (x,)]\n    p = 2", "p q", ""),
    "past a comprehension": (
        "p = 1\nfor x in train:\n    q = [p for p in (x,)]\n    p = p + 1",
        "p q",
        "p",
    ),
    "read by a comprehension": ("k = 1\nfor x in train:\n    k = sum(k for _ in (x,))", "k", "k"),
    "nested function": (
        "n = 0\ndef f():\n    nonlocal n\n    n += 1\nfor x in train:\n    f()",
        "n f",
        "f",
    ),
    "zip": ("for x, n in zip(train, range(9)):\n    y = n", "n x", "n"),
    "items of a list": (
        "for n in [1]:\n    for x, m in [(1, 2)]:\n        for x in train: y = m",
        "m n",
        "",
    ),
    "closure of this pass": (
        "for x in train:\n    y = x\n    f = lambda: y\n    f()",
        "y",
        "",
    ),
    "global statement": (
        "global g\ng = 1\nfor x in train:\n    g = g * 2",
        "g",
        "g",
    ),
    "walrus": ("m = 0\nfor x in train:\n    if (m := m + x) > 9:\n        break", "m", "m"),
    "walrus first": ("for x in train:\n    if (m := x) > 9:\n        print(m)", "m", ""),
    "del": ("a = [1]\nfor x in train:\n    a = [x]\n    del a\n    b = 1", "a b", ""),
    "match": (
        "s = 0\nfor x in train:\n    match x:\n        case 0: s += 1\n        case t: u = t",
        "s t u",
        "s",
    ),
    "attribute": ("class A: n = 0\na = A()\nfor x in train:\n    a.n += 1", "a", "a"),
    "swap": ("a, b = 1, 2\nfor x in train:\n    a, b = b, a", "a b", "a b"),
    "continue": (
        "n = s = 0\nfor x in train:\n    if x:\n        n += 1\n        continue\n    s = n",
        "n s",
        "n",
    ),
    "targets in tuples": (
        "for x in train:\n    for a, (b, c) in [(1, (2, 3))]:\n        y = a + b + c",
        "a b c y",
        "",
    ),
}


@pytest.mark.parametrize("name", CARRIED)
@pytest.mark.parametrize("in_function", [True, False])
def test_what_a_loop_carries(name: str, in_function: bool) -> None:
    body, looked_for, expected = CARRIED[name]
    if not in_function:
        body = body.replace("nonlocal", "global").replace("global g\n", "")
    with contextlib.suppress(NameError):  # some end with a name that no pass has made
        assert set(run(body, looked_for, in_function=in_function)) == set(expected.split())


def test_a_frame_further_out_goes_on_behind_its_call() -> None:
    body = """
    def one_epoch():
        return 1
    best, seen, given = 0, [], 5
    for epoch in range(1):
        probe.looks()
        loss = one_epoch()
        best = max(best, loss)
        seen.append(loss)
    """
    assert set(run(body, "best seen given loss epoch")) == {"best", "seen"}


def test_generators_are_frames_as_others() -> None:
    body = """
    def losses():
        mean = 0
        for x in train:
            mean = 0.9 * mean + x
            last = x
            yield mean
    sum(losses())
    """
    assert set(run(body, "mean last")) == {"mean"}


def test_the_line_is_that_of_the_write_in_the_loop() -> None:
    body = """
    ratio = 1.0
    seen = []
    for epoch in range(1):
        for x in train:
            seen.append(x)
        ratio *= 0.8
    ratio = seen
    """
    found = run(body, "ratio seen", in_function=False)
    assert {name: use.line for name, use in found.items()} == {"ratio": 6, "seen": 5}


#: A body, the names that its loop carries, and those of them from which more than output is computed.
MATTERS = {
    "printed": ("t = 0\nfor x in train:\n    t += x\n    print(t)", "t", ""),
    "printed now and then": (
        "t = 0\nfor i, x in enumerate(train):\n    t += x\n    if i % 2:\n        print(t)\n        t = 0",
        "t i",
        "",
    ),
    "by another variable": (
        "t = 0\nfor x in train:\n    t += x\n    m = t / 2\n    print(f'{m}')",
        "t",
        "",
    ),
    "logged": ("t = 0\nfor x in train:\n    t += x\n    probe.log(loss=t)", "t", ""),
    "appended": ("r = []\nfor x in train:\n    r.append(x)\nprint(sum(r) / len(r))", "r", ""),
    "bar": ("bar = set()\nfor x in train:\n    bar.update([1])", "bar", ""),
    "timer": (
        "import time\nt = 0\nfor x in train:\n    print(time.time() - t)\n    t = time.time()",
        "t",
        "",
    ),
    "given": ("t = 0\nfor x in train:\n    t += x\n    step(t)", "t", "t"),
    "given later": ("r = []\nfor x in train:\n    r.append(x)\nstep(sum(r))", "r", "r"),
    "stops": ("t = 0\nfor x in train:\n    t += x\n    if t > 9:\n        break", "t", "t"),
    "in a name of its parts": (
        "g = [{}]\nr = 1\nfor x in train:\n    for h in g:\n        h['lr'] = r\n    r /= 2\n    step(g)",
        "r g",
        "r g",
    ),
    "effect in an assignment": (
        "r = 1\nfor x in train:\n    y = step(r)\n    r = r / 2\n    print(y)",
        "r",
        "r",
    ),
}


@pytest.mark.parametrize("name", MATTERS)
@pytest.mark.parametrize("in_function", [True, False])
def test_what_more_than_output_is_computed_from(name: str, in_function: bool) -> None:
    body, carried, expected = MATTERS[name]
    found = run(body.replace("step(", "probe.step("), carried, in_function=in_function)
    assert set(found) == set(carried.split())
    assert {one for one, use in found.items() if use.matters} == set(expected.split())


def test_what_a_function_returns_matters_where_its_caller_computes_with_it() -> None:
    body = """
    def epoch():
        total = 0
        for x in train:
            total += x
        return total
    shown = epoch()
    print(shown)
    """
    uses = []

    def look(frame: FrameType) -> liveness.Uses:
        caller = frame.f_back
        assert caller is not None
        found = liveness.carried(frame, returns=liveness.result_matters(caller, returns=True))
        uses.append(found)
        return found

    run(body, "total", look)
    run(body.replace("print(shown)", "probe.step(shown)"), "total", look)
    total = liveness.Variable("total", is_global=False)
    assert [one[total].matters for one in uses] == [False, True]


AFTER = {
    "statistics": (
        "n = t = 0\nfor x in train:\n    n += 1\n    t += x\nprint(t / n)",
        "n t x",
        "n t",
    ),
    "the last": ("for x in train:\n    y = x\n    z = y\nprint(y)", "x y z", "y"),
    "not used": ("n = 0\nfor x in train:\n    n += 1\nn = 5", "n", ""),
    "in the next epoch": (
        "a = 0\nfor epoch in range(2):\n    for x in train:\n        a += x",
        "a",
        "a",
    ),
    "made anew": (
        "for epoch in range(2):\n    a = 0\n    for x in train:\n        a += x",
        "a",
        "",
    ),
}


@pytest.mark.parametrize("name", AFTER)
@pytest.mark.parametrize("in_function", [True, False])
def test_what_is_read_behind_a_loop(name: str, in_function: bool) -> None:
    body, looked_for, expected = AFTER[name]
    found = run(body, looked_for, liveness.read_after, in_function=in_function)
    assert set(found) == set(expected.split())


AROUND = {
    "changed by the epoch": (
        "r = 1\nfor epoch in range(2):\n    for x in train:\n        y = r\n    r *= 2",
        "r y epoch",
        "r",
    ),
    "made by the epoch": (
        "for epoch in range(2):\n    r = epoch\n    for x in train:\n        y = r\nprint(y)",
        "r y epoch",
        "",
    ),
    "sometimes": (
        "b = 0\nfor epoch in range(2):\n    for x in train:\n        y = x\n    if y: b = y\nprint(b)",
        "b y",
        "b",
    ),
    "while": (
        "r = n = 0\nwhile n < 2:\n    for x in train:\n        y = r\n    n += 1\n    r += y",
        "r y n",
        "r n",
    ),
    "none around": ("r = 1\nfor x in train:\n    r *= 2", "r", ""),
}


@pytest.mark.parametrize("name", AROUND)
@pytest.mark.parametrize("in_function", [True, False])
def test_what_the_loop_around_carries(name: str, in_function: bool) -> None:
    body, looked_for, expected = AROUND[name]
    found = run(body, looked_for, liveness.carried_around, in_function=in_function)
    assert set(found) == set(expected.split())


def test_more_names_than_an_instruction_has_room_for() -> None:
    """Their jumps and loads have prefixes."""
    many = "\n".join(f"v{n} = {n}" for n in range(300))
    text = f"{many}\nfor x in train:\n    v299 = v298\n    v298 = x\n    " + "\n    ".join(
        f"v{n} = x" for n in range(290)
    )
    for in_function in (True, False):
        found = run(text, "v0 v289 v290 v298 v299", in_function=in_function)
        assert set(found) == {"v298"}


def test_a_while_loop_stands_at_no_for() -> None:
    frames = []

    def ask() -> int:
        frames.append(liveness.is_at_for(sys._getframe(1)))
        return len(frames)

    def items() -> Iterator[int]:
        frames.append(liveness.is_at_for(sys._getframe(1)))
        yield 0

    while ask() < 2:
        pass
    for _ in items():
        pass
    assert frames == [False, False, True]


def test_a_loop_that_the_interpreter_has_specialized() -> None:
    """Where it stands may then be behind the instruction, in what is cached there."""
    found = set()

    def items() -> Iterator[int]:
        for number in range(200):
            found.add(frozenset(one.name for one in liveness.carried(sys._getframe(1))))
            yield number

    mean = 0.0
    for item in items():
        last = item
        mean = 0.9 * mean + last
    assert {frozenset(one & {"mean", "last"}) for one in found} == {frozenset({"mean"})}
