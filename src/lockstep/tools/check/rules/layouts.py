"""Rules on Lockstep scripts whose result depends on the number of ranks (family LS6)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from lockstep.tools.check.rule import Violation, rule
from lockstep.tools.check.script import Script
from lockstep.tools.check.source import Module
from lockstep.tools.check.syntax import Function, last_name

#: Last names of functions whose arguments determine the result of training.
_DECIDES = {
    *("loader", "DataLoader", "DistributedSampler", "Subset", "random_split", "backward", "Run"),
    *("manual_seed", "manual_seed_all", "seed", "default_rng", "RandomState", "Random"),
    *("TrainingArguments", "seed_everything", "set_seed"),
}
#: Arguments of these functions that do not change the result.
_FREE = {"num_workers", "prefetch_factor", "pin_memory", "name", "run_dir", "rank", "world_size"}
_GENERATORS = {
    *("torch.Generator", "random.Random"),
    *("numpy.random.default_rng", "numpy.random.RandomState"),
}
_SEEDS = {"manual_seed", "seed", "set_state", "get_state", "setstate", "getstate", "initial_seed"}


@rule(
    "LS608",
    "rank in what is computed",
    "another layout has other ranks, and computes something else here: use the rank for output only",
    "corrupts",
    why="""The run deals samples out, weights losses and seeds each microbatch, the same on any number of ranks. A seed, a part of
    the data, a batch size or a learning rate that has the rank or the number of ranks in it differs between layouts, and
    after a restart on fewer ranks.""",
    example="""
      import lockstep

      with lockstep.Run("toy", seed=0, replicas=2) as run:
    -     loader = run.loader(data(), batch_size=32 // run.world.size)
    +     loader = run.loader(data(), batch_size=32)
    """,
)
def computed_by_rank(script: Script) -> Iterator[Violation]:
    """Find seeds, data, batch sizes, losses and learning rates that contain the rank or the world size."""
    for call in script.module.calls:
        last = last_name(call.func)
        if last not in _DECIDES and not re.match(r"torch\.optim\.", script.name(call.func)):
            continue
        named = [word.value for word in call.keywords if word.arg not in _FREE]
        if any(_of_layout(script, one) for one in (*call.args, *named)):
            yield Violation(call)
    for node in script.module.parents:
        match node:
            case ast.Subscript(slice=ast.Slice(step=ast.expr() as step)):
                if _of_layout(script, step):
                    yield Violation(node)


def _of_layout(script: Script, node: ast.expr) -> bool:
    """Whether `node`, or what it is computed from, contains the rank or the world size."""
    return any(
        script.is_rank(source) or script.is_world_size(source)
        for source in (node, *script.sources(node))
    )


@rule(
    "LS609",
    "random generator of the script's own",
    "the run neither sets nor saves this generator: draw from the global ones, or make it here from torch.initial_seed()",
    "corrupts",
    why="""The run sets the global generators of torch, NumPy and Python for each sample and each microbatch, so that draws depend
    on neither the layout nor a restart. A generator that the script keeps continues from draw to draw: a rank that hosts
    two replicas draws twice as often, and after a crash it begins anew.""",
    example="""
      import lockstep
      import torch

      with lockstep.Run("toy", seed=0, replicas=2) as run:
    -     own = torch.Generator().manual_seed(0)
          for x, y in run.loader(data(), batch_size=32):
    -         x = x + torch.randn(x.shape, generator=own)
    +         x = x + torch.randn(x.shape)
              run.backward(loss_of(model(x), y))
              optimizer.step()
    """,
)
def own_generator(script: Script) -> Iterator[Violation]:
    """Find random draws in training steps and `__getitem__` from a generator made outside of them."""
    for call in script.module.calls:
        if not _per_sample(script, call) and script.step_loop(call) is None:
            continue
        if any(_kept(script, one) for one in _drawn_from(call)):
            yield Violation(call)


def _drawn_from(call: ast.Call) -> list[ast.expr]:
    """Return the random generators from which a call may draw."""
    given = [word.value for word in call.keywords if word.arg == "generator"]
    match call.func:
        case ast.Attribute(value=ast.Name() | ast.Attribute() as of, attr=name) if (
            name not in _SEEDS
        ):
            return [*given, of]
    return given


def _per_sample(script: Script, node: ast.AST) -> bool:
    scope = script.module.scope(node)
    within = isinstance(scope, Function) and scope.name == "__getitem__"
    return within and script.module.is_dataset(node)


def _kept(script: Script, node: ast.expr) -> bool:
    """Return whether `node` may be a random generator that is made outside of training steps.

    A generator made in `__getitem__` of a dataset does not count either.
    """
    return any(
        _makes_generator(home, value)
        and not _per_sample(script.of(home), value)
        and script.of(home).step_loop(value) is None
        for home, value in script.project.sources(script.module, node)
    )


def _makes_generator(module: Module, value: ast.expr) -> bool:
    match value:
        case ast.Call(func=ast.Attribute(value=ast.Call(func=func), attr="manual_seed")):
            return module.name(func) in _GENERATORS
        case ast.Call(func=func):
            return module.name(func) in _GENERATORS
    return False


@rule(
    "LS610",
    "stream that splits itself",
    "the loader deals out what this yields, and it yields a part that depends on the rank or the worker: yield everything",
    "corrupts",
    why="""A Lockstep loader takes a stream whole and assigns its items to replicas. One that skips items by its rank or by
    `get_worker_info()` is another stream on another layout, or with a different number of workers.""",
    example="""
      import lockstep
    - from torch.utils.data import IterableDataset, get_worker_info
    + from torch.utils.data import IterableDataset

      class Lines(IterableDataset):
          def __iter__(self):
    -         worker = get_worker_info()
    -         yield from list(open("data.txt"))[worker.id :: worker.num_workers]
    +         yield from open("data.txt")

      with lockstep.Run("toy", seed=0, replicas=2) as run:
          loader = run.loader(Lines(), batch_size=32)
    """,
)
def split_stream(script: Script) -> Iterator[Violation]:
    """Find iterable datasets that read the rank or the loader worker's number, to split their data."""
    splits = r"get_worker_info|get_rank|\b(world_size|rank)\b"
    for _, iterator in script.module.iterators:
        if re.search(splits, ast.unparse(iterator)):
            yield Violation(iterator)
