"""LS2, first part: samplers, loaders and batch sizes: which samples a rank gets."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from lockstep.check.arguments import argument, spread, true
from lockstep.check.fix import Edit
from lockstep.check.rule import Hit, rule
from lockstep.check.script import EVALUATION, Script


def for_evaluation(script: Script, call: ast.Call) -> bool:
    """Whether a sampler, a loader or a dataset is for evaluation, by the names around it."""
    words = [script.bound_name(call), *(ast.unparse(one) for one in call.args[:1])]
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
    bad="""
    import torch.distributed as dist
    from torch.utils.data import DataLoader
    from torch.utils.data.distributed import DistributedSampler

    def train(model, dataset, optimizer):
        dist.init_process_group("gloo")
        sampler = DistributedSampler(dataset)
        loader = DataLoader(dataset, batch_size=32, sampler=sampler)
        for epoch in range(10):
            for x, y in loader:
                model(x, y).backward()
                optimizer.step()
        dist.destroy_process_group()
    """,
    good="""
    import torch.distributed as dist
    from torch.utils.data import DataLoader
    from torch.utils.data.distributed import DistributedSampler

    def train(model, dataset, optimizer):
        dist.init_process_group("gloo")
        sampler = DistributedSampler(dataset)
        loader = DataLoader(dataset, batch_size=32, sampler=sampler)
        for epoch in range(10):
            sampler.set_epoch(epoch)
            for x, y in loader:
                model(x, y).backward()
                optimizer.step()
        dist.destroy_process_group()
    """,
    fix="puts `set_epoch` at the head of the loop over epochs, where sampler and loop are in one function",
)
def no_set_epoch(script: Script) -> Iterator[Hit]:
    """Find samplers of training data in programs that never call `set_epoch`."""
    framework = {".prepare", ".setup_dataloaders"} & script.called
    if ".set_epoch" in script.called or framework or script.says("set_epoch"):
        return
    epochs = [loop for one in script.program for loop in script.of(one).epoch_loops]
    for call in script.calls("DistributedSampler"):
        shuffle = argument(call, "shuffle", 3)
        if not epochs or for_evaluation(script, call) or False in script.constants_of(shuffle):
            continue
        yield Hit(call, None, tuple(_set_epoch(script, call)))


def _set_epoch(script: Script, call: ast.Call) -> Iterator[Edit]:
    """Yield the edit that calls `set_epoch`, where the sampler's name is known in the loop."""
    name = script.bound_name(call)
    scope = script.module.scope(call)
    for loop in script.epoch_loops:
        known = name.isidentifier() and script.module.scope(loop) is scope
        target = loop.target if known and isinstance(loop, ast.For) else None
        if isinstance(target, ast.Name) and target.id != "_" and _always_bound(script, call):
            yield Edit("first", loop, f"{name}.set_epoch({target.id})")
            return


def _always_bound(script: Script, call: ast.Call) -> bool:
    parent = script.module.parents.get(call)
    above = script.module.parents.get(parent) if parent is not None else None
    return isinstance(parent, ast.Assign | ast.AnnAssign) and not isinstance(above, ast.If)


@rule(
    "LS202",
    "shuffle beside a sampler",
    "DataLoader refuses shuffle=True beside a sampler: leave shuffle out, the sampler shuffles",
    "fails",
    why="""DataLoader raises ValueError for the pair. The sampler decides the order: DistributedSampler shuffles
    by default.""",
    bad="""
    import torch.distributed as dist
    from torch.utils.data import DataLoader, DistributedSampler

    def load(dataset):
        dist.init_process_group()
        sampler = DistributedSampler(dataset)
        return DataLoader(dataset, batch_size=32, sampler=sampler, shuffle=True)
    """,
    good="""
    import torch.distributed as dist
    from torch.utils.data import DataLoader, DistributedSampler

    def load(dataset):
        dist.init_process_group()
        sampler = DistributedSampler(dataset)
        return DataLoader(dataset, batch_size=32, sampler=sampler)
    """,
    fix="removes `shuffle=True`",
)
def shuffle_with_sampler(script: Script) -> Iterator[Hit]:
    """Find loaders that are given both."""
    for call in script.calls("DataLoader"):
        sampler = argument(call, "sampler", 3)
        both = sampler is not None and true(argument(call, "shuffle", 2))
        if sampler is None or not both or None in script.constants(sampler):
            continue
        keyword = any(one.arg == "shuffle" for one in call.keywords)
        yield Hit(call, None, (Edit("argument", call, name="shuffle"),) if keyword else ())


