"""Rules on datasets: downloads, listings of files, splits, pinned memory, workers, seeds (family LS2)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from lockstep.tools.check.fix import Edit
from lockstep.tools.check.order import launcher_only
from lockstep.tools.check.rule import Violation, rule
from lockstep.tools.check.script import Script
from lockstep.tools.check.syntax import argument, dotted, last_name, method, spread, true


@rule(
    "LS206",
    "download on all ranks",
    "all ranks download or unpack to one place at once: let one rank do it, and the others wait",
    "corrupts",
    why="""Ranks of a node write the same files at the same time, and read them half written: checksums fail, archives
    are corrupt, now and then.""",
    example="""
    + import os
      import torch.distributed as dist
      from torchvision.datasets import MNIST

      def load():
          dist.init_process_group()
    -     return MNIST("data", download=True)
    +     if int(os.environ["LOCAL_RANK"]) == 0:
    +         MNIST("data", download=True)
    +     dist.barrier()
    +     return MNIST("data")
    """,
)
def download_everywhere(script: Script) -> Iterator[Violation]:
    """Find downloads and unpacked archives that all ranks write to one path."""
    if script.matches("FileLock") or not script.flavours - {"lockstep"}:
        return
    for call in script.module.calls:
        unpacks = method(call) == "extractall"
        fetches = unpacks or script.name(call.func) in _FETCHES or true(argument(call, "download"))
        hub = script.module.path.name == "hubconf.py"  # this file loads a model for `torch.hub`
        if fetches and not hub and script.guard(call) is None and not launcher_only(script, call):
            yield Violation(call)


#: Functions that write files without a lock; `load_dataset` and `from_pretrained` have locks.
_FETCHES = {
    *("urllib.request.urlretrieve", "wget.download", "gdown.download", "nltk.download"),
    *("torch.hub.load", "shutil.unpack_archive"),
    *("torchvision.datasets.utils.download_and_extract_archive",),
    *("torchvision.datasets.utils.download_url",),
}


@rule(
    "LS207",
    "listing without an order",
    "a listing has a different order on another machine: sort it",
    "corrupts",
    why="""`os.listdir`, `glob` and `Path.iterdir` return files in the order of the file system, which differs between
    machines, and a set of texts has a different order in every process. Ranks that deal samples out by number then read some
    twice and others never.""",
    example="""
      import os
      import torch.distributed as dist
      from torch.utils.data import Dataset

      class Images(Dataset):
          def __init__(self, root):
    -         self.files = os.listdir(root)
    +         self.files = sorted(os.listdir(root))

      dist.init_process_group()
      dist.destroy_process_group()
    """,
    fix="puts `sorted(…)` around it",
)
def unordered(script: Script) -> Iterator[Violation]:
    """Find datasets whose samples are numbered in the order of an unsorted file listing or of a set."""
    for call in script.module.calls:
        if _numbers_set(script, call):
            name = ast.unparse(call)
            yield Violation(call, f"{name} has a different order in every process: sort it")
        name = script.name(call.func)
        lists = method(call) in ("iterdir", "rglob", "glob")
        lists = lists or name in ("os.listdir", "os.scandir", "glob.glob", "glob.iglob")
        if not lists or not script.module.is_dataset(call) or _sorted(script, call):
            continue
        entries = name == "os.scandir"  # its entries cannot be compared, so `sorted` needs a key
        managed = isinstance(script.module.parents.get(call), ast.withitem)
        edit = Edit("replace", call, f"sorted({script.module.source(call)})")
        how = "sort it by name" if entries else "sort it"
        message = f"{ast.unparse(call.func)} has a different order on another machine: {how}"
        yield Violation(call, message, None if entries or managed else edit)


def _numbers_set(script: Script, call: ast.Call) -> bool:
    """Whether `call` numbers the elements of a set, whose order may differ between processes.

    Such calls are `enumerate` of a set, and in a dataset class also `list` of a set.
    """
    match call:
        case ast.Call(func=ast.Name(id="enumerate" | "list" as name), args=[first, *_]):
            made = isinstance(first, ast.Call) and dotted(first.func) in ("set", "frozenset")
            unordered = made or isinstance(first, ast.Set | ast.SetComp)
            numbers = name == "enumerate" or script.module.is_dataset(call)
            return unordered and numbers and not _sorted(script, call)
    return False


#: Functions whose result does not depend on the order of their arguments' elements.
_ORDERED = {"sorted", "len", "any", "max", "min", "natsorted"}


def _sorted(script: Script, call: ast.Call) -> bool:
    """Whether the order of a file listing does not matter, since it is sorted or tested in an `if`."""
    for node in script.module.above(call):
        if isinstance(node, ast.Call) and last_name(node.func) in _ORDERED:
            return True
        if isinstance(node, ast.stmt):
            return ".sort(" in script.module.text or isinstance(node, ast.If)
    return False


@rule(
    "LS208",
    "IterableDataset that every rank reads whole",
    "__iter__ looks neither at the rank nor at get_worker_info(): every rank reads all of it",
    "corrupts",
    why="""A sampler cannot deal out a stream. Unless `__iter__` skips what belongs to other ranks and workers, each
    sample is seen once per rank and once per worker.""",
    example="""
    + import itertools
      import torch.distributed as dist
      from torch.utils.data import DataLoader, IterableDataset

      class Lines(IterableDataset):
          def __iter__(self):
    -         yield from open("data.txt")
    +         rank, size = dist.get_rank(), dist.get_world_size()
    +         yield from itertools.islice(open("data.txt"), rank, None, size)

      dist.init_process_group()
      loader = DataLoader(Lines(), batch_size=32)
      dist.destroy_process_group()
    """,
)
def whole_stream(script: Script) -> Iterator[Violation]:
    """Find iterable datasets that do not split their data by rank or DataLoader worker."""
    if not script.plain or script.matches(r"split_dataset_by_node|IterableDatasetShard"):
        return
    splits = r"rank|world|worker|shard|replica|num_parts|start|offset"
    for owner, iterator in script.module.iterators:
        if not re.search(splits, ast.unparse(owner)):
            yield Violation(iterator)


@rule(
    "LS209",
    "random split that differs between ranks",
    "each rank draws its own split: pass generator=torch.Generator().manual_seed(0)",
    "corrupts",
    why="""Ranks start with different random states. `random_split` then cuts the data differently on each, and a sample
    that one rank tests with is one that another trains on.""",
    example="""
      import torch
      import torch.distributed as dist
      from torch.utils.data import random_split

      def load(dataset):
          dist.init_process_group()
    -     return random_split(dataset, [0.9, 0.1])
    +     return random_split(dataset, [0.9, 0.1], generator=torch.Generator().manual_seed(0))
    """,
    fix="passes a generator with seed 0, where torch is imported by its name",
)
def random_split(script: Script) -> Iterator[Violation]:
    """Find `random_split` without a generator, in programs without a seed or with one seed per rank."""
    splits = list(script.calls("torch.utils.data.random_split"))
    if "lockstep" in script.flavours or not splits:
        return
    seeds = [
        call
        for one in script.program
        for call in one.module.calls
        if last_name(call.func) in ("manual_seed", "seed_everything", "set_seed")
    ]
    alike = any(not any(script.is_rank(value) for value in seed.args) for seed in seeds)
    for call in splits:
        if argument(call, "generator", 2) is None and not alike and not spread(call):
            code = "torch.Generator().manual_seed(0)"
            edit = Edit("argument", call, code, "generator")
            known = script.module.imports.get("torch") == "torch"
            yield Violation(call, edit=edit if known else None)


@rule(
    "LS211",
    "non_blocking copy from memory that is not pinned",
    "non_blocking=True waits all the same, since no loader pins memory: pass pin_memory=True",
    "slow",
    why="""A copy to the GPU overlaps with computing only if it comes from pinned memory. From other memory it is made in
    two parts, and the step waits.""",
    example="""
      import torch.distributed as dist
      from torch.utils.data import DataLoader, DistributedSampler

      def train(model, dataset, optimizer):
          dist.init_process_group("nccl")
    -     loader = DataLoader(dataset, batch_size=32, sampler=DistributedSampler(dataset))
    +     sampler = DistributedSampler(dataset)
    +     loader = DataLoader(dataset, batch_size=32, sampler=sampler, pin_memory=True)
          for x in loader:
              model(x.to("cuda:0", non_blocking=True)).backward()
              optimizer.step()
          dist.destroy_process_group()
    """,
    fix="adds `pin_memory=True` to the loader",
)
def not_pinned(script: Script) -> Iterator[Violation]:
    """Find loaders without pinned memory in programs that copy with `non_blocking=True`."""
    if not script.matches(r"non_blocking\s*=\s*True") or script.matches(r"pin_?memory"):
        return
    for call in script.calls("DataLoader"):
        if call in script.loaders and not spread(call):
            yield Violation(call, edit=Edit("argument", call, "True", "pin_memory"))


@rule(
    "LS212",
    "images decoded in the training process",
    "images are decoded between steps: pass num_workers",
    "slow",
    why="""With `num_workers=0`, the default, the process that trains decodes every image itself, and the GPU waits.""",
    example="""
      import torch.distributed as dist
      from torch.utils.data import DataLoader, DistributedSampler
      from torchvision.datasets import ImageFolder

      def load():
          dist.init_process_group("nccl")
          images = ImageFolder("data")
    -     return DataLoader(images, batch_size=32, sampler=DistributedSampler(images))
    +     return DataLoader(images, batch_size=32, sampler=DistributedSampler(images), num_workers=4)
    """,
)
def no_workers(script: Script) -> Iterator[Violation]:
    """Find loaders of image folders without worker processes, in programs that use GPUs."""
    folders = {"ImageFolder", "VOCSegmentation", "VOCDetection", "CocoDetection", "ImageNet"}
    for call in script.calls("DataLoader"):
        workers = argument(call, "num_workers", 5)
        made = [last_name(one.func) for one in script.made_by(argument(call, "dataset", 0))]
        none = workers is None or (isinstance(workers, ast.Constant) and workers.value == 0)
        if none and folders.intersection(made) and script.cuda and not spread(call):
            yield Violation(call)


@rule(
    "LS214",
    "no seed",
    "nothing is seeded: two runs of this script have different results",
    "misleads",
    why="""Initial weights, dropout and augmentation come from a random state that differs in every run.""",
    example="""
    + import torch
      import torch.distributed as dist

    + torch.manual_seed(0)
      dist.init_process_group()
      dist.destroy_process_group()
    """,
    default=False,
)
def no_seed(script: Script) -> Iterator[Violation]:
    """Find calls that create a process group, in programs that set no seed."""
    if not script.matches(r"manual_seed|seed_everything|set_seed"):
        for call in script.calls("dist.init_process_group", "Accelerator", "Fabric"):
            yield Violation(call)
