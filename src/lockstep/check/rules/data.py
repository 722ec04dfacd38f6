"""LS2: what each rank reads, and in which order."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from lockstep.check.arguments import argument, true
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
    if ".set_epoch" in script.called or framework or "set_epoch" in script.text:
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
