"""Rules on metrics that are logged or printed (family LS5)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from lockstep.tools.check.rule import Violation, rule
from lockstep.tools.check.script import SHOWS, Script
from lockstep.tools.check.syntax import Loop, all_arguments, dotted, last_name, variables

_REDUCED = r"all_reduce|\breduce\(|all_gather|\bgather|torchmetrics|synchronize_between|broadcast"
#: Names of a training loss; `losses` is not among them, it may be of an evaluation.
_LOSS = re.compile(r"(train_|total_|running_|avg_|mean_|batch_|epoch_)?loss(f|_value|_item)?$")


@rule(
    "LS501",
    "loss of one rank shown as the loss",
    "this is the loss of rank 0's samples: reduce it over ranks to show the loss",
    "misleads",
    why="""Each rank has its own samples. The loss on rank 0 is the mean over a part of the batch: it is noisier than the loss that
    is minimised, and on other numbers of ranks it is the mean over another part.""",
    example="""
      import torch.distributed as dist
      from torch.nn.parallel import DistributedDataParallel as DDP

      def train(net, loader, optimizer):
          dist.init_process_group()
          model = DDP(net)
          for step, x in enumerate(loader):
              loss = model(x)
              loss.backward()
              optimizer.step()
    -         if dist.get_rank() == 0 and step % 100 == 0:
    -             print(f"step {step}: loss {loss.item()}")
    +         if step % 100 == 0:
    +             mean = loss.detach() / dist.get_world_size()
    +             dist.all_reduce(mean)
    +             if dist.get_rank() == 0:
    +                 print(f"step {step}: loss {mean.item()}")
          dist.destroy_process_group()
    """,
)
def loss_of_one_rank(script: Script) -> Iterator[Violation]:
    """Find losses printed or logged on rank 0 only, in programs that average no value over ranks."""
    if not script.plain or "DDP" not in script.called or script.matches(_REDUCED):
        return
    for call in script.module.calls:
        if last_name(call.func) not in SHOWS or script.guard(call) is None:
            continue
        losses = any(_LOSS.match(dotted(read)) for read in variables(*all_arguments(call)))
        if losses and not script.evaluates(call):
            yield Violation(call)


@rule(
    "LS502",
    "mean over batches of unlike size",
    "the last batch is smaller and counts as much: add loss times samples, and divide by the samples",
    "misleads",
    why="""The mean of the batches' means is not the mean over samples, unless all batches are equally large. Over several ranks
    each has a small last batch, so that the number changes with the layout.""",
    example="""
      import torch
      import torch.distributed as dist

      @torch.no_grad()
      def evaluate(model, loader, loss_of):
    -     total = 0.0
    +     total, count = 0.0, 0
          for x, y in loader:
    -         total += loss_of(model(x), y).item()
    -     return total / len(loader)
    +         total += loss_of(model(x), y).item() * len(x)
    +         count += len(x)
    +     return total / count

      dist.init_process_group()
      dist.destroy_process_group()
    """,
)
def mean_of_means(script: Script) -> Iterator[Violation]:
    """Find evaluations that average the mean losses of batches, as in `total / len(loader)`."""
    if "lockstep" in script.flavours or script.matches(r"drop_last\s*=\s*True"):
        return
    for node in script.module.parents:
        match node:
            case (
                ast.BinOp(left=ast.Name(id=total), op=ast.Div(), right=ast.Call() as length)
                | ast.AugAssign(target=ast.Name(id=total), op=ast.Div(), value=ast.Call() as length)
            ) if dotted(length.func) == "len" and length.args:
                loader = dotted(length.args[0])
                loops = [
                    loop
                    for loop in script.module.loops
                    if script.module.scope(loop) is script.module.scope(node)
                    and dotted(script.iterated(loop) or loop) == loader != ""
                ]
                if any(_sums(script, loop, total) for loop in loops):
                    yield Violation(node)


def _sums(script: Script, loop: Loop, total: str) -> bool:
    """Whether an evaluation loop adds losses to the variable `total`, each the mean over one batch."""
    for node in ast.walk(loop):
        match node:
            case ast.AugAssign(target=ast.Name(id=name), op=ast.Add(), value=value):
                text = ast.unparse(value)
                mean = "loss" in text and not re.search(r"\*|reduction|\.sum\(", text)
                if name == total and mean and script.evaluates(node):
                    return not script.matches(r"reduction\s*=\s*['\"]sum")
    return False
