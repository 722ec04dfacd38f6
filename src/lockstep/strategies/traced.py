"""Cutting the forward pass of any model into stages.

The model's own `forward` runs once on symbols (torch.fx), and the parts that it calls stay whole. Only a
part that is heavier than a stage should be, or has the place where the user wants a cut inside of it, is
looked into in turn.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from lockstep.errors import ModelError, UsageError
from lockstep.layout.cut import balance
from lockstep.strategies.stage import HINT, Program, Stage, check_order, find
from lockstep.strategies.tracing import Trace, defaults, trace

#: How much lighter the heaviest stage has to become for a part to be looked into.
_WORTH = 0.9


@dataclass(frozen=True, slots=True)
class _Traced:
    """A model's forward pass as a graph.

    Attributes:
        trace: the graph of the calls, and what it depends on.
        opened: names of the parts that were looked into.
        fixed: arguments that have their default value in it.
        steps: its nodes that compute something, in order.
        weights: for each of them, bytes of the parameters that it is the first to use.
    """

    trace: Trace
    opened: frozenset[str]
    fixed: dict[str, Any]
    steps: list[fx.Node]
    weights: list[int]


def cut_traced(module: nn.Module, count: int, split: Sequence[str] | None) -> Program:
    """Return `module` as `count` stages.

    Args:
        module: the model.
        count: number of stages.
        split: names of the parts that the second and each later stage begin with.

    Raises:
        UsageError: if there are not enough parts.
        ModelError: if the model cannot be traced, or cut there.
    """
    for name in split or ():
        find(name, [other for other, _ in module.named_modules() if other])
    traced = _open(module, count, split or ())
    if split is None:
        pieces = _balanced(traced, module, count)
    else:
        starts = [0, *(_begin(name, traced) for name in split)]
        pieces = [
            range(a, b) for a, b in zip(starts, [*starts[1:], len(traced.steps)], strict=True)
        ]
        check_order(pieces, split)
    return _program(module, traced, pieces)


def _open(module: nn.Module, count: int, split: Sequence[str]) -> _Traced:
    """Trace `module`, and look into parts where that makes the heaviest stage a good deal lighter."""
    opened = frozenset(name[:end] for name in split for end, c in enumerate(name) if c == ".")
    traced = best = _trace(module, opened)
    least = _heaviest(traced, count)
    closed: set[str] = set()
    while not split and (heavy := _too_heavy(module, traced, count, closed)) is not None:
        try:
            traced = _trace(module, traced.opened | {heavy})
        except ModelError:
            closed.add(heavy)
            continue
        if (weight := _heaviest(traced, count)) < _WORTH * least:
            best, least = traced, weight
    return best


def _heaviest(traced: _Traced, count: int) -> float:
    """Return the weight of the heaviest of `count` stages; infinite if there cannot be as many."""
    weights = [weight for weight in traced.weights if weight]
    if len(weights) < count:
        return float("inf")
    return max(sum(weights[place] for place in piece) for piece in balance(weights, count))


def _too_heavy(module: nn.Module, traced: _Traced, count: int, closed: set[str]) -> str | None:
    """Return the heaviest part that is worth a look inside; `None` if the stages are fine as it is."""
    share = sum(traced.weights) / count
    few = sum(weight > 0 for weight in traced.weights) < count
    candidates = [
        (weight, str(node.target))
        for node, weight in zip(traced.steps, traced.weights, strict=True)
        if node.op == "call_module"
        and str(node.target) not in closed
        and any(True for _ in module.get_submodule(str(node.target)).children())
        and (few or weight > share)
    ]
    return max(candidates)[1] if candidates else None


def _trace(module: nn.Module, opened: frozenset[str]) -> _Traced:
    fixed = defaults(module)
    found = trace(module, opened, fixed)
    graph = found.graph
    _forget_checks(graph)
    steps = [n for n in graph.nodes if n.op not in ("placeholder", "output", "get_attr")]
    seen: set[int] = set()
    weights = []
    for node in steps:
        own = {id(p): p for p in _parameters(module, node) if id(p) not in seen}
        seen |= own.keys()
        weights.append(sum(p.numel() * p.element_size() for p in own.values()))
    return _Traced(found, opened, fixed, steps, weights)


def _forget_checks(graph: fx.Graph) -> None:
    """Take out torch's own checks that arguments have their default values: `Program.bind` has them."""
    for node in graph.nodes:
        checked = node.all_input_nodes[:1] if _is_check(node) else []
        if any(n.op == "placeholder" or _compares_an_argument(n) for n in checked):
            graph.erase_node(node)
    for node in reversed(graph.nodes):
        if _compares_an_argument(node) and not node.users:
            graph.erase_node(node)


def _is_check(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "") in ("_assert", "_assert_is_none")


