"""Stages of models that are not `nn.Sequential`: the graph of the forward pass (torch.fx) is split.

The model's `forward` is traced; a call of a submodule is one node. The `forward` of a submodule is traced,
too, if the submodule has more parameters than a stage should have, or if the user wants to cut inside the
submodule.

`torch.fx.passes.split_module` splits graphs, too, but passes parameters from stage to stage as values.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence

from torch import fx, nn

from lockstep.engine.layout.balance import balance
from lockstep.engine.strategies.pipeline.fx_graph import ForwardGraph, trace
from lockstep.engine.strategies.pipeline.stage import (
    HINT,
    Program,
    Stage,
    find,
    pieces_from,
)
from lockstep.errors import ModelError, UsageError

#: A submodule is traced into only if the largest stage then has less than this fraction of its bytes.
_WORTH = 0.9


def cut_traced(module: nn.Module, count: int, split: Sequence[str] | None) -> Program:
    """Trace `module` by torch.fx, and return it cut into `count` pipeline stages.

    `split`: names of the submodules with which the second and each later stage begin.

    Raises:
        UsageError: if fewer parts of the model have parameters than there are stages.
        ModelError: if the model cannot be traced, or cannot be cut at `split`.
    """
    for name in split or ():
        find(name, [other for other, _ in module.named_modules() if other])
    traced = _open(module, count, split or ())
    starts = _balanced(traced, module, count)
    if split is not None:
        starts = [0, *(_begin(name, traced) for name in split)]
    alive = _alive(traced)
    stages = []
    for piece in pieces_from(starts, len(traced.steps), split):
        end = piece.stop == len(traced.steps)
        keeps = () if end else tuple(node.name for node in alive[piece.stop])
        stages.append(_stage(module, traced, traced.steps[piece.start : piece.stop], keeps))
    placeholders = [node.name for node in traced.graph.nodes if node.op == "placeholder"]
    signature = inspect.signature(module.forward)
    inputs = dict(zip(signature.parameters, placeholders, strict=True))
    return Program(tuple(stages), signature, inputs, traced.fixed)


# --- where to cut ----------------------------------------------------------------------------------


def _open(module: nn.Module, count: int, split: Sequence[str]) -> ForwardGraph:
    """Return the graph of the forward pass of `module`, for a division into `count` stages.

    A submodule is one node, or is traced into if it is too large for a stage. This is done only if the
    largest stage then has at least 10 % fewer bytes. `split`: names of submodules at which the user cuts.
    If there are any, only the submodules that contain them are traced into.
    """
    opened = frozenset(name[:end] for name in split for end, c in enumerate(name) if c == ".")
    traced = best = trace(module, opened)
    least = _heaviest(traced, count)
    closed: set[str] = set()
    while not split and (heavy := _too_heavy(module, traced, count, closed)) is not None:
        try:
            traced = trace(module, traced.opened | {heavy})
        except ModelError:
            closed.add(heavy)
            continue
        if (lightest := _heaviest(traced, count)) < _WORTH * least:
            best, least = traced, lightest
    return best


def _heaviest(traced: ForwardGraph, count: int) -> float:
    """Return the parameter bytes of the largest stage, if the graph is cut into `count` balanced stages.

    The result is infinite if the model has too few parts with parameters.
    """
    weights = [weight for weight in traced.weights if weight]
    if len(weights) < count:
        return float("inf")
    return max(sum(weights[place] for place in piece) for piece in balance(weights, count))


def _too_heavy(module: nn.Module, traced: ForwardGraph, count: int, closed: set[str]) -> str | None:
    """Return the name of the largest submodule that must be split for balanced stages, or `None`.

    Only submodules with submodules of their own that are one node of the graph `traced` are considered.
    Such a node must be split if it has more than 1/`count` of the parameter bytes, or if fewer than `count`
    nodes, the number of stages, have parameters. `closed`: names of submodules that cannot be traced, which
    are left out.
    """
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


def _begin(name: str, traced: ForwardGraph) -> int:
    """Return the index in `traced.steps` of the first call of the submodule `name`.

    If the submodule is traced into, the first call of one of its parts counts.

    Raises:
        ModelError: if the forward pass does not call the submodule.
    """
    for place, node in enumerate(traced.steps):
        if node.op == "call_module" and f"{node.target}.".startswith(f"{name}."):
            return place
    raise ModelError(
        f"split names {name!r}, which the model's forward pass does not call", hint=HINT
    )


def _balanced(traced: ForwardGraph, module: nn.Module, count: int) -> list[int]:
    """Return the index of each stage's first step, so that stages have similar bytes of parameters.

    A step is a node of the graph.
    """
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
        # Steps without parameters may be in either stage: cut where the fewest values are sent.
        before, begin = heavy[piece.start - 1], heavy[piece.start]
        starts.append(min(range(begin, before, -1), key=lambda place: len(alive[place])))
    return starts


def _alive(traced: ForwardGraph) -> list[list[fx.Node]]:
    """Return, for each step, the earlier steps whose results this step or a later one uses.

    A step is a node of the graph.
    """
    places = {node: place for place, node in enumerate(traced.steps)}
    end = len(traced.steps)
    last = {node: max((places.get(u, end) for u in node.users), default=-1) for node in places}
    return [[node for node in traced.steps[:place] if last[node] >= place] for place in range(end)]


# --- stages ----------------------------------------------------------------------------------------


def _stage(
    module: nn.Module, traced: ForwardGraph, steps: Sequence[fx.Node], keeps: tuple[str, ...]
) -> Stage:
    """Return the pipeline stage that computes the nodes `steps` of the graph `traced`.

    `keeps`: names of the values that the stage sends to the next one, for use there or later.
    """
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
    own.update(traced.constants)  # `GraphModule` copies them from the module's attributes
    try:
        compiled = fx.GraphModule(module, graph)
    finally:
        for name in traced.constants:
            del own[name]
    # fx registers constants as buffers; they become plain attributes.
    buffers = {id(buffer) for buffer in module.buffers()}
    for part in compiled.modules():
        for name, tensor in list(part._buffers.items()):
            if tensor is not None and id(tensor) not in buffers:
                del part._buffers[name]
                vars(part)[name] = tensor
    called = [str(n.target) for n in steps if n.op == "call_module"] or [n.name for n in steps]
    return Stage(compiled, tuple(n.name for n in takes), gives, keeps, called[0], called[-1])
