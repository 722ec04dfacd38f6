"""Stages of models that are not sequential: the graph of the forward pass (torch.fx), split.

The model's own `forward` runs once on symbols, and the parts that it calls stay whole. Only a part that is
heavier than a stage should be, or has the place where the user wants a cut inside of it, is looked into in
turn. What Python does in what is traced (reads a number, decides by it) it does once, for all passes.

`torch.fx.passes.split_module` makes stages, too, but hands parameters from one to the next as values.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn

from lockstep.engine.data.randomness import Generators, undisturbed
from lockstep.engine.layout.balance import balance
from lockstep.engine.strategies.pipeline.stage import (
    HINT,
    LIST_HINT,
    Program,
    Stage,
    find,
    pieces_from,
)
from lockstep.errors import LockstepError, ModelError, UsageError
from lockstep.world import accelerator

#: How much lighter the heaviest stage has to become for a part to be looked into.
_WORTH = 0.9


@dataclass(frozen=True, slots=True)
class _Traced:
    """A model's forward pass as a graph.

    Attributes:
        graph: of the calls.
        constants: tensors that `forward` makes without its arguments, by their names in the graph.
        opened: names of the parts that were looked into.
        fixed: arguments that have their default value in it.
        steps: its nodes that compute something, in order.
        weights: for each of them, bytes of the parameters that it is the first to use.
    """

    graph: fx.Graph
    constants: dict[str, Any]
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
    starts = _balanced(traced, module, count)
    if split is not None:
        starts = [0, *(_begin(name, traced) for name in split)]
    return _program(module, traced, pieces_from(starts, len(traced.steps), split))


# --- where to cut ----------------------------------------------------------------------------------


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
        if (lightest := _heaviest(traced, count)) < _WORTH * least:
            best, least = traced, lightest
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


def _begin(name: str, traced: _Traced) -> int:
    """Return the first step that belongs to the part `name`."""
    for place, node in enumerate(traced.steps):
        if node.op == "call_module" and f"{node.target}.".startswith(f"{name}."):
            return place
    raise ModelError(
        f"split names {name!r}, which the model's forward pass does not call", hint=HINT
    )


def _balanced(traced: _Traced, module: nn.Module, count: int) -> list[int]:
    """Return where stages begin that have about as many bytes of parameters as each other."""
    heavy = [place for place, weight in enumerate(traced.weights) if weight]
    if len(heavy) < count:
        raise UsageError(
            f"pipeline stages don't fit ranks: {type(module).__name__} has {len(heavy)} parts with "
            f"parameters that can be told apart, for {count} ranks of a model",
            hint="choose another mesh (--mesh DATAxMODEL), or " + HINT,
        )
    alive = _alive(traced)
    starts = [0]
    for piece in balance([traced.weights[place] for place in heavy], count)[1:]:
        # What has no parameters may go to either side: cut where the fewest values cross.
        before, begin = heavy[piece.start - 1], heavy[piece.start]
        starts.append(min(range(begin, before, -1), key=lambda place: len(alive[place])))
    return starts


def _alive(traced: _Traced) -> list[list[fx.Node]]:
    """Return, for each step, the results of steps before it that it or later ones use."""
    places = {node: place for place, node in enumerate(traced.steps)}
    end = len(traced.steps)
    last = {node: max((places.get(u, end) for u in node.users), default=-1) for node in places}
    return [[node for node in traced.steps[:place] if last[node] >= place] for place in range(end)]


# --- stages ----------------------------------------------------------------------------------------


def _program(module: nn.Module, traced: _Traced, pieces: Sequence[range]) -> Program:
    alive = _alive(traced)
    stages = []
    for piece in pieces:
        end = piece.stop == len(traced.steps)
        keeps = () if end else tuple(node.name for node in alive[piece.stop])
        stages.append(_stage(module, traced, traced.steps[piece.start : piece.stop], keeps))
    placeholders = [node.name for node in traced.graph.nodes if node.op == "placeholder"]
    signature = inspect.signature(module.forward)
    inputs = dict(zip(signature.parameters, placeholders, strict=True))
    return Program(tuple(stages), signature, inputs, traced.fixed)


def _stage(
    module: nn.Module, traced: _Traced, steps: Sequence[fx.Node], keeps: tuple[str, ...]
) -> Stage:
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    outputs = [n for n in traced.graph.nodes if n.op == "output" and steps[-1] is traced.steps[-1]]
    used = [n for node in (*steps, *outputs) for n in node.all_input_nodes]
    constants = dict.fromkeys(n for n in used if n.op == "get_attr")
    takes = dict.fromkeys(n for n in used if n not in set(steps) and n.op != "get_attr")
    for node in takes:
        copies[node] = graph.placeholder(node.name)
    for node in (*constants, *steps):
        copies[node] = graph.node_copy(node, lambda n: copies[n])
    if outputs:
        gives: tuple[str, ...] = ("output",)
        graph.output((fx.map_arg(outputs[0].args[0], lambda n: copies[n]),))
    else:
        gives = tuple(node.name for node in steps if node.name in keeps)
        graph.output(tuple(copies[node] for node in steps if node.name in keeps))
    own = vars(module)
    own.update(traced.constants)  # torch looks for them there
    try:
        compiled = fx.GraphModule(module, graph)
    finally:
        for name in traced.constants:
            del own[name]
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


# --- the graph -------------------------------------------------------------------------------------


class _Tracer(fx.Tracer):
    """Keeps parts whole, but for those that are to be looked into."""

    proxy_buffer_attributes = True  # what is computed of a buffer is computed each time

    def __init__(self, opened: frozenset[str]) -> None:
        super().__init__()
        self._opened, self._mode = opened, _mode()
        self.left_mode = False

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name not in self._opened

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        self.left_mode |= _mode() != self._mode
        return super().create_node(*args, **kwargs)


def _mode() -> tuple[bool, ...]:
    """Return what a `with` may change for the calls inside, which a graph does not have."""
    autocast = [torch.is_autocast_enabled(kind) for kind in ("cpu", accelerator.kind() or "cuda")]
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *autocast


def _trace(module: nn.Module, opened: frozenset[str]) -> _Traced:
    """Return the forward pass of `module`, which is the same one in training and in evaluation.

    Args:
        module: the model; it is left as it was.
        opened: names of the parts that are to be looked into.

    Raises:
        ModelError: if it cannot be traced, or another pass is seen to be another one.
    """
    fixed = _defaults(module)
    graph, constants = _trace_in(True, module, opened, fixed)
    other, others = _trace_in(False, module, opened, fixed)
    alike = [_equal(value, others.get(name)) for name, value in constants.items()]
    if str(graph) != str(other) or not all(alike):
        raise ModelError(
            f"{type(module).__name__}.forward does other things in training than in evaluation; "
            "expected only its parts to, such as nn.Dropout",
            hint=HINT,
        )
    _copy_constants(graph, constants)
    _forget_checks(graph)
    steps = [n for n in graph.nodes if n.op not in ("placeholder", "output", "get_attr")]
    seen: set[int] = set()
    weights = []
    for node in steps:
        own = {id(p): p for p in _parameters(module, node) if id(p) not in seen}
        seen |= own.keys()
        weights.append(sum(p.numel() * p.element_size() for p in own.values()))
    return _Traced(graph, constants, opened, fixed, steps, weights)


def _equal(one: Any, other: Any) -> bool:
    if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
        return True  # the graph shows it
    alike = one.dtype == other.dtype and one.shape == other.shape
    return alike and torch.allclose(one, other, 0, 0, equal_nan=True)


def _trace_in(
    training: bool, module: nn.Module, opened: frozenset[str], fixed: dict[str, Any]
) -> tuple[fx.Graph, dict[str, Any]]:
    """Trace as in training, or as in evaluation: not by `Module.train`, which users override."""
    name, modes = type(module).__name__, {part: part.training for part in module.modules()}
    before = Generators.now()
    with undisturbed(), _restored(module) as changed, torch.set_grad_enabled(training):
        try:
            for part in modes:
                part.training = training
            tracer = _Tracer(opened)
            graph = tracer.trace(module, concrete_args=dict(fixed) or None)
        except LockstepError:
            raise
        except Exception as error:  # whatever the user's code does with a symbol
            told = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            raise ModelError(
                f"{name}.forward cannot be traced, as cutting it into stages takes: {told}",
                hint=LIST_HINT,
            ) from error
        finally:
            for part, own in modes.items():
                part.training = own
        has_drawn = Generators.now().since(before) is not None
        targets = dict.fromkeys(str(n.target) for n in graph.nodes if n.op == "get_attr")
        constants = {t: vars(module)[t] for t in targets if changed.is_new(t)}
        _refuse(name, tracer, changed.names(constants), has_drawn=has_drawn)
    return graph, constants


def _refuse(name: str, tracer: _Tracer, changed: Sequence[str], *, has_drawn: bool) -> None:
    """Refuse what Python is seen to have done in the pass, and no graph does.

    Raises:
        ModelError: if it has drawn, run a part in another mode, or set an attribute.
    """
    seen = ""
    if has_drawn:
        seen = "draws random numbers itself"
    elif tracer.left_mode:
        seen = "has a part of it under torch.no_grad() or torch.autocast"
    elif changed:
        seen = f"sets the attribute {changed[0]}"
    if seen:
        raise ModelError(
            f"{name}.forward {seen}, which a trace would do once for all passes; expected that in the "
            "parts that it calls",
            hint=LIST_HINT,
        )


class _Attributes:
    """The attributes of a model's modules, as they were."""

    def __init__(self, module: nn.Module) -> None:
        self._spaces = [
            (type(part), space, dict(space))
            for part in module.modules()
            for space in (vars(part), part._parameters, part._buffers, part._modules)
        ]

    def is_new(self, name: str) -> bool:
        """Whether the model itself has got an attribute of this name since."""
        _, now, before = self._spaces[0]
        return name in now and name not in before

    def names(self, constants: dict[str, Any]) -> list[str]:
        """Return those that are others now, but for what a `cached_property` has kept."""
        return [
            name
            for kind, now, before in self._spaces
            for name in sorted(self._differing(now, before) - constants.keys())
            if not isinstance(inspect.getattr_static(kind, name, None), cached_property)
        ]

    @staticmethod
    def _differing(now: dict[str, Any], before: dict[str, Any]) -> set[str]:
        same = {name for name in now.keys() & before.keys() if now[name] is before[name]}
        return (now.keys() | before.keys()) - same

    def restore(self) -> None:
        """Set them to what they were."""
        for _, now, before in self._spaces:
            if self._differing(now, before):
                now.clear()
                now.update(before)


