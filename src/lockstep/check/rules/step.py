"""LS4, first part: what happens in each step: collectives, gradients, waiting."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from lockstep.check.arguments import argument
from lockstep.check.rule import Hit, rule
from lockstep.check.script import Script

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
    "a collective call is made by some ranks only, and waits for the others: call it on all ranks",
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


_TENSOR = re.compile(r"loss|logits|outputs?\b|preds?\b|grad|norm|correct|acc")


@rule(
    "LS402",
    "waiting for the GPU in each step",
    "reading a tensor waits for the GPU in each step: keep the tensor, and read it every so many steps",
    "slow",
    why="""`.item()`, `.cpu()`, `.tolist()` and printing a tensor wait until the GPU has done all that was asked of it. In
    each step the CPU then cannot run ahead, and the GPU waits for the next step's kernels.""",
    bad="""
    import torch.distributed as dist

    def train(model, loader, optimizer):
        dist.init_process_group("nccl")
        total = 0.0
        for x in loader:
            loss = model(x.cuda(0))
            loss.backward()
            optimizer.step()
            total += loss.item()
        dist.destroy_process_group()
    """,
    good="""
    import torch.distributed as dist

    def train(model, loader, optimizer):
        dist.init_process_group("nccl")
        total = 0.0
        for x in loader:
            loss = model(x.cuda(0))
            loss.backward()
            optimizer.step()
            total += loss.detach()
        print(total.item())
        dist.destroy_process_group()
    """,
)
def waits_each_step(script: Script) -> Iterator[Hit]:
    """Find reads of tensors in every step of training, where there is a GPU."""
    if not script.cuda or "lockstep" in script.flavours:
        return
    for call in script.methods("item", "tolist", "cpu", "numpy"):
        assert isinstance(call.func, ast.Attribute)
        tensor = ast.unparse(call.func.value)
        if not _TENSOR.search(tensor.lower()) or script.evaluates(call) or ".cpu()" in tensor:
            continue
        if script.step_loop(call, always=True) is not None:
            what = f"{tensor}.{call.func.attr}()"
            yield Hit(
                call,
                f"{what} waits for the GPU in each step: keep the tensor, and read it every so many steps",
            )


@rule(
    "LS403",
    "barrier in each step",
    "the ranks wait for each other in every step: reducing gradients keeps them together already",
    "slow",
    why="""DistributedDataParallel's reduction lets no rank run ahead by more than a step. A barrier beside it adds a
    round trip, and takes the overlap between steps away.""",
    bad="""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP

    def train(net, loader, optimizer):
        dist.init_process_group()
        model = DDP(net)
        for x in loader:
            model(x).backward()
            optimizer.step()
            dist.barrier()
        dist.destroy_process_group()
    """,
    good="""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP

    def train(net, loader, optimizer):
        dist.init_process_group()
        model = DDP(net)
        for x in loader:
            model(x).backward()
            optimizer.step()
        dist.barrier()
        dist.destroy_process_group()
    """,
)
def barrier_each_step(script: Script) -> Iterator[Hit]:
    """Find barriers in every step."""
    for call in script.module.calls:
        name = collective(script, call) or ""
        waits = name.endswith(("barrier", "wait_for_everyone")) and script.guard(call) is None
        if waits and script.step_loop(call, always=True) is not None:
            yield Hit(call)


@rule(
    "LS404",
    "accumulation without no_sync",
    "gradients are reduced in every backward pass, and used in every n-th: put the others under model.no_sync()",
    "slow",
    why="""DistributedDataParallel reduces gradients in each backward pass. Where several passes add up to one step, all but
    the last reduction are for nothing.""",
    bad="""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP

    def train(net, loader, optimizer):
        dist.init_process_group()
        model = DDP(net)
        for i, x in enumerate(loader):
            model(x).backward()
            if (i + 1) % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()
        dist.destroy_process_group()
    """,
    good="""
    import contextlib
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP

    def train(net, loader, optimizer):
        dist.init_process_group()
        model = DDP(net)
        for i, x in enumerate(loader):
            last = (i + 1) % 4 == 0
            with contextlib.nullcontext() if last else model.no_sync():
                model(x).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
        dist.destroy_process_group()
    """,
)
def no_no_sync(script: Script) -> Iterator[Hit]:
    """Find steps that are taken every n-th time, in programs that always reduce."""
    if "DDP" not in script.called or not script.plain:
        return
    if script.says(r"no_sync|grad_sync|gradient_sync"):
        return
    for call in every_nth(script):
        yield Hit(call)


