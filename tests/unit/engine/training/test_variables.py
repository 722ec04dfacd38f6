"""What is seen of the values that a script's variables hold, and what changes in them."""

from __future__ import annotations

import enum
import importlib
import itertools
import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from lockstep.engine.training import liveness, variables
from lockstep.engine.training.observations import Observation, VariableChange


class Phase(enum.Enum):
    WARM, MAIN = 1, 2


class Pair(NamedTuple):
    a: int
    b: int


@dataclass
class Nested:
    ratio: float = 1.0


@dataclass
class State:
    best: float = 0.0
    nested: Nested = field(default_factory=Nested)
    history: list[float] = field(default_factory=list)


class Slots:
    __slots__ = ("count", "unset")

    def __init__(self) -> None:
        self.count = 0


class Hostile:
    """An object whose every method raises."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self) -> None:
        self.count = 0

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("compared")

    def __repr__(self) -> str:
        raise RuntimeError("shown")

    def __len__(self) -> int:
        raise RuntimeError("measured")

    def __bool__(self) -> bool:
        raise RuntimeError("tested")

    @property
    def value(self) -> int:
        raise RuntimeError("read")


class HostileList(list[int]):
    def __iter__(self) -> Any:
        raise RuntimeError("iterated")

    def __len__(self) -> int:
        raise RuntimeError("measured")

    def __getitem__(self, index: Any) -> Any:
        raise RuntimeError("indexed")


class Liar:
    """An object that says it is of another class."""

    @property
    def __class__(self) -> Any:
        raise RuntimeError("asked")

    @__class__.setter
    def __class__(self, value: Any) -> None:
        raise RuntimeError("set")


def changes(
    value: Any, change: Callable[[Any], Any], skip: frozenset[int] = frozenset()
) -> list[VariableChange]:
    """Return those of `all_changes` that are of `value`."""
    found = all_changes(value, change, skip)
    return [one for one in found if one.name.partition(".")[0] == "value"]


def all_changes(
    value: Any, change: Callable[[Any], Any], skip: frozenset[int] = frozenset()
) -> list[VariableChange]:
    """Return what changes where a loop carries `value`, and `change` acts on it, or returns another."""
    seen: list[Observation] = []

    def look() -> Any:
        for _ in range(2):
            seen.append(variables.observe(sys._getframe(1), skip, innermost=True))
            yield

    for _ in look():
        now = change(value)
        value = value if now is None else now
    return seen[1].changes_since(seen[0])


def append(value: Any) -> None:
    value.append(9)


def add(value: Any) -> None:
    value += 1


def more(value: Any) -> Any:
    return value + 1


def middle(value: Any) -> None:
    """Change many elements, none of them at an end."""
    value.view(-1)[100:-100].add_(1)


CHANGED = {
    "int": (0, more, "value"),
    "float": (1.0, lambda v: v * 0.8, "value"),
    "bool": (False, lambda v: not v, "value"),
    "none": (None, lambda _: 1, "value"),
    "str": ("a" * 100, lambda v: v + "b", "value"),
    "long str": ("a" * 10_000, lambda v: v + "b", "value"),
    "bytes": (b"a", lambda v: v + b"b", "value"),
    "numpy scalar": (np.float32(1), more, "value"),
    "list": ([1], append, "value"),
    "long list": (list(range(10_000)), append, "value"),
    "at the bound": (list(range(64)), append, "value"),
    "beyond the bound": (list(range(65)), append, "value"),
    "full deque": (deque(range(1000), maxlen=1000), append, "value"),
    "tuple": ((1,), lambda v: (*v, 2), "value"),
    "long tuple": (tuple(range(100)), lambda v: (*v[:-1], -1), "value"),
    "named tuple": (Pair(1, 2), lambda v: v._replace(b=3), "value"),
    "dict": ({"a": [1]}, lambda v: v["a"].append(2), "value"),
    "long dict": ({n: n for n in range(100)}, lambda v: v.update({99: 0}), "value"),
    "ordered": (OrderedDict(a=1), lambda v: v.update(b=1), "value"),
    "counter": (Counter("ab"), lambda v: v.update("a"), "value"),
    "default": (defaultdict(int), lambda v: v.update(a=1), "value"),
    "set": ({1}, lambda v: v.add(2), "value"),
    "long set": (set(range(200)), lambda v: v.add(-1), "value"),
    "enum": (Phase.WARM, lambda _: Phase.MAIN, "value"),
    "scalar tensor": (torch.zeros(()), add, "value"),
    "tensor of 64 KiB": (torch.zeros(1 << 14), middle, "value"),
    "larger tensor": (torch.zeros((1 << 14) + 1), middle, "value"),
    "bfloat16": (torch.zeros(8, dtype=torch.bfloat16), add, "value"),
    "array": (np.zeros(5), add, "value"),
    "large array": (np.zeros(1 << 14), add, "value"),
    "module": (nn.Linear(2, 2), lambda v: add(v.weight.data), "value"),
    "torch's generator": (
        torch.Generator(),
        lambda v: torch.rand(1, generator=v) and None,
        "value",
    ),
    "numpy's generator": (np.random.default_rng(0), lambda v: v.random() and None, "value"),
    "python's generator": (random.Random(0), lambda v: v.random() and None, "value"),
    "attribute": (State(), lambda v: setattr(v, "best", 0.5), "value.best"),
    "list of an object": (State(), lambda v: v.history.append(1.0), "value.history"),
    "two deep": (State(), lambda v: setattr(v.nested, "ratio", 0.5), "value.nested.ratio"),
    "slots": (Slots(), lambda v: setattr(v, "count", 1), "value.count"),
    "objects in a list": ([Nested()], lambda v: setattr(v[0], "ratio", 0.5), "value"),
    "hostile": (Hostile(), lambda v: setattr(v, "count", 1), "value.count"),
    "hostile list": (HostileList([1]), append, "value"),
    "elements of all kinds": ([Hostile(), Liar(), 1], append, "value"),
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_value_that_changes(name: str) -> None:
    value, change, expected = CHANGED[name]
    (found,) = changes(value, change)
    assert (found.name, found.before != found.after or "tensor" in name) == (expected, True)
    assert found.line > 0
    assert max(len(found.before), len(found.after)) <= 60


@pytest.mark.parametrize("name", CHANGED)
def test_a_value_that_stays(name: str) -> None:
    assert changes(CHANGED[name][0], lambda _: None) == []


def test_values_that_are_shown() -> None:
    (ratio,) = changes(1.0, lambda v: v * 0.8)
    assert (ratio.before, ratio.after) == ("1.0", "0.8")
    assert ratio.shown.startswith("`value` (test_variables.py:")
    (losses,) = changes([0.5], append)
    assert (losses.before, losses.after) == ("[0.5]", "[0.5, 9]")


UNKNOWN: dict[str, Callable[[], Any]] = {
    "function": lambda: print,
    "module": lambda: sys,
    "map": lambda: map,
    "class": lambda: State,
    "liar": Liar,
    "generator": lambda: (n for n in ()),
    "optimizer": lambda: torch.optim.SGD([torch.zeros(1)]),
    "sparse": lambda: torch.eye(2).to_sparse(),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_values_without_a_fingerprint(name: str) -> None:
    """They count by their class, or by their name."""
    value = UNKNOWN[name]()
    assert changes(value, lambda _: None) == []
    (found,) = changes(value, lambda _: [1])
    assert found.before.startswith("<")


def test_what_belongs_to_the_run_has_none() -> None:
    model = nn.Linear(2, 2)
    own = frozenset(map(id, (model, *model.parameters())))
    grow = lambda _: add(model.weight.data)  # noqa: E731
    assert changes(model, grow, own) == []
    assert changes(list(model.parameters()), grow, own) == []
    assert changes(nn.Sequential(model), grow, own) == []
    assert [one.name for one in changes(list(model.parameters()), grow)] == ["value"]


def test_cycles_and_depth_end() -> None:
    cycle: list[Any] = [1]
    cycle.append(cycle)
    assert [one.name for one in changes(cycle, append)] == ["value"]
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert changes(deep, lambda _: None) == []
    state = State()
    state.nested = state  # type: ignore[assignment]
    found = changes(state, lambda v: setattr(v, "best", 1.0))
    assert [one.name for one in found] == ["value.best"]


def test_the_budget_is_shared_and_what_is_cut_by_it_is_not_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked = 0
    text = variables._Walk.text

    def counted(self: Any, value: Any, depth: int = 4) -> Any:
        nonlocal looked
        looked += 1
        return text(self, value, depth)

    monkeypatch.setattr(variables._Walk, "text", counted)
    wide = [[[list(range(64)) for _ in range(64)] for _ in range(64)] for _ in range(64)]
    assert changes(wide, append) == []
    assert looked < 3 * 64**2


#: What functions, and modules of the user's, hold is reached, too.
COUNT = [0]


def counts() -> int:
    COUNT[0] += 1
    return COUNT[0]


def made() -> Callable[[], int]:
    total = 0

    def grows(*, step: list[int] = [1]) -> int:  # noqa: B006 - as scripts have it
        nonlocal total
        total += step[0]
        return total

    return grows


class Noisy(torch.utils.data.Dataset[int]):
    """A dataset with plain numbers, and what may grow."""

    def __init__(self) -> None:
        self.sigma, self.index, self.store, self.rows = 0.5, [2, 1], {}, [None]

    def __len__(self) -> int:
        return 2


REACHED: dict[str, tuple[Any, Callable[[Any], Any], str]] = {
    "global of a function": (counts, lambda v: v() and None, "COUNT"),
    "closure": (made(), lambda v: v() and None, "total"),
    "keyword default": (made(), lambda v: v.__kwdefaults__["step"].append(1), "value.step"),
    "number of a dataset": (Noisy(), lambda v: setattr(v, "sigma", 0.4), "value.sigma"),
    "order of a dataset": (Noisy(), lambda v: v.index.reverse(), "value.index"),
    "dataset in a subset": (
        torch.utils.data.Subset(Noisy(), [0]),
        lambda v: setattr(v.dataset, "sigma", 0.4),
        "value.dataset.sigma",
    ),
    "layer": (nn.Dropout(0.1), lambda v: setattr(v, "p", 0.2), "value.p"),
    "counting iterator": (itertools.count(1), lambda v: next(v) and None, "value"),
    "another iterator": (itertools.cycle("ab"), lambda v: next(v) and None, "value"),
    "another function": (counts, lambda _: made, "value"),
}


@pytest.mark.parametrize("name", REACHED)
def test_what_is_reached_from_a_variable(name: str) -> None:
    value, change, expected = REACHED[name]
    assert expected in [one.name for one in all_changes(value, change)]


@pytest.mark.parametrize("cache", ["store", "rows"])
def test_a_cache_of_a_dataset_is_no_state(cache: str) -> None:
    def fill(value: Noisy) -> None:
        value.store[1] = 2
        value.rows[0] = torch.zeros(1)  # type: ignore[call-overload]

    assert changes(Noisy(), fill) == []


def test_a_module_of_the_users(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "settings_of_mine.py").write_text("rate = 1.0\n_cache = {}\n")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("settings_of_mine")

    def change(value: Any) -> None:
        value.rate *= 0.5
        value._cache[1] = 1

    assert [one.name for one in changes(module, change)] == ["value.rate"]


class Raising:
    """An object of which nothing can be asked."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("asked for an attribute")

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError("asked for an attribute")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("compared")

    def __hash__(self) -> int:
        raise RuntimeError("hashed")