@contextmanager
def _restored(module: nn.Module) -> Iterator[_Attributes]:
    """Let the body change attributes of the model's modules, and restore them."""
    attributes = _Attributes(module)
    try:
        yield attributes
    finally:
        attributes.restore()


def _copy_constants(graph: fx.Graph, constants: dict[str, Any]) -> None:
    """Let each pass have constants of its own, as `forward` may write into what it makes."""
    for name in (n for n, value in constants.items() if isinstance(value, torch.Tensor)):
        first, *others = [n for n in graph.nodes if n.op == "get_attr" and n.target == name]
        with graph.inserting_after(first):
            copy = graph.call_function(torch.clone, (first,))
        first.replace_all_uses_with(copy, delete_user_cb=lambda user, c=copy: user is not c)
        for node in others:
            node.replace_all_uses_with(copy)
            graph.erase_node(node)


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


def _defaults(module: nn.Module) -> dict[str, Any]:
    """Return the arguments of `forward` that have a default value.

    Raises:
        ModelError: if it takes any number of arguments.
    """
    parameters = inspect.signature(module.forward).parameters.values()
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        raise ModelError(
            f"{type(module).__name__}.forward takes any number of arguments; expected each to have a "
            "name, for its calls to be traced",
            hint=LIST_HINT,
        )
    return {p.name: p.default for p in parameters if p.default is not p.empty}
