"""Rules on the batch size over all ranks, the learning rate, and dropped samples (family LS2)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from lockstep.tools.check.rule import Violation, rule
from lockstep.tools.check.rules.sampling import for_evaluation
from lockstep.tools.check.script import Script
from lockstep.tools.check.syntax import argument, dotted, last_name, true, variables

#: Names and help texts of a batch size for all ranks together.
_WHOLE_NAME = re.compile(r"(global|total|effective|overall)_?(train_?)?(batch|bs\b|bsz)")
_WHOLE_HELP = re.compile(r"\b(total|global|overall|effective|across|all (gpus|processes|ranks))\b")


def _of_one_rank(script: Script, call: ast.Call) -> bool:
    """Whether a DataLoader call makes the batches of one rank, so that its `batch_size` is per rank."""
    if script.made_by(argument(call, "sampler", 3), "DistributedSampler"):
        return True
    prepared = {".prepare", ".setup_dataloaders"} & script.called
    return bool(prepared) and not script.matches(r"split_batches|dispatch_batches")


def option(script: Script, node: ast.expr) -> ast.Call | None:
    """Return the `add_argument` call of the command-line option that a value like `args.lr` comes from."""
    for one in script.program if isinstance(node, ast.Attribute) else ():
        for call in one.methods("add_argument"):
            words = [str(word.value) for word in call.args if isinstance(word, ast.Constant)]
            target = argument(call, "dest")
            longest = max(words, key=len, default="").lstrip("-").replace("-", "_")
            name = target.value if isinstance(target, ast.Constant) else longest
            if name == last_name(node):
                return call
    return None


@rule(
    "LS204",
    "batch size multiplied by the ranks",
    "this batch_size is that of one rank: times the ranks, the whole is their square",
    "corrupts",
    why="""Each rank has a loader of its own. With a DistributedSampler, and in loaders that Accelerate and Fabric have
    prepared, `batch_size` samples go to each rank, and the global batch has `batch_size * world_size`: multiplied once more, it
    grows with the square of the ranks.""",
    example="""
      import torch.distributed as dist
      from torch.utils.data import DataLoader, DistributedSampler

      def load(dataset, per_rank):
          dist.init_process_group()
    -     batch = per_rank * dist.get_world_size()
    -     return DataLoader(dataset, batch_size=batch, sampler=DistributedSampler(dataset))
    +     return DataLoader(dataset, batch_size=per_rank, sampler=DistributedSampler(dataset))
    """,
)
def multiplied_batch(script: Script) -> Iterator[Violation]:
    """Find per-rank loaders whose `batch_size` is multiplied by the number of ranks."""
    for call in script.calls("DataLoader"):
        size = argument(call, "batch_size", 1)
        for value in script.sources(size) if _of_one_rank(script, call) else ():
            if not isinstance(value, ast.BinOp) or not isinstance(value.op, ast.Mult):
                continue
            factors = [
                source for variable in variables(value) for source in script.sources(variable)
            ]
            if any(script.is_world_size(one) for one in (value, *factors)):
                yield Violation(call)
                break


@rule(
    "LS216",
    "global batch size given to each rank",
    "this batch size is meant for all ranks together, and each of them gets it: divide it by their number",
    "corrupts",
    why="""`batch_size` of a rank's loader is that of one rank. A number that the script calls the global or the total batch
    size, given to every rank as it is, makes the batch as many times larger as there are ranks.""",
    example="""
      import argparse
      import torch.distributed as dist
      from torch.utils.data import DataLoader, DistributedSampler

      parser = argparse.ArgumentParser()
      parser.add_argument("--batch-size", type=int, default=256, help="total batch size of all GPUs")
      args = parser.parse_args()

      def load(dataset):
          dist.init_process_group()
    -     return DataLoader(dataset, args.batch_size, sampler=DistributedSampler(dataset))
    +     own = args.batch_size // dist.get_world_size()
    +     return DataLoader(dataset, own, sampler=DistributedSampler(dataset))
    """,
)
def whole_batch(script: Script) -> Iterator[Violation]:
    """Find per-rank loaders whose `batch_size` appears to be the global batch size.

    This is judged by the name of the value, and by the help text of its command-line option.
    """
    for call in script.calls("DataLoader"):
        size = argument(call, "batch_size", 1)
        if size is not None and _of_one_rank(script, call) and _means_all(script, size):
            yield Violation(call)


def _means_all(script: Script, size: ast.expr) -> bool:
    """Whether the value `size` is the batch size of all ranks, and is not divided by their number.

    This is judged by the name of the value, and by the help text of its command-line option.
    """
    values = [size, *script.sources(size)]
    if any("/" in ast.unparse(value) for value in values[1:]):
        return False
    options = [call for value in values if (call := option(script, value))]
    texts = [ast.unparse(text).lower() for call in options if (text := argument(call, "help"))]
    named = any(_WHOLE_NAME.search(dotted(value).lower()) for value in values)
    means = named or any(_WHOLE_HELP.search(text) for text in texts)
    return means and not script.matches(r"batch_?size\w*\s*/")


@rule(
    "LS213",
    "evaluation that drops samples",
    "drop_last=True leaves the last samples out of the evaluation",
    "misleads",
    why="""The samples of the last, smaller batch are never measured, and how many these are depends on batch size and
    number of ranks.""",
    example="""
      import torch.distributed as dist
      from torch.utils.data import DataLoader

      def load(val_set):
          dist.init_process_group()
    -     return DataLoader(val_set, batch_size=32, drop_last=True)
    +     return DataLoader(val_set, batch_size=32)
    """,
)
def dropped_evaluation(script: Script) -> Iterator[Violation]:
    """Find loaders of evaluation data with `drop_last`."""
    for call in script.calls("DataLoader"):
        if for_evaluation(script, call) and true(argument(call, "drop_last", 8)):
            yield Violation(call)


@rule(
    "LS215",
    "learning rate that ignores the ranks",
    "each rank adds its batch to the global batch, and this learning rate is the same for any number: scale it, or say why not",
    "misleads",
    why="""With a batch size per rank the global batch grows with the ranks, and each epoch has fewer steps. Whether the
    learning rate follows (linearly, with a warm-up) or the batch is divided is a decision that a script should show.""",
    example="""
      import torch
      import torch.distributed as dist
      from torch.nn.parallel import DistributedDataParallel as DDP

      def build(net):
          dist.init_process_group()
          model = DDP(net)
    -     return torch.optim.SGD(model.parameters(), lr=0.1)
    +     lr = 0.1 * dist.get_world_size()
    +     return torch.optim.SGD(model.parameters(), lr=lr)
    """,
    default=False,
)
def plain_learning_rate(script: Script) -> Iterator[Violation]:
    """Find fixed learning rates in programs that neither scale the rate nor divide the batch size."""
    if not script.plain or "DDP" not in script.called:
        return
    if script.matches(
        r"(lr|learning_rate)\w*\s*\*|\*\s*[\w.]*(lr|learning_rate)|batch_size\s*/|=\s*[\d.]+\s*\*\s*[\w.]*world"
    ):
        return
    for call in script.module.calls:
        if not re.match(r"torch\.optim\.[A-Z]\w*$", script.name(call.func)):
            continue
        rate = argument(call, "lr", 1)
        values = script.sources(rate)
        if rate is None or any(
            isinstance(value, ast.Constant) or option(script, value) for value in values
        ):
            yield Violation(call)


@rule(
    "LS217",
    "samples that are left out of each epoch",
    "drop_last=True leaves samples out of each epoch, and how many these are depends on the number of ranks",
    "misleads",
    why="""Each rank drops its own last batch, or the sampler drops what cannot be shared out equally. An epoch on 8 ranks has
    other samples, and a different number of steps, than one on 4.""",
    example="""
      import torch.distributed as dist
      from torch.utils.data import DataLoader, DistributedSampler

      def load(dataset):
          dist.init_process_group()
          sampler = DistributedSampler(dataset)
    -     return DataLoader(dataset, batch_size=32, sampler=sampler, drop_last=True)
    +     return DataLoader(dataset, batch_size=32, sampler=sampler)
    """,
    default=False,
)
def dropped_training(script: Script) -> Iterator[Violation]:
    """Find `drop_last=True` in samplers and per-rank DataLoaders of training data."""
    for name, place in (("DistributedSampler", 5), ("DataLoader", 8)):
        for call in script.calls(name):
            drops = true(argument(call, "drop_last", place)) and not for_evaluation(script, call)
            if drops and (name == "DistributedSampler" or _of_one_rank(script, call)):
                yield Violation(call)
