"""LS4: what happens in each step: collectives, gradients, scaling, waiting."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from lockstep.check.arguments import argument
from lockstep.check.rule import Hit, rule
from lockstep.check.script import Script
from lockstep.check.source import Function

_COLLECTIVES = {
    *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "broadcast"),
    *("broadcast_object_list", "reduce", "gather", "gather_object", "scatter", "barrier"),
    *("scatter_object_list", "reduce_scatter", "reduce_scatter_tensor", "all_to_all"),
    *("all_to_all_single", "monitored_barrier", "new_group"),
}
#: Methods of Accelerator, Fabric and Run that all ranks have to call together.
_METHODS = {
    "Accelerator": {
        "wait_for_everyone",
        "gather",
        "gather_for_metrics",
        "reduce",
        "pad_across_processes",
    },
    "Fabric": {"barrier", "all_reduce", "all_gather", "broadcast"},
    "lockstep.Run": {"barrier", "mean", "sum", "gather", "save", "digest", "export", "backward"},
}
_GROUP = {"barrier": 0, "monitored_barrier": 0, "all_reduce": 2, "broadcast": 2, "all_gather": 2}


def collective(script: Script, call: ast.Call) -> str | None:
    """Return the name of the collective call that this is."""
    name = script.name(call.func)
    if name.startswith("dist.") and name.removeprefix("dist.") in _COLLECTIVES:
        return name
    if isinstance(call.func, ast.Attribute):
        for made, methods in _METHODS.items():
            if call.func.attr in methods and script.made_by(call.func.value, made):
                return f"{ast.unparse(call.func)}"
    return None


@rule(
    "LS401",
    "collective in a branch of one rank",
    "{call} is called by some ranks only, and waits for the others: call it on all ranks",
    "hangs",
    why="""A collective call returns when all ranks have made it. In a branch that depends on the rank, some ranks
    never make it: the others wait until the timeout, or are matched with another call and get its bytes.""",
    bad="""
    import torch.distributed as dist

    def report(loss):
        dist.init_process_group()
        if dist.get_rank() == 0:
            dist.all_reduce(loss)
            print(loss / dist.get_world_size())
    """,
    good="""
    import torch.distributed as dist

    def report(loss):
        dist.init_process_group()
        dist.all_reduce(loss)
        if dist.get_rank() == 0:
            print(loss / dist.get_world_size())
    """,
)
def collective_of_one_rank(script: Script) -> Iterator[Hit]:
    """Find collective calls under a guard by the rank, unless the other ranks make the same call."""
    for call in script.module.calls:
        name = collective(script, call)
        if name is None or _of_a_group(call, name):
            continue
        guard = script.guard(call)
        if guard is None or not isinstance(guard, ast.If | ast.IfExp | ast.With | ast.expr):
            continue
        if isinstance(guard, ast.With) or _matched(script, call, guard):
            continue
        yield Hit(
            call,
            f"{name} is called by some ranks only, and waits for the others: call it on all ranks",
        )


def _of_a_group(call: ast.Call, name: str) -> bool:
    """Whether a call is made in a group, whose members may be those of the branch."""
    place = _GROUP.get(name.removeprefix("dist."))
    return argument(call, "group", place) is not None


def _matched(script: Script, call: ast.Call, guard: ast.AST) -> bool:
    """Whether the same call stands in the other branch, or in a branch of its own for the other ranks."""
    scope = script.module.scope(call)
    for other in script.module.calls:
        if other is call or script.name(other.func) != script.name(call.func):
            continue
        around = script.guard(other) if script.module.scope(other) is scope else None
        if around is not None and (around is not guard or script.exclusive(call, other)):
            return True
    return False


@rule(
    "LS405",
    "clipping before unscale_",
    "these gradients are still multiplied by the loss scale: call scaler.unscale_(optimizer) before",
    "corrupts",
    why="""After `scaler.scale(loss).backward()` gradients are multiplied by the loss scale, 65,536 at first. Clipped
    then, nearly every gradient is cut down to `max_norm / scale`, and training stands still or goes on by noise.""",
    bad="""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    def step(model, loss, optimizer, scaler: torch.amp.GradScaler):
        model = DistributedDataParallel(model)
        scaler.scale(loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    """,
    good="""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    def step(model, loss, optimizer, scaler: torch.amp.GradScaler):
        model = DistributedDataParallel(model)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    """,
)
def clip_before_unscale(script: Script) -> Iterator[Hit]:
    """Find clipping after a scaled backward pass in a function, without `unscale_` between."""
    if ".unscale_gradients" in script.called:
        return
    scaled = [call for call in script.methods("backward") if scaled_loss(call)]
    for call in script.calls("torch.nn.utils.clip_grad_norm_", "torch.nn.utils.clip_grad_value_"):
        scope = script.module.scope(call)
        before = [one for one in scaled if script.earlier(one, call)]
        unscaled = any(
            script.module.scope(one) is scope and one.lineno <= call.lineno
            for one in script.methods("unscale_")
        )
        if before and not unscaled and isinstance(scope, Function | ast.Module):
            yield Hit(call)


def scaled_loss(call: ast.Call) -> bool:
    """Whether a call is `scaler.scale(loss).backward()`."""
    match call.func:
        case ast.Attribute(value=ast.Call(func=ast.Attribute(attr="scale"))):
            return True
    return False