def test_objects_whose_methods_raise_are_passed_over() -> None:
    state = State()
    state.nested = Raising()  # type: ignore[assignment]
    found = changes(state, lambda v: setattr(v, "best", 1.0))
    assert [one.name for one in found] == ["value.best"]


@pytest.mark.parametrize(("beyond", "expected"), [(0, ["value"]), (1, [])])
def test_the_last_value_of_the_budget(beyond: int, expected: list[str]) -> None:
    """A list of ten numbers costs eleven; one more than the budget is not compared."""
    seen = []

    def look() -> Any:
        for _ in range(2):
            found = variables.observe(
                sys._getframe(1), innermost=True, budget=11 - beyond, look=only
            )
            seen.append(found)
            yield

    def only(frame: Any, *, returns: bool) -> liveness.Uses:
        uses = liveness.carried(frame, returns=returns)
        return {one: use for one, use in uses.items() if one.name == "value"}

    value = list(range(10))
    for _ in look():
        value[0] += 1
        counts_by(value)
    assert [one.name for one in seen[1].changes_since(seen[0])] == expected


def counts_by(value: list[int]) -> int:
    return value[0]


@pytest.mark.parametrize(("depth", "expected"), [(4, 1), (5, 0)])
def test_the_depth_of_attributes(depth: int, expected: int) -> None:
    """The fourth attribute of an attribute is looked at, and no further one."""
    root = Nested()

    def innermost(value: Any) -> Any:
        return value if type(value.ratio) is float else innermost(value.ratio)

    for _ in range(depth - 1):
        innermost(root).ratio = Nested()
    found = changes(root, lambda v: setattr(innermost(v), "ratio", 2.0))
    assert len(found) == expected


