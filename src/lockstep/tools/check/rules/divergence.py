"""Rules on branches that only some ranks take: collectives, steps and loop exits in them (family LS4)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from lockstep.tools.check.rule import Violation, rule
from lockstep.tools.check.rules.sampling import for_evaluation
from lockstep.tools.check.script import Script
from lockstep.tools.check.syntax import Loop, argument, method, receiver

_COLLECTIVES = {
    *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "broadcast"),
    *("broadcast_object_list", "reduce", "gather", "gather_object", "scatter", "barrier"),
    *("scatter_object_list", "reduce_scatter", "reduce_scatter_tensor", "all_to_all"),
    *("all_to_all_single", "monitored_barrier", "new_group"),
}
#: Methods of Accelerator, Fabric and Run that all ranks have to call together.
_METHODS = {
    "Accelerator": {
        *("wait_for_everyone", "gather", "gather_for_metrics", "reduce"),
        "pad_across_processes",
    },
    "Fabric": {"barrier", "all_reduce", "all_gather", "broadcast"},
    "lockstep.Run": {"barrier", "mean", "sum", "gather", "save", "digest", "export", "backward"},
}
_GROUP = {"barrier": 0, "monitored_barrier": 0, "all_reduce": 2, "broadcast": 2, "all_gather": 2}


def collective(script: Script, call: ast.Call) -> str | None:
    """Return the name of the collective that a call runs, such as `dist.barrier`; else `None`."""
    name = script.name(call.func)
    if name.startswith("dist.") and name.removeprefix("dist.") in _COLLECTIVES:
        return name
    if isinstance(call.func, ast.Attribute):
        for made, methods in _METHODS.items():
            if call.func.attr in methods and script.made_by(call.func.value, made):
                return ast.unparse(call.func)
    return None


@rule(
    "LS401",
    "collective in a branch of one rank",
    "a collective call is made by some ranks only, and waits for the others: call it on all ranks",
    "hangs",
    why="""A collective call returns when all ranks have made it. In a branch that depends on the rank, some ranks
    never make it: the others wait until the timeout, or are matched with another call and get its bytes.""",
    example="""
      import torch.distributed as dist

      def report(loss):
          dist.init_process_group()
    +     dist.all_reduce(loss)
          if dist.get_rank() == 0:
    -         dist.all_reduce(loss)
              print(loss / dist.get_world_size())
    """,
)
def collective_of_one_rank(script: Script) -> Iterator[Violation]:
    """Find collectives that only some ranks call, unless the other ranks make the same call."""
    for call in script.module.calls:
        name = collective(script, call)
        if name is None:
            continue
        group = argument(call, "group", _GROUP.get(name.removeprefix("dist.")))
        # The branch may be that of the ranks in `group`.
        guard = script.guard(call) if group is None else None
        if isinstance(guard, ast.If | ast.expr) and not _matched(script, call, guard):
            message = f"{name} is called by some ranks only, and waits for the others: call it on all ranks"
            yield Violation(call, message)


def _matched(script: Script, call: ast.Call, guard: ast.AST) -> bool:
    """Whether ranks that skip `call` because of `guard` make the same call in another branch."""
    scope = script.module.scope(call)
    for other in script.module.calls:
        if other is call or script.name(other.func) != script.name(call.func):
            continue
        around = script.guard(other) if script.module.scope(other) is scope else None
        if around is not None and (around is not guard or script.module.exclusive(call, other)):
            return True
    return False


@rule(
    "LS407",
    "leaving the loop by one rank's value",
    "a rank decides this by a value of its own, and the others wait for it: reduce the value over ranks first",
    "hangs",
    why="""A loss is that of one rank's samples, and so is an evaluation whose data is dealt out. A rank that leaves a loop or
    skips a step by it, or because it is rank 0, makes fewer reductions than the others, which wait for it until the timeout.""",
    example="""
      import torch
      import torch.distributed as dist
      from torch.nn.parallel import DistributedDataParallel as DDP

      def train(net, loader, optimizer):
          dist.init_process_group()
          model = DDP(net)
          for x in loader:
              loss = model(x)
    -         if torch.isnan(loss):
    +         mean = loss.detach().clone()
    +         dist.all_reduce(mean)
    +         if torch.isnan(mean):
                  break
              loss.backward()
              optimizer.step()
          dist.destroy_process_group()
    """,
)
def leaves_alone(script: Script) -> Iterator[Violation]:
    """Find statements that leave a training loop under a condition that differs between ranks.

    The statements are `break` and `return`; `continue` counts if its condition is on this rank's own loss
    or metric.
    """
    if not script.plain or "DDP" not in script.called:
        return
    for branch in script.module.parents:
        if not isinstance(branch, ast.If) or script.evaluates(branch):
            continue
        last = branch.body[-1]
        if not isinstance(last, ast.Break | ast.Continue | ast.Return):
            continue
        guarded = script.by_rank(branch.test) or isinstance(script.guard(branch), ast.If)
        ends = not isinstance(last, ast.Continue) and not branch.orelse
        if guarded and ends and _in_training(script, branch):
            some = (
                "only some ranks end here, and the others wait for them: let all ranks end together"
            )
            yield Violation(last, some)
        elif _by_own_loss(script, branch) or _by_own_samples(script, branch):
            yield Violation(last)


def _by_own_loss(script: Script, branch: ast.If) -> bool:
    """Whether the condition of an `if` in a training loop depends on the loss of one rank's batch."""
    own = re.search(r"is(nan|finite|inf)\(|\bloss(\.item\(\))? *[<>]", ast.unparse(branch.test))
    if not own or script.step_loop(branch) is None:
        return False
    return not re.search(r"reduce|gather|broadcast", ast.unparse(script.module.scope(branch)))


