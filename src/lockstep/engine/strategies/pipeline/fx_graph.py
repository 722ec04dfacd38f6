"""Tracing of a model's forward pass to a graph by torch.fx.

The model's `forward` runs once on symbolic values (`fx.Proxy`). So Python code in `forward`, such as an
`if`, runs once, not in each forward pass.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import torch
from torch import fx, nn

from lockstep.engine.data.randomness import Generators, undisturbed
from lockstep.engine.strategies.pipeline.stage import HINT, LIST_HINT
from lockstep.errors import LockstepError, ModelError
from lockstep.world import accelerator


@dataclass(frozen=True, slots=True)
class ForwardGraph:
    """A model's forward pass as a graph.

    Attributes:
        constants: tensors that `forward` computes without its arguments, by their names in the
            graph.
        opened: names of submodules whose `forward` was traced, too; any other submodule is one
            node.
        fixed: default values of arguments whose defaults the graph contains as constants.
        steps: nodes of the graph that compute something, in order.
        weights: for each step, bytes of the parameters that no earlier step uses.
    """

    graph: fx.Graph
    constants: dict[str, Any]
    opened: frozenset[str]
    fixed: dict[str, Any]
    steps: list[fx.Node]
    weights: list[int]


class _Tracer(fx.Tracer):
    """Traces the `forward` of a model and of its submodules `opened`.

    A call of any other submodule becomes one node of the graph.
    """

    proxy_buffer_attributes = True  # operations on buffers become nodes, computed in each pass

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
    """Return the current grad, inference and autocast modes, which torch.fx does not record in graphs."""
    autocast = [torch.is_autocast_enabled(kind) for kind in ("cpu", accelerator.kind() or "cpu")]
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *autocast


def trace(module: nn.Module, opened: frozenset[str]) -> ForwardGraph:
    """Return the graph of the forward pass of `module`, traced in training and in evaluation mode.

    `module` is not changed. `opened`: names of the submodules whose `forward` is traced, too. A model that
    cannot be traced, or whose graphs in the two modes differ, raises a `ModelError`.
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
    _remove_checks(graph)
    steps = [n for n in graph.nodes if n.op not in ("placeholder", "output", "get_attr")]
    seen: set[int] = set()
    weights = []
    for node in steps:
        own = {id(p): p for p in _parameters(module, node) if id(p) not in seen}
        seen |= own.keys()
        weights.append(sum(p.numel() * p.element_size() for p in own.values()))
    return ForwardGraph(graph, constants, opened, fixed, steps, weights)


def _equal(one: Any, other: Any) -> bool:
    if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
        return True  # a difference would be in the graph, too
    alike = one.dtype == other.dtype and one.shape == other.shape
    return alike and torch.allclose(one, other, 0, 0, equal_nan=True)


def _trace_in(
    training: bool, module: nn.Module, opened: frozenset[str], fixed: dict[str, Any]
) -> tuple[fx.Graph, dict[str, Any]]:
    """Return the graph of a forward pass in training or evaluation mode, and its constant tensors.

    `opened`: names of submodules whose `forward` is traced, too. `fixed`: default values of arguments of
    `forward`, which the graph contains as constants.
    """
    name, modes = type(module).__name__, {part: part.training for part in module.modules()}
    before = Generators.now()
    with undisturbed(), _Attributes(module) as changed, torch.set_grad_enabled(training):
        try:
            for part in modes:  # not by `Module.train`, which users override
                part.training = training
            tracer = _Tracer(opened)
            graph = tracer.trace(module, concrete_args=dict(fixed) or None)
        except LockstepError:
            raise
        except Exception as error:  # whatever the user's code does with a symbol
            what = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            raise ModelError(
                f"{name}.forward cannot be traced, as cutting it into stages takes: {what}",
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
    """Raise a `ModelError` if `forward` had side effects, which its graph would not repeat.

    Side effects are: random numbers that were drawn (`has_drawn`), changes of grad or autocast modes, and
    assignments to attributes, whose names are `changed`. `name`: class name of the model.
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
    """Context manager that restores all attributes of a model's modules at its end.

    Its methods tell which attributes were changed.
    """

    def __init__(self, module: nn.Module) -> None:
        self._spaces = [
            (type(part), space, dict(space))
            for part in module.modules()
            for space in (vars(part), part._parameters, part._buffers, part._modules)
        ]

    def is_new(self, name: str) -> bool:
        """Whether the model has an attribute `name` that it lacked at the beginning of the `with` block.

        Attributes of its submodules do not count.
        """
        _, now, before = self._spaces[0]
        return name in now and name not in before

    def names(self, constants: dict[str, Any]) -> list[str]:
        """Return the names of changed attributes; leave out `constants` and any `cached_property`.

        `constants`: tensors that torch.fx itself has stored as attributes of the model, by name.
        """
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        for _, now, before in self._spaces:
            if self._differing(now, before):
                now.clear()
                now.update(before)


def _copy_constants(graph: fx.Graph, constants: dict[str, Any]) -> None:
    """Insert a `clone` of each constant tensor into the graph, for all nodes that use the tensor.

    `forward` may modify the tensor in place. `constants`: the tensors, by name.
    """
    for name in (n for n, value in constants.items() if isinstance(value, torch.Tensor)):
        first, *others = [n for n in graph.nodes if n.op == "get_attr" and n.target == name]
        with graph.inserting_after(first):
            copy = graph.call_function(torch.clone, (first,))
        first.replace_all_uses_with(copy, delete_user_cb=lambda user, c=copy: user is not c)
        for node in others:
            node.replace_all_uses_with(copy)
            graph.erase_node(node)


def _remove_checks(graph: fx.Graph) -> None:
    """Remove the assertions by which torch.fx checks that arguments have their default values.

    `Program.bind` does this check instead.
    """
    for node in graph.nodes:
        is_check = getattr(node.target, "__name__", "") in ("_assert", "_assert_is_none")
        checked = node.all_input_nodes[:1] if is_check else []
        if any(n.op == "placeholder" or _compares_an_argument(n) for n in checked):
            graph.erase_node(node)
    for node in reversed(graph.nodes):
        if _compares_an_argument(node) and not node.users:
            graph.erase_node(node)


def _compares_an_argument(node: fx.Node) -> bool:
    return node.target is operator.eq and getattr(node.args[0], "op", "") == "placeholder"


def _parameters(module: nn.Module, node: fx.Node) -> list[nn.Parameter]:
    """Return the parameters that a node of the graph uses: those of its submodule or its arguments."""
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
    """Return default values of `forward`'s arguments; raise a `ModelError` for `*args` or `**kwargs`."""
    parameters = inspect.signature(module.forward).parameters.values()
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        raise ModelError(
            f"{type(module).__name__}.forward takes any number of arguments; expected each to have a "
            "name, for its calls to be traced",
            hint=LIST_HINT,
        )
    return {p.name: p.default for p in parameters if p.default is not p.empty}
