"""Running a forward pass on symbols (torch.fx), for a graph that computes what it would every time.

A trace runs Python once: what it reads, draws or changes would stay as it was then. What could differ in
another pass is refused here, or compared later (`Reads`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from lockstep.data.randomness import Generators, undisturbed
from lockstep.errors import LockstepError, ModelError
from lockstep.strategies.reads import Reads, is_cached, reading
from lockstep.strategies.stage import HINT, LIST_HINT


@dataclass(frozen=True, slots=True)
class Trace:
    """A forward pass as a graph.

    Attributes:
        graph: of the calls.
        constants: what `forward` makes without its arguments, by the names that the graph has for it.
        reads: what else it has read.
    """

    graph: fx.Graph
    constants: dict[str, Any]
    reads: Reads

    @contextmanager
    def lent_to(self, module: nn.Module) -> Iterator[None]:
        """Let the module have the constants while a module is made of the graph."""
        own = vars(module)
        own.update(self.constants)
        try:
            yield
        finally:
            for name in self.constants:
                del own[name]


class _Buffer(fx.Proxy):
    """A buffer whose values are symbols, and whose shape is what it is.

    Args:
        node: of the buffer.
        tracer: which has made it.
        tensor: the buffer.
        asked: called when its shape is asked for.
    """

    def __init__(
        self, node: fx.Node, tracer: fx.Tracer, tensor: torch.Tensor, asked: Callable[[], None]
    ) -> None:
        super().__init__(node, tracer)
        self._tensor, self._asked = tensor, asked

    @property
    def shape(self) -> torch.Size:
        self._asked()
        return self._tensor.shape

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def size(self, dim: int | None = None) -> torch.Size | int:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return len(self.shape)

    def numel(self) -> int:
        return self.shape.numel()


class _Tracer(fx.Tracer):
    """Keeps parts whole, but for those that are to be looked into."""

    proxy_buffer_attributes = True  # what is computed of a buffer is computed each time

    def __init__(self, opened: frozenset[str], reads: Reads) -> None:
        super().__init__()
        self._opened, self._reads, self._mode = opened, reads, _mode()
        self.left_mode = ""
        self.used: dict[int, tuple[torch.Tensor, int]] = {}

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name not in self._opened

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, fx.Proxy]) -> Any:
        found = super().getattr(attr, attr_val, parameter_proxy_cache)
        if type(found) is not fx.Proxy or isinstance(attr_val, nn.Parameter):
            return found
        owner, _, name = str(found.node.target).rpartition(".")
        asked = partial(self._reads.note_shape, self.root.get_submodule(owner), name)
        buffer = _Buffer(found.node, self, attr_val, asked)
        parameter_proxy_cache[str(found.node.target)] = buffer
        return buffer

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        now = _mode()
        if now != self._mode and not self.left_mode:
            self.left_mode = next(name for name in now if now[name] != self._mode[name])
        return super().create_node(*args, **kwargs)

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, torch.Tensor) and not a.is_inference():
            self.used.setdefault(id(a), (a, a._version))
        return super().create_arg(a)


def _mode() -> dict[str, Any]:
    """Return what a `with` may change for the calls inside, which a graph does not have.

    Not the default device: torch gives it to the calls as an argument, and graphs keep that.
    """
    kinds = ("cpu", "cuda")
    autocast = [(torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds]
    grad = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    return {
        "torch.no_grad() or torch.autocast": (grad, autocast),
        "another default dtype": torch.get_default_dtype(),
        "another choice of kernels, such as sdpa_kernel or cudnn.flags": _kernels(),
    }


def _kernels() -> tuple[Any, ...]:
    """Return what torch chooses kernels by, which compute other bits."""
    backends: Any = torch.backends  # torch has no types for most of it
    cuda, cudnn, mkldnn = backends.cuda, backends.cudnn, backends.mkldnn
    precise = (cuda.matmul, cudnn.conv, cudnn.rnn, mkldnn.matmul, mkldnn.conv)
    return (
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        torch._C._get_sdp_priority_order(),
        (cudnn.enabled, cudnn.benchmark, cudnn.deterministic, mkldnn.enabled),
        [backend.fp32_precision for backend in precise],
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def trace(module: nn.Module, opened: frozenset[str], fixed: dict[str, Any]) -> Trace:
    """Return the forward pass of `module`, which is the same one in training and in evaluation.

    Args:
        module: the model; it is left as it was.
        opened: names of the parts that are to be looked into.
        fixed: arguments that have their default value in it.

    Raises:
        ModelError: if it cannot be traced, or another pass could be another one.
    """
    first, again, other = (_trace_in(mode, module, opened, fixed) for mode in (True, True, False))
    name = type(module).__name__
    if not _same(first, again):
        raise ModelError(
            f"{name}.forward does other things each time, of itself; expected it to depend on its "
            "arguments and the model only",
            hint=LIST_HINT,
        )
    if not _same(first, other):
        raise ModelError(
            f"{name}.forward does other things in training than in evaluation{_unlike(first, other)}; "
            "expected only its parts to, such as nn.Dropout",
            hint=HINT,
        )
    first.reads.add(other.reads)
    _copy_constants(first)
    return first


def _trace_in(
    training: bool, module: nn.Module, opened: frozenset[str], fixed: dict[str, Any]
) -> Trace:
    """Trace as in training, or as in evaluation; not by `Module.train`, which users override."""
    modes = {part: part.training for part in module.modules()}
    try:
        for part in modes:
            part.training = training
        with torch.set_grad_enabled(training):
            return _trace(module, opened, fixed)
    finally:
        for part, own in modes.items():
            part.training = own


def _same(one: Trace, other: Trace) -> bool:
    return str(one.graph) == str(other.graph) and not _unlike(one, other)


def _unlike(one: Trace, other: Trace) -> str:
    """Return words for a constant that has another value in another trace."""
    for name, value in one.constants.items():
        found = other.constants.get(name)
        if isinstance(value, torch.Tensor) and isinstance(found, torch.Tensor):
            alike = value.dtype == found.dtype and value.shape == found.shape
            if not (alike and torch.allclose(value, found, 0, 0, equal_nan=True)):
                return (
                    f": a tensor that it makes, of the shape {tuple(value.shape)}, has other values"
                )
    return ""


def _trace(module: nn.Module, opened: frozenset[str], fixed: dict[str, Any]) -> Trace:
    """Trace once; the module is left as it was, and generators stand where they stood."""
    name = type(module).__name__
    before, spaces = Generators.now(), _spaces(module)
    try:
        with undisturbed(), reading(module) as reads:
            tracer = _Tracer(opened, reads)
            graph = tracer.trace(module, concrete_args=dict(fixed) or None)
            drawn = Generators.now().since(before)
        constants = _constants(module, graph, spaces)
        reads.forget(module, constants)
        changed = [
            *_changed(module, spaces, constants),
            *((name, "") for name, *_ in reads.changed()),
        ]
        reads.forget_cached()
    except LockstepError:
        raise
    except Exception as error:  # whatever the user's code does with a symbol
        raise ModelError(
            f"{name}.forward cannot be traced, as cutting it into stages takes: "
            f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}",
            hint=LIST_HINT,
        ) from error
    finally:
        _put_back(spaces)
        if before.device is not None:
            torch.cuda.set_rng_state(before.device)
    _check_python(name, drew=drawn is not None, left_mode=tracer.left_mode, changed=changed)
    _check_constants(name, tracer, constants)
    return Trace(graph, constants, reads)


def _check_python(name: str, *, drew: bool, left_mode: str, changed: list[_Change]) -> None:
    """Refuse what Python has done in the pass, and no graph does.

    Raises:
        ModelError: if it has drawn, run a part in another mode, or changed an attribute.
    """
    if drew:
        raise ModelError(
            f"{name}.forward draws random numbers itself, which a trace would do once for all passes; "
            "expected draws in the parts that it calls, or like one of its tensors (torch.rand_like)",
            hint=LIST_HINT,
        )
    if left_mode:
        raise ModelError(
            f"{name}.forward has a part of it under {left_mode}, which a trace does not keep; expected "
            "that in the parts that it calls" + (", or detach()" if "no_grad" in left_mode else ""),
            hint=LIST_HINT,
        )
    if changed:
        what, in_place = changed[0]
        most = "buffers in place, by a method" if in_place else "buffers in place at most"
        raise ModelError(
            f"{name}.forward changes {what}, which a trace would do once for all passes; expected it to "
            f"change {most}",
            hint=f"{in_place}; or {LIST_HINT}" if in_place else LIST_HINT,
        )


# --- what a trace must leave alone -----------------------------------------------------------------

#: For each place of attributes: the class of the module, what is there, and what was.
_Spaces = list[tuple[type, dict[str, Any], dict[str, Any]]]
#: What has changed, and what to write instead, if anything.
_Change = tuple[str, str]


def _spaces(module: nn.Module) -> _Spaces:
    """Return where the attributes of all modules are, and what is there."""
    return [
        (type(part), space, dict(space))
        for part in module.modules()
        for space in (vars(part), part._parameters, part._buffers, part._modules)
    ]


def _put_back(spaces: _Spaces) -> None:
    for _, space, were in spaces:
        if space.keys() != were.keys() or any(space[name] is not were[name] for name in were):
            space.clear()
            space.update(were)


def _constants(module: nn.Module, graph: fx.Graph, spaces: _Spaces) -> dict[str, Any]:
    """Return what torch has put on the module for the graph."""
    were = next(were for _, space, were in spaces if space is vars(module))
    targets = dict.fromkeys(str(n.target) for n in graph.nodes if n.op == "get_attr")
    return {t: vars(module)[t] for t in targets if t in vars(module) and t not in were}


def _changed(module: nn.Module, spaces: _Spaces, constants: dict[str, Any]) -> Iterator[_Change]:
    """Yield attributes that the pass has set, but for what a `cached_property` has kept."""
    root = vars(module)
    buffers = {id(part._buffers) for part in module.modules()}
    for kind, space, were in spaces:
        new = space.keys() - (constants.keys() if space is root else set())
        for name in sorted(new | were.keys()):
            if name in space and name not in were and is_cached(kind, name):
                if _symbolic(space[name]):
                    yield f"the cached property {name}, which depends on tensors of the model", ""
            elif name not in space or name not in were or space[name] is not were[name]:
                in_place = f"write self.{name}.add_(…), or self.{name}.copy_(…)"
                yield f"the attribute {name}", in_place if id(space) in buffers else ""


def _symbolic(value: Any) -> bool:
    return any(isinstance(leaf, fx.Proxy) for leaf in tree_leaves(value))


# --- tensors that forward makes --------------------------------------------------------------------


def _check_constants(name: str, tracer: _Tracer, constants: dict[str, Any]) -> None:
    """Refuse tensors that have one value at one place of the pass and another at another.

    Raises:
        ModelError: if one was changed after its use, or two share memory, which their copies don't.
    """
    if any(tensor._version != version for tensor, version in tracer.used.values()):
        raise ModelError(
            f"{name}.forward changes a tensor that it has made and used; expected another one for "
            "another value",
            hint=f"h = h + 1 in the place of h += 1; or {LIST_HINT}",
        )
    memory = [
        value.untyped_storage().data_ptr()
        for value in constants.values()
        if isinstance(value, torch.Tensor) and value.layout is torch.strided and value.numel()
    ]
    if len(set(memory)) < len(memory):
        raise ModelError(
            f"{name}.forward has made two tensors in one memory; expected each to have its own",
            hint=f"clone() what is a part or a view of another; or {LIST_HINT}",
        )


def _copy_constants(traced: Trace) -> None:
    """Let each pass have constants of its own, as `forward` may write into what it makes."""
    graph = traced.graph
    for name, value in traced.constants.items():
        if not isinstance(value, torch.Tensor):
            continue
        first, *others = [n for n in graph.nodes if n.op == "get_attr" and n.target == name]
        with graph.inserting_after(first):
            copy = graph.call_function(torch.clone, (first,))
        first.replace_all_uses_with(copy, delete_user_cb=lambda user, c=copy: user is not c)
        for node in others:
            node.replace_all_uses_with(copy)
            graph.erase_node(node)


def defaults(module: nn.Module) -> dict[str, Any]:
    """Return the arguments of `forward` that have a default value.

    Raises:
        ModelError: if it takes any number of arguments.
    """
    parameters = inspect.signature(module.forward).parameters.values()
    if {p.kind for p in parameters} & {
        inspect.Parameter.VAR_POSITIONAL,
        inspect.Parameter.VAR_KEYWORD,
    }:
        raise ModelError(
            f"{type(module).__name__}.forward takes any number of arguments; expected each to have a "
            "name, for its calls to be traced",
            hint=LIST_HINT,
        )
    return {p.name: p.default for p in parameters if p.default is not p.empty}