def test_locals_are_not_kept_alive() -> None:
    """A frame's dictionary of them would hold a batch until the function ends."""

    class Batch:
        alive = 0

        def __init__(self) -> None:
            Batch.alive += 1

        def __del__(self) -> None:
            Batch.alive -= 1

    def look() -> Any:
        for _ in range(3):
            variables.observe(sys._getframe(1), innermost=True)
            yield

    batch = None
    for _ in look():
        assert Batch.alive <= 1
        before = batch
        batch = None
        del before
        assert Batch.alive == 0
        batch = Batch()
    assert isinstance(batch, Batch)


def test_the_scripts_own_dictionary_of_locals_stays() -> None:
    count = 0
    own = locals()

    def look() -> Any:
        yield
        variables.observe(sys._getframe(1), innermost=True)

    for _ in look():
        count = -count
    assert "count" in own


def test_fingerprints_of_another_process() -> None:
    seen: list[Observation] = []

    def look() -> Any:
        for _ in range(2):
            seen.append(variables.observe(sys._getframe(1), innermost=True))
            yield

    ratio, same = 1.0, 5
    for _ in look():
        ratio *= 0.8
        same = max(same, 0)
        assert changes(ratio + same, lambda _: None) == []
    saved = seen[0].texts(4096)
    changed = {one.name: (one.before, one.after) for one in seen[1].changes_since_saved(saved)}
    assert changed["ratio"] == ("1.0", "0.8")
    assert "same" not in changed
    assert seen[0].changes_since_saved(saved) == []
    assert len(seen[0].texts(60)) < len(saved)


def test_other_frames_are_not_compared() -> None:
    seen: list[Observation] = []

    def look() -> Any:
        seen.append(
            variables.observe(sys._getframe(1), innermost=True, number=lambda _: len(seen) + 1)
        )
        yield

    def epoch(rate: float) -> float:
        total = rate
        for _ in look():
            total += rate
        return total

    assert epoch(1.0) != epoch(2.0)
    assert seen[1].values
    assert seen[1].changes_since(seen[0]) == []