def every_nth(script: Script) -> Iterator[ast.Call]:
    """Yield the steps of optimizers under `if i % n == 0` in a loop whose backward pass is not."""
    for call in script.methods("step"):
        assert isinstance(call.func, ast.Attribute)
        branch = script.module.parents.get(script.module.statement(call) or call)
        if not re.search(r"optim|opt$|scaler", ast.unparse(call.func.value)) or not isinstance(
            branch, ast.If
        ):
            continue
        modulo = any(isinstance(one, ast.Mod) for one in ast.walk(branch.test))
        inside = any(
            isinstance(one, ast.Attribute) and one.attr == "backward" for one in ast.walk(branch)
        )
        if modulo and not inside and script.step_loop(branch) is not None:
            yield call


@rule(
    "LS407",
    "leaving the loop by one rank's value",
    "a rank decides this by a value of its own, and the others wait for it: reduce the value over ranks first",
    "hangs",
    why="""A loss is that of one rank's samples. A rank that leaves a loop or skips a step by it makes fewer reductions than the
    others, which wait for it until the timeout.""",
    bad="""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP

    def train(net, loader, optimizer):
        dist.init_process_group()
        model = DDP(net)
        for x in loader:
            loss = model(x)
            if torch.isnan(loss):
                break
            loss.backward()
            optimizer.step()
        dist.destroy_process_group()
    """,
    good="""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP

    def train(net, loader, optimizer):
        dist.init_process_group()
        model = DDP(net)
        for x in loader:
            loss = model(x)
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if torch.isnan(mean):
                break
            loss.backward()
            optimizer.step()
        dist.destroy_process_group()
    """,
)
def leaves_alone(script: Script) -> Iterator[Hit]:
    """Find `break`, `continue` and `return` in training steps, by a loss that was not reduced."""
    if not script.plain or "DDP" not in script.called:
        return
    for branch in script.module.parents:
        if not isinstance(branch, ast.If) or not isinstance(
            branch.body[-1], ast.Break | ast.Continue | ast.Return
        ):
            continue
        text = ast.unparse(branch.test)
        own = re.search(r"is(nan|finite|inf)\(|\bloss(\.item\(\))? *[<>]", text)
        loop = script.step_loop(branch) if own else None
        scope = script.module.scope(branch)
        if loop is None or re.search(r"reduce|gather|broadcast", ast.unparse(scope)):
            continue
        if not script.evaluates(branch):
            yield Hit(branch.body[-1])


@rule(
    "LS408",
    "step of some ranks only",
    "only some ranks come to this: the others wait for its gradients, or have other weights afterwards",
    "hangs",
    why="""A backward pass of DistributedDataParallel is a collective call: all ranks have to make it. An optimizer that steps on
    one rank changes that rank's weights alone.""",
    bad="""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP

    def train(net, loader, optimizer):
        dist.init_process_group()
        model = DDP(net)
        for x in loader:
            model(x).backward()
            if dist.get_rank() == 0:
                optimizer.step()
        dist.destroy_process_group()
    """,
    good="""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP

    def train(net, loader, optimizer):
        dist.init_process_group()
        model = DDP(net)
        for x in loader:
            model(x).backward()
            optimizer.step()
        dist.destroy_process_group()
    """,
)
def step_of_some(script: Script) -> Iterator[Hit]:
    """Find backward passes and optimizer steps under a guard by the rank."""
    backward = "only some ranks run this backward pass, which waits for the gradients of the others"
    step = "only some ranks take this step: the others have other weights afterwards"
    others = {"dist.send", "dist.recv", "dist.isend", "dist.irecv"}
    if "DDP" not in script.called or others & script.called or script.says("dist.rpc"):
        return
    for call in script.methods("backward", "step"):
        assert isinstance(call.func, ast.Attribute)
        optimizer = re.search(r"optim|opt$", ast.unparse(call.func.value))
        if call.func.attr == "step" and not optimizer:
            continue
        if isinstance(script.guard(call), ast.If) and script.step_loop(call) is not None:
            alone = call.func.attr == "step"
            yield Hit(call, step if alone else backward, harm="corrupts" if alone else "hangs")
