"""Rules on wrapped models, and on optimizers made before a model is wrapped or moved (family LS3)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from lockstep.tools.check.order import conditions, wrapped_before
from lockstep.tools.check.rule import Violation, rule
from lockstep.tools.check.script import Script
from lockstep.tools.check.syntax import argument, dotted, receiver, true, variables


@rule(
    "LS304",
    "optimizer made before the model is complete",
    "the optimizer above has the parameters from before this: make it after",
    "corrupts",
    why="""FSDP replaces parameters: an optimizer made before updates tensors that the model no longer uses. `.cuda()` and
    `.to()` keep the parameters, and PyTorch's documentation asks for the same order.""",
    example="""
      import torch
      import torch.distributed as dist
      from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

      def build(model):
          dist.init_process_group("nccl")
    +     model = FSDP(model)
          optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    -     model = FSDP(model)
          return model, optimizer
    """,
)
def early_optimizer(script: Script) -> Iterator[Violation]:
    """Find calls that move or shard a model after an optimizer of its parameters was made."""
    if script.matches(r"\[['\"]params['\"]\]\s*="):
        return  # the script replaces the optimizer's parameters itself
    for made in script.module.calls:
        if not script.name(made.func).startswith("torch.optim."):
            continue
        match argument(made, "params", 0):
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="parameters")):
                calls = [call for call in script.module.calls if script.module.earlier(made, call)]
                sharded = [Violation(call) for call in calls if _shards(script, call, name)]
                # A move keeps the parameters, but PyTorch's documentation asks for the same order.
                moved = "the optimizer above was made before the model is moved: make it after"
                moves = [call for call in calls if _moves(script, call, name)]
                found = sharded or [Violation(call, moved, harm="misleads") for call in moves]
                yield from found[:1]


def _shards(script: Script, call: ast.Call, name: str) -> bool:
    first = call.args[0] if call.args else None
    sharding = script.name(call.func) in ("FSDP", "fully_shard")
    return sharding and isinstance(first, ast.Name) and first.id == name


def _moves(script: Script, call: ast.Call, name: str) -> bool:
    """Whether a call moves the model `name` to a device before its function's first training loop."""
    match call.func:
        case ast.Attribute(value=ast.Name(id=moved), attr="to" | "cuda") if moved == name:
            scope = script.module.scope(call)
            loops = [one for one in script.step_loops if script.module.scope(one) is scope]
            return all(call.lineno < loop.lineno for loop in loops)
    return False


@rule(
    "LS305",
    "SyncBatchNorm after the wrapper",
    "the model is in its wrapper already: convert it before, as PyTorch's documentation does",
    "misleads",
    why="""`convert_sync_batchnorm` makes new layers from the old ones' parameters. FSDP gathers parameters for the layers that it
    has wrapped, and the new ones compute with shards. DistributedDataParallel finds the same parameters in them, and PyTorch's
    documentation asks for the same order.""",
    example="""
      import torch.distributed as dist
      from torch import nn
      from torch.nn.parallel import DistributedDataParallel as DDP

      def build(net):
          dist.init_process_group("nccl")
    -     model = DDP(net)
    -     return nn.SyncBatchNorm.convert_sync_batchnorm(model)
    +     net = nn.SyncBatchNorm.convert_sync_batchnorm(net)
    +     return DDP(net)
    """,
)
def late_sync_batchnorm(script: Script) -> Iterator[Violation]:
    """Find `convert_sync_batchnorm` of a model that is already wrapped."""
    for call in script.methods("convert_sync_batchnorm"):
        model = argument(call, "module", 0)
        if model is None:
            continue
        sharded = isinstance(model, ast.Name) and any(  # `fully_shard` changes its model in place
            _shards(script, one, model.id) and script.module.earlier(one, model)
            for one in script.calls("fully_shard")
        )
        if sharded or always_wrapped(script, model, "FSDP"):
            message = "FSDP gathers parameters for the layers before this, and the new ones compute with shards: convert before"
            yield Violation(call, message, harm="fails")
        elif always_wrapped(script, model, "DDP"):
            yield Violation(call)


def always_wrapped(script: Script, model: ast.expr, wrapper: str) -> bool:
    """Return whether `model` is surely wrapped in `wrapper`, such as `DDP`, where it is used.

    It is not if the wrapping depends on a condition that the use does not depend on.
    """
    wrapped = wrapped_before(script, model, wrapper)
    if wrapped is None:
        return False
    home = next(one for one in script.program if wrapped in one.module.parents)
    around = conditions(home, wrapped) - conditions(script, model)
    return not around and not script.module.exclusive(wrapped, model)