def _by_own_samples(script: Script, branch: ast.If) -> bool:
    """Whether `branch` seems to end training because of a metric that is not reduced over ranks.

    This is judged by names in the condition, such as `patience`, by samplers of evaluation data, and by the
    absence of reductions.
    """
    early = re.search(r"patience|early_?stop|should_stop|no_improve", ast.unparse(branch.test))
    if not early or not _in_training(script, branch):
        return False
    samplers = [(one, made) for one in script.program for made in one.calls("DistributedSampler")]
    reduced = script.matches(r"all_reduce|\breduce\(|all_gather|broadcast")
    return not reduced and any(for_evaluation(one, made) for one, made in samplers)


def _in_training(script: Script, branch: ast.If) -> bool:
    """Whether the innermost loop around an `if` is a loop of training steps or of epochs."""
    around = script.module.above(branch)
    loop = next((parent for parent in around if isinstance(parent, Loop | ast.FunctionDef)), None)
    return loop in script.step_loops or loop in script.epoch_loops


@rule(
    "LS408",
    "step of some ranks only",
    "only some ranks come to this: the others wait for its gradients, or have different weights afterwards",
    "hangs",
    why="""A backward pass of DistributedDataParallel is a collective call: all ranks have to make it. An optimizer that steps on
    one rank changes that rank's weights alone.""",
    example="""
      import torch.distributed as dist
      from torch.nn.parallel import DistributedDataParallel as DDP

      def train(net, loader, optimizer):
          dist.init_process_group()
          model = DDP(net)
          for x in loader:
              model(x).backward()
    -         if dist.get_rank() == 0:
    -             optimizer.step()
    +         optimizer.step()
          dist.destroy_process_group()
    """,
)
def step_of_some(script: Script) -> Iterator[Violation]:
    """Find backward passes and optimizer steps that only some ranks execute."""
    backward = "only some ranks run this backward pass, which waits for the gradients of the others"
    step = "only some ranks take this step: the others have different weights afterwards"
    others = {"dist.send", "dist.recv", "dist.isend", "dist.irecv"}
    if "DDP" not in script.called or others & script.called or script.matches("dist.rpc"):
        return
    for call in script.methods("backward", "step"):
        optimizer = re.search(r"optim|opt$", ast.unparse(receiver(call)))
        alone = method(call) == "step"
        if alone and not optimizer:
            continue
        if isinstance(script.guard(call), ast.If) and script.step_loop(call) is not None:
            yield Violation(
                call, step if alone else backward, harm="corrupts" if alone else "hangs"
            )