@rule(
    "LS203",
    "evaluation sampler that pads",
    "this sampler repeats samples until ranks have equally many: metrics over them count some twice",
    "misleads",
    why="""Without `drop_last`, DistributedSampler repeats the first samples so that every rank has as many. An accuracy
    over all ranks counts these twice, and depends on the number of ranks.""",
    bad="""
    import torch.distributed as dist
    from torch.utils.data import DataLoader, DistributedSampler

    def load(val_set):
        dist.init_process_group()
        sampler = DistributedSampler(val_set, shuffle=False)
        return DataLoader(val_set, batch_size=32, sampler=sampler)
    """,
    good="""
    import torch.distributed as dist
    from torch.utils.data import DataLoader, Subset

    def load(val_set):
        dist.init_process_group()
        mine = range(dist.get_rank(), len(val_set), dist.get_world_size())
        return DataLoader(Subset(val_set, mine), batch_size=32)
    """,
    default=False,
)
def padding_sampler(script: Script) -> Iterator[Hit]:
    """Find samplers of evaluation data without `drop_last`."""
    if script.says("gather_for_metrics"):
        return
    for call in script.calls("DistributedSampler"):
        if for_evaluation(script, call) and not true(argument(call, "drop_last", 5)):
            yield Hit(call)


@rule(
    "LS204",
    "batch size multiplied by the ranks",
    "with a DistributedSampler batch_size is that of one rank: times the ranks, the whole is their square",
    "corrupts",
    why="""Each rank has a loader of its own. With a DistributedSampler `batch_size` samples go to each rank, and the global
    batch has `batch_size * world_size`: multiplied once more, it grows with the square of the ranks.""",
    bad="""
    import torch.distributed as dist
    from torch.utils.data import DataLoader, DistributedSampler

    def load(dataset, per_rank):
        dist.init_process_group()
        batch = per_rank * dist.get_world_size()
        return DataLoader(dataset, batch_size=batch, sampler=DistributedSampler(dataset))
    """,
    good="""
    import torch.distributed as dist
    from torch.utils.data import DataLoader, DistributedSampler

    def load(dataset, per_rank):
        dist.init_process_group()
        return DataLoader(dataset, batch_size=per_rank, sampler=DistributedSampler(dataset))
    """,
)
def multiplied_batch(script: Script) -> Iterator[Hit]:
    """Find loaders of one rank's samples whose batch size has the number of ranks as a factor."""
    for call in script.calls("DataLoader"):
        sampler, size = argument(call, "sampler", 3), argument(call, "batch_size", 1)
        if sampler is None or size is None or not script.made_by(sampler, "DistributedSampler"):
            continue
        for value in script.sources(size):
            factor = isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mult)
            factors = [one for one in ast.walk(value) if isinstance(one, ast.Name | ast.Attribute)]
            world = any(script.is_world_size(of) for one in factors for of in script.sources(one))
            if factor and (world or script.is_world_size(value)):
                yield Hit(call)
                break


@rule(
    "LS205",
    "no sampler for several ranks",
    "every rank reads the whole dataset: give the loader a DistributedSampler",
    "misleads",
    why="""Each rank has a loader of its own. Without a sampler that deals samples out, every rank goes over all of them:
    an epoch takes as many steps as on one rank, and sees each sample once per rank.""",
    bad="""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP
    from torch.utils.data import DataLoader

    def train(net, dataset, optimizer):
        dist.init_process_group()
        model = DDP(net)
        for x, y in DataLoader(dataset, batch_size=32, shuffle=True):
            model(x, y).backward()
            optimizer.step()
        dist.destroy_process_group()
    """,
    good="""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP
    from torch.utils.data import DataLoader, DistributedSampler

    def train(net, dataset, optimizer):
        dist.init_process_group()
        model = DDP(net)
        sampler = DistributedSampler(dataset)
        for x, y in DataLoader(dataset, batch_size=32, sampler=sampler):
            model(x, y).backward()
            optimizer.step()
        dist.destroy_process_group()
    """,
)
def no_sampler(script: Script) -> Iterator[Hit]:
    """Find loaders of training loops without a sampler, in programs with nothing that deals samples out."""
    if not script.plain or "DDP" not in script.called or script.says("IterableDataset"):
        return
    dealt = r"[sS]ampler|Subset|split_dataset_by_node|\.shard\(|\[\s*\w*rank\w*\s*::"
    if script.says(dealt):
        return
    for call in script.calls("DataLoader"):
        whole = call in script.loaders and not spread(call) and not for_evaluation(script, call)
        dataset = argument(call, "dataset", 0)
        if whole and dataset is not None and not any(map(script.is_rank, script.sources(dataset))):
            yield Hit(call)