@rule(
    "LS306",
    "find_unused_parameters without need",
    "the forward pass has no branch, so no parameter is left out: find_unused_parameters only costs time",
    "slow",
    why="""With it every step walks the graph of the loss for parameters that got no gradient. A model whose forward pass
    always goes the same way needs that only if a layer is never used.""",
    example="""
      import torch.distributed as dist
      from torch import nn
      from torch.nn.parallel import DistributedDataParallel as DDP

      class Net(nn.Module):
          def __init__(self):
              super().__init__()
              self.layer = nn.Linear(4, 1)

          def forward(self, x):
              return self.layer(x)

      dist.init_process_group()
    - model = DDP(Net(), find_unused_parameters=True)
    + model = DDP(Net())
      dist.destroy_process_group()
    """,
)
def needless_search(script: Script) -> Iterator[Violation]:
    """Find `find_unused_parameters=True` for a model whose forward pass uses each of its layers."""
    for call in script.calls("DDP"):
        if not call.args or not true(argument(call, "find_unused_parameters")):
            continue
        made = script.made_by(call.args[0])
        owners = [script.module.classes.get(dotted(one.func)) for one in made]
        known = [owner for owner in owners if owner is not None]
        if len(known) == len(made) == 1 and _straight(known[0]):
            message = f"forward of {known[0].name} has no branch, so no parameter is left out: "
            yield Violation(call, message + "find_unused_parameters only costs time")


def _straight(owner: ast.ClassDef) -> bool:
    """Whether `forward` has no branch, and uses every attribute that `__init__` sets.

    The class `owner` must have no other methods, and must not contain `requires_grad` or `detach`.
    """
    methods = {one.name: one for one in owner.body if isinstance(one, ast.FunctionDef)}
    if set(methods) != {"__init__", "forward"} or re.search(
        r"requires_grad|detach", ast.unparse(owner)
    ):
        return False
    forward, made = methods["forward"], methods["__init__"]
    branches = ast.If | ast.IfExp | ast.For | ast.While | ast.BoolOp
    if any(isinstance(node, branches) for node in ast.walk(forward)):
        return False
    assigned = variables(made, context=ast.Store)
    stores = {node.attr for node in assigned if isinstance(node, ast.Attribute)}
    used = {node.attr for node in ast.walk(forward) if isinstance(node, ast.Attribute)}
    return bool(stores) and stores <= used


@rule(
    "LS308",
    "model moved after it is wrapped",
    "DistributedDataParallel has made its buckets where the model was: move the model before",
    "fails",
    why="""The wrapper checks devices and makes the buckets of gradients when it is made. A model that moves afterwards
    has its gradients on a different device than its buckets.""",
    example="""
      import torch.distributed as dist
      from torch.nn.parallel import DistributedDataParallel as DDP

      def build(net, device):
          dist.init_process_group("nccl")
    +     net.to(device)
          model = DDP(net)
    -     model.to(device)
          return model
    """,
)
def moved_wrapper(script: Script) -> Iterator[Violation]:
    """Find moves to a device (`model.to`) after the same function has wrapped the model in DDP."""
    for call in script.methods("to", "cuda"):
        model = receiver(call)
        for made in script.made_by(model, "DDP") if isinstance(model, ast.Name) else ():
            if made in script.module.parents and script.module.earlier(made, call):
                yield Violation(call)
                break


@rule(
    "LS309",
    "forward pass around the wrapper",
    "model.module(…) goes around DistributedDataParallel: gradients are not reduced; call the wrapper",
    "corrupts",
    why="""DistributedDataParallel prepares each reduction in its own `forward`. A call of `model.module` skips that: each
    rank steps by its own gradients, and the copies drift apart.""",
    example="""
      import torch.distributed as dist
      from torch.nn.parallel import DistributedDataParallel as DDP

      def train(net, loader, optimizer):
          dist.init_process_group()
          model = DDP(net)
          for x in loader:
    -         model.module(x).sum().backward()
    +         model(x).sum().backward()
              optimizer.step()
          dist.destroy_process_group()
    """,
)
def around_wrapper(script: Script) -> Iterator[Violation]:
    """Find forward passes `model.module(…)` in training steps, which bypass the DDP wrapper `model`."""
    for call in script.module.calls:
        match call.func:
            case ast.Attribute(value=ast.expr() as model, attr="module"):
                wrapped = script.made_by(model, "DDP") and script.step_loop(call) is not None
                if wrapped and not script.evaluates(call):
                    yield Violation(call)
