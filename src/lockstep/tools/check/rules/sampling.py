"""Rules on samplers, and on the samples that each rank gets (family LS2)."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from lockstep.tools.check.fix import Edit
from lockstep.tools.check.rule import Violation, rule
from lockstep.tools.check.script import EVALUATION, Script
from lockstep.tools.check.syntax import argument, spread, true


def for_evaluation(script: Script, call: ast.Call) -> bool:
    """Whether a sampler, loader or dataset is for evaluation, judged by the names around it."""
    words = [script.bound_name(call), *(ast.unparse(arg) for arg in call.args[:1])]
    dataset = argument(call, "dataset")
    words += [] if dataset is None else [ast.unparse(dataset)]
    return any(EVALUATION.search(word.lower()) for word in words)


@rule(
    "LS201",
    "sampler without set_epoch",
    "the sampler shuffles every epoch alike: call set_epoch(epoch) before each epoch",
    "corrupts",
    why="""DistributedSampler shuffles by its seed and its epoch number. Without `set_epoch` the number stays 0,
    and every epoch has the same order.""",
    example="""
      import torch.distributed as dist
      from torch.utils.data import DataLoader
      from torch.utils.data.distributed import DistributedSampler

      def train(model, dataset, optimizer):
          dist.init_process_group("gloo")
          sampler = DistributedSampler(dataset)
          loader = DataLoader(dataset, batch_size=32, sampler=sampler)
          for epoch in range(10):
    +         sampler.set_epoch(epoch)
              for x, y in loader:
                  model(x, y).backward()
                  optimizer.step()
          dist.destroy_process_group()
    """,
    fix="puts `set_epoch` at the head of the loop over epochs, where sampler and loop are in one function",
)
def no_set_epoch(script: Script) -> Iterator[Violation]:
    """Find samplers of training data in programs that never call `set_epoch`."""
    framework = {".prepare", ".setup_dataloaders"} & script.called
    if ".set_epoch" in script.called or framework or script.matches("set_epoch"):
        return
    epochs = any(one.epoch_loops for one in script.program)
    for call in script.calls("DistributedSampler"):
        shuffle = argument(call, "shuffle", 3)
        if not epochs or for_evaluation(script, call) or False in script.constants(shuffle):
            continue
        yield Violation(call, edit=_set_epoch(script, call))


def _set_epoch(script: Script, call: ast.Call) -> Edit | None:
    """Return the edit that adds `set_epoch`, if the sampler and the epoch loop are in one function."""
    name, module = script.bound_name(call), script.module
    parent, above, *_ = module.above(call)
    always = isinstance(parent, ast.Assign | ast.AnnAssign) and not isinstance(above, ast.If)
    for loop in script.epoch_loops if always and name.isidentifier() else ():
        match loop:
            case ast.For(target=ast.Name(id=epoch)) if epoch != "_":
                if module.scope(loop) is module.scope(call):
                    return Edit("first", loop, f"{name}.set_epoch({epoch})")
    return None


@rule(
    "LS202",
    "shuffle beside a sampler",
    "DataLoader refuses shuffle=True beside a sampler: leave shuffle out, the sampler shuffles",
    "fails",
    why="""DataLoader raises ValueError for the pair. The sampler decides the order: DistributedSampler shuffles
    by default.""",
    example="""
      import torch.distributed as dist
      from torch.utils.data import DataLoader, DistributedSampler

      def load(dataset):
          dist.init_process_group()
          sampler = DistributedSampler(dataset)
    -     return DataLoader(dataset, batch_size=32, sampler=sampler, shuffle=True)
    +     return DataLoader(dataset, batch_size=32, sampler=sampler)
    """,
    fix="removes `shuffle=True`",
)
def shuffle_with_sampler(script: Script) -> Iterator[Violation]:
    """Find loaders with both `shuffle=True` and a sampler."""
    for call in script.calls("DataLoader"):
        sampler = argument(call, "sampler", 3)
        both = sampler is not None and true(argument(call, "shuffle", 2))
        if both and None not in script.constants(sampler):
            keyword = argument(call, "shuffle") is not None
            yield Violation(call, edit=Edit("argument", call, name="shuffle") if keyword else None)


@rule(
    "LS203",
    "evaluation sampler that pads",
    "this sampler repeats samples until ranks have equally many: metrics over them count some twice",
    "misleads",
    why="""Without `drop_last`, DistributedSampler repeats the first samples so that every rank has as many. An accuracy
    over all ranks counts these twice, and depends on the number of ranks.""",
    example="""
      import torch.distributed as dist
    - from torch.utils.data import DataLoader, DistributedSampler
    + from torch.utils.data import DataLoader, Subset

      def load(val_set):
          dist.init_process_group()
    -     sampler = DistributedSampler(val_set, shuffle=False)
    -     return DataLoader(val_set, batch_size=32, sampler=sampler)
    +     mine = range(dist.get_rank(), len(val_set), dist.get_world_size())
    +     return DataLoader(Subset(val_set, mine), batch_size=32)
    """,
    default=False,
)
def padding_sampler(script: Script) -> Iterator[Violation]:
    """Find samplers of evaluation data that repeat samples to give all ranks equally many."""
    if script.matches("gather_for_metrics"):
        return
    for call in script.calls("DistributedSampler"):
        if for_evaluation(script, call) and not true(argument(call, "drop_last", 5)):
            yield Violation(call)


@rule(
    "LS205",
    "no sampler for several ranks",
    "every rank reads the whole dataset: give the loader a DistributedSampler",
    "misleads",
    why="""Each rank has a loader of its own. Without a sampler that deals samples out, every rank goes over all of them:
    an epoch takes as many steps as on one rank, and sees each sample once per rank.""",
    example="""
      import torch.distributed as dist
      from torch.nn.parallel import DistributedDataParallel as DDP
    - from torch.utils.data import DataLoader
    + from torch.utils.data import DataLoader, DistributedSampler

      def train(net, dataset, optimizer):
          dist.init_process_group()
          model = DDP(net)
    -     for x, y in DataLoader(dataset, batch_size=32, shuffle=True):
    +     sampler = DistributedSampler(dataset)
    +     for x, y in DataLoader(dataset, batch_size=32, sampler=sampler):
              model(x, y).backward()
              optimizer.step()
          dist.destroy_process_group()
    """,
)
def no_sampler(script: Script) -> Iterator[Violation]:
    """Find training loaders without a sampler, in programs that split the data in no other way."""
    if not script.plain or "DDP" not in script.called or script.matches("IterableDataset"):
        return
    dealt = r"[sS]ampler|Subset|split_dataset_by_node|\.shard\(|\[\s*\w*rank\w*\s*::"
    if script.matches(dealt):
        return
    for call in script.calls("DataLoader"):
        whole = call in script.loaders and not spread(call) and not for_evaluation(script, call)
        dataset = argument(call, "dataset", 0)
        if whole and dataset is not None and not any(map(script.is_rank, script.sources(dataset))):
            yield Violation(call)


@rule(
    "LS210",
    "seed with the rank in it",
    "ranks have to draw alike here to share samples out: give all of them one seed",
    "corrupts",
    why="""Every DistributedSampler shuffles the whole dataset and takes each n-th sample, and every rank cuts the dataset by
    itself in `random_split`. With a seed of its own, a rank does so in a different order: samples are read twice, and others
    never, or one rank tests with what another trains on.""",
    example="""
      import torch.distributed as dist
      from torch.utils.data import DistributedSampler

      def load(dataset, rank):
          dist.init_process_group()
    -     return DistributedSampler(dataset, seed=42 + rank)
    +     return DistributedSampler(dataset, seed=42)
    """,
)
def seed_by_rank(script: Script) -> Iterator[Violation]:
    """Find samplers and random splits whose seed contains the rank."""
    for call in script.calls("DistributedSampler"):
        if any(map(script.is_rank, script.sources(argument(call, "seed", 4)))):
            yield Violation(call)
    for call in script.calls("torch.utils.data.random_split"):
        for made in script.sources(argument(call, "generator", 2)):
            match made:
                case ast.Call(func=ast.Attribute(attr="manual_seed"), args=[seed]):
                    if any(map(script.is_rank, script.sources(seed))):
                        yield Violation(call)
