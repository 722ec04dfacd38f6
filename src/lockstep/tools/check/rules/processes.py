"""Rules on processes that a script starts itself (family LS1)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from lockstep.tools.check.rule import Violation, rule
from lockstep.tools.check.script import Script
from lockstep.tools.check.syntax import Function, argument


@rule(
    "LS106",
    "fork after CUDA, or what cannot be pickled",
    "a forked process cannot use CUDA, and a local function cannot be pickled: spawn a function of the module",
    "fails",
    why="""A process forked from one that has used CUDA cannot use it: "Cannot re-initialize CUDA in forked subprocess".
    `mp.spawn` starts fresh processes and sends the function by pickle, which takes functions of a module's top level only:
    no lambda, and no function defined in another.""",
    example="""
      import torch
      import torch.multiprocessing as mp
      import torch.distributed as dist

      def work(rank):
          dist.init_process_group("nccl", rank=rank)
          dist.destroy_process_group()

      if __name__ == "__main__":
    -     mp.spawn(lambda rank: work(rank), nprocs=torch.cuda.device_count())
    +     mp.spawn(work, nprocs=torch.cuda.device_count())
    """,
)
def cannot_start(script: Script) -> Iterator[Violation]:
    """Find `mp.spawn` of functions that cannot be pickled, and forks where CUDA is used."""
    for call in script.calls("mp.spawn"):
        target = argument(call, "fn", 0)
        definition = None if target is None else script.project.definition(script.module, target)
        local = definition in script.module.parents and isinstance(
            script.module.scope(definition or call), Function
        )
        if isinstance(target, ast.Lambda) or local:
            yield Violation(
                call, "mp.spawn pickles its function: define it at the top of the module"
            )
    for call in script.calls("mp.set_start_method", "mp.get_context", "mp.start_processes"):
        method = argument(call, "method", 0) or argument(call, "start_method")
        starts = "mp.Process" in script.called or ".Process" in script.called
        starts = starts or script.name(call.func) != "mp.get_context"
        if starts and script.constants(method) == ["fork"] and script.matches("nccl"):
            message = "a forked process cannot use CUDA if this one has: start processes by spawn"
            yield Violation(call, message)


@rule(
    "LS108",
    "processes started outside the main guard",
    "each process that starts imports this module and comes here again: put it under if __name__ == '__main__'",
    "fails",
    why="""Spawned processes import the main module, and its top level runs in each of them: they would start processes
    themselves, which Python refuses with "bootstrapping phase".""",
    example="""
      import torch.multiprocessing as mp
      import torch.distributed as dist

      def work(rank):
          dist.init_process_group("gloo", rank=rank, world_size=2)
          dist.destroy_process_group()

    - mp.spawn(work, nprocs=2)
    + if __name__ == "__main__":
    +     mp.spawn(work, nprocs=2)
    """,
)
def no_main_guard(script: Script) -> Iterator[Violation]:
    """Find calls that start processes and run on import of the script, for lack of a `__main__` guard."""
    spawns = script.matches(r"set_start_method\(\s*[^)]*['\"](spawn|forkserver)")
    for call in script.module.calls:
        if _starts_fresh(script, call, always=spawns) and _at_import(script, call):
            yield Violation(call)


def _starts_fresh(script: Script, call: ast.Call, *, always: bool) -> bool:
    """Whether the processes that a call starts import the script again, as with the start method `spawn`.

    `always`: whether the script has set such a start method for `mp.Process`.
    """
    name = script.name(call.func)
    if name in ("mp.spawn", "mp.start_processes"):
        return script.constants(argument(call, "start_method")) != ["fork"]
    if name == "mp.Process":
        return always
    match call.func:
        case ast.Attribute(value=ast.expr() as context, attr="Process"):
            made = script.made_by(context, "mp.get_context")
            return any(script.constants(argument(one, "method", 0)) == ["spawn"] for one in made)
    workers = argument(call, "multiprocessing_context") if name == "DataLoader" else None
    return script.constants(workers) == ["spawn"]


def _at_import(script: Script, call: ast.Call, depth: int = 4) -> bool:
    """Return whether importing the module executes `call` without a guard.

    A guard is an `if` such as `if __name__ == "__main__"`. The call is at the top level, or in a function
    that code at the top level calls. `depth`: levels of callers to follow.
    """
    scope = script.module.scope(call)
    for node in script.module.above(call):
        if isinstance(node, Function):
            break
        if not isinstance(node, ast.If):
            continue
        # At a module's top any branch may be a guard; in a function the condition has to mention one of these.
        words = r"__name__|environ|getenv|rank|RANK|parent_process"
        if isinstance(scope, ast.Module) or re.search(words, ast.unparse(node.test)):
            return False
    callers = script.callers(scope) if depth else []
    return isinstance(scope, ast.Module) or any(
        _at_import(caller, site, depth - 1) for caller, site in callers
    )