@rule(
    "LS210",
    "sampler seeded by the rank",
    "ranks have to shuffle alike to share samples out: give all samplers one seed",
    "corrupts",
    why="""Every DistributedSampler shuffles the whole dataset and takes each n-th sample. With a seed of its own, a rank
    takes them from another order: samples are read twice, and others never.""",
    bad="""
    import torch.distributed as dist
    from torch.utils.data import DistributedSampler

    def load(dataset, rank):
        dist.init_process_group()
        return DistributedSampler(dataset, seed=42 + rank)
    """,
    good="""
    import torch.distributed as dist
    from torch.utils.data import DistributedSampler

    def load(dataset, rank):
        dist.init_process_group()
        return DistributedSampler(dataset, seed=42)
    """,
)
def sampler_seed(script: Script) -> Iterator[Hit]:
    """Find samplers whose seed has the rank in it."""
    for call in script.calls("DistributedSampler"):
        seed = argument(call, "seed", 4)
        if seed is not None and any(script.is_rank(value) for value in script.sources(seed)):
            yield Hit(call)


@rule(
    "LS213",
    "evaluation that drops samples",
    "drop_last=True leaves the last samples out of the evaluation",
    "misleads",
    why="""The samples of the last, smaller batch are never measured, and how many these are depends on batch size and
    number of ranks.""",
    bad="""
    import torch.distributed as dist
    from torch.utils.data import DataLoader

    def load(val_set):
        dist.init_process_group()
        return DataLoader(val_set, batch_size=32, drop_last=True)
    """,
    good="""
    import torch.distributed as dist
    from torch.utils.data import DataLoader

    def load(val_set):
        dist.init_process_group()
        return DataLoader(val_set, batch_size=32)
    """,
)
def dropped_evaluation(script: Script) -> Iterator[Hit]:
    """Find loaders of evaluation data that drop."""
    for call in script.calls("DataLoader"):
        if for_evaluation(script, call) and true(argument(call, "drop_last", 8)):
            yield Hit(call)


@rule(
    "LS215",
    "learning rate that ignores the ranks",
    "each rank adds its batch to the global batch, and this learning rate is the same for any number: scale it, or say why not",
    "misleads",
    why="""With a batch size per rank the global batch grows with the ranks, and each epoch has fewer steps. Whether the
    learning rate follows (linearly, with a warm-up) or the batch is divided is a decision that a script should show.""",
    bad="""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP

    def build(net):
        dist.init_process_group()
        model = DDP(net)
        return torch.optim.SGD(model.parameters(), lr=0.1)
    """,
    good="""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP

    def build(net):
        dist.init_process_group()
        model = DDP(net)
        lr = 0.1 * dist.get_world_size()
        return torch.optim.SGD(model.parameters(), lr=lr)
    """,
    default=False,
)
def plain_learning_rate(script: Script) -> Iterator[Hit]:
    """Find constant learning rates in programs that neither scale them nor divide a batch."""
    if not script.plain or "DDP" not in script.called:
        return
    if script.says(
        r"(lr|learning_rate)\w*\s*\*|\*\s*[\w.]*(lr|learning_rate)|batch_size\s*/|=\s*[\d.]+\s*\*\s*[\w.]*world"
    ):
        return
    for call in script.module.calls:
        rate = (
            argument(call, "lr", 1) if script.name(call.func).startswith("torch.optim.") else None
        )
        if rate is not None and script.constants(rate):
            yield Hit(call)