def _compares_an_argument(node: fx.Node) -> bool:
    return node.target is operator.eq and getattr(node.args[0], "op", "") == "placeholder"


def _parameters(module: nn.Module, node: fx.Node) -> list[nn.Parameter]:
    """Return the parameters of the part that a step calls, and those that it is given directly."""
    found = []
    if node.op == "call_module":
        found = list(module.get_submodule(str(node.target)).parameters())
    for constant in node.all_input_nodes:
        if constant.op == "get_attr":
            owner, _, name = str(constant.target).rpartition(".")
            value = getattr(module.get_submodule(owner), name, None)
            found += [value] if isinstance(value, nn.Parameter) else []
    return found


def _begin(name: str, traced: _Traced) -> int:
    """Return the first step that belongs to the part `name`."""
    for place, node in enumerate(traced.steps):
        target = str(node.target)
        if node.op == "call_module" and f"{target}.".startswith(f"{name}."):
            return place
    raise ModelError(
        f"split names {name!r}, which the model's forward pass does not call",
        hint=HINT,
    )


def _balanced(traced: _Traced, module: nn.Module, count: int) -> list[range]:
    heavy = [place for place, weight in enumerate(traced.weights) if weight]
    if len(heavy) < count:
        raise UsageError(
            f"pipeline stages don't fit ranks: {type(module).__name__} has {len(heavy)} parts with "
            f"parameters that can be told apart, for {count} ranks of a model",
            hint="choose another mesh (--mesh DATAxMODEL), or " + HINT,
        )
    pieces = balance([traced.weights[place] for place in heavy], count)
    alive = _alive(traced)
    starts = [0]
    for piece in pieces[1:]:
        # What has no parameters may go to either side: cut where the fewest values cross.
        before, begin = heavy[piece.start - 1], heavy[piece.start]
        starts.append(min(range(begin, before, -1), key=lambda place: len(alive[place])))
    return [range(a, b) for a, b in zip(starts, [*starts[1:], len(traced.steps)], strict=True)]


def _alive(traced: _Traced) -> list[list[fx.Node]]:
    """Return, for each step, the results of steps before it that it or later ones use."""
    places = {node: place for place, node in enumerate(traced.steps)}
    end = len(traced.steps)
    last = {node: max((places.get(u, end) for u in node.users), default=-1) for node in places}
    return [[node for node in traced.steps[:place] if last[node] >= place] for place in range(end)]


def _program(module: nn.Module, traced: _Traced, pieces: Sequence[range]) -> Program:
    alive = _alive(traced)
    stages = []
    for piece in pieces:
        steps = traced.steps[piece.start : piece.stop]
        end = piece.stop == len(traced.steps)
        keeps = () if end else tuple(node.name for node in alive[piece.stop])
        with traced.trace.lent_to(module):
            stages.append(_stage(module, traced, steps, keeps, end=end))
    placeholders = [node.name for node in traced.trace.graph.nodes if node.op == "placeholder"]
    signature = inspect.signature(module.forward)
    inputs = dict(zip(signature.parameters, placeholders, strict=True))
    return Program(tuple(stages), signature, inputs, traced.fixed, traced.trace.reads)


def _stage(
    module: nn.Module,
    traced: _Traced,
    steps: Sequence[fx.Node],
    keeps: tuple[str, ...],
    *,
    end: bool,
) -> Stage:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    own = set(steps)
    (output,) = (node for node in traced.trace.graph.nodes if node.op == "output")
    used = [n for node in (*steps, *([output] if end else ())) for n in node.all_input_nodes]
    constants = dict.fromkeys(n for n in used if n.op == "get_attr")
    takes = dict.fromkeys(n for n in used if n not in own and n.op != "get_attr")
    for node in takes:
        copies[node] = graph.placeholder(node.name)
    for node in (*constants, *steps):
        copies[node] = graph.node_copy(node, lambda n: copies[n])
    if end:
        gives: tuple[str, ...] = ("output",)
        returned: Any = fx.map_arg(output.args[0], lambda n: copies[n])
        graph.output((returned,))
    else:
        given = [node for node in steps if node.name in keeps]
        gives = tuple(node.name for node in given)
        graph.output(tuple(copies[node] for node in given))
    compiled = fx.GraphModule(module, graph)
    _without_strangers(compiled, module)
    called = [str(n.target) for n in steps if n.op == "call_module"] or [n.name for n in steps]
    return Stage(compiled, tuple(n.name for n in takes), gives, keeps, called[0], called[-1])


def _without_strangers(compiled: nn.Module, module: nn.Module) -> None:
    """Make plain attributes of what fx has made buffers, and are none of the model's: constants."""
    own = {id(buffer) for buffer in module.buffers()}
    for part in compiled.modules():
        for name, tensor in list(part._buffers.items()):
            if tensor is not None and id(tensor) not in own:
                del part._buffers[name]
                vars(part)[name] = tensor
