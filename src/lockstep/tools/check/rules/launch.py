"""Rules on the start and end of ranks and processes, rendezvous addresses, and devices (family LS1)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from lockstep.tools.check.fix import Edit
from lockstep.tools.check.rule import Violation, rule
from lockstep.tools.check.rules.wrapping import always_wrapped
from lockstep.tools.check.script import Script
from lockstep.tools.check.syntax import Function, argument, method


@rule(
    "LS101",
    "hard-coded address or port",
    "MASTER_ADDR and MASTER_PORT are written over with constants: two runs on a machine collide, and a launcher's values are lost",
    "fails",
    why="""torchrun and other launchers set `MASTER_ADDR` and `MASTER_PORT`. A script that assigns constants sends every
    rank to its own machine when there are several nodes, and a second run on the machine meets the first one's port.
    A constant `init_method="tcp://…"` does the same.""",
    example="""
      import os
      import torch.distributed as dist

    - os.environ["MASTER_ADDR"] = "localhost"
    - os.environ["MASTER_PORT"] = "12355"
    + os.environ.setdefault("MASTER_ADDR", "localhost")
    + os.environ.setdefault("MASTER_PORT", "12355")
      dist.init_process_group("gloo")
      dist.destroy_process_group()
    """,
    fix="writes `os.environ.setdefault` for the assignment",
)
def hard_coded_address(script: Script) -> Iterator[Violation]:
    """Find constants assigned to `os.environ["MASTER_…"]`, or used as the address of a process group."""
    for call in script.calls("dist.init_process_group"):
        place = argument(call, "init_method", 1)
        if isinstance(place, ast.Constant) and str(place.value).startswith("tcp://"):
            message = "this address and port are the same in every run: two runs on a machine collide; let a launcher choose them"
            yield Violation(place, message)
    for node, key, value in _environment(script):
        if not re.search(r"^MASTER_(ADDR|PORT)$", key) or not isinstance(value, ast.Constant):
            continue
        if isinstance(script.module.parents.get(node), ast.If | ast.ExceptHandler):
            continue
        target = node.targets[0]
        assert isinstance(target, ast.Subscript)
        code = f'{ast.unparse(target.value)}.setdefault("{key}", {script.module.source(value)})'
        message = f"{key} is written over with a constant: two runs on a machine collide, and a launcher's value is lost"
        yield Violation(node, message, Edit("statement", node, code))


def _environment(script: Script) -> Iterator[tuple[ast.Assign, str, ast.expr]]:
    """Yield each assignment to an item of `os.environ`, with its key and its value."""
    for node in script.module.parents:
        if not isinstance(node, ast.Assign) or len(node.targets) != 1:
            continue
        match node.targets[0]:
            case ast.Subscript(value=base, slice=ast.Constant(value=str(key))):
                if script.name(base) == "os.environ":
                    yield node, key, node.value


@rule(
    "LS102",
    "--local_rank that torchrun does not pass",
    "torchrun passes no such option, so every rank has the default: read the variable LOCAL_RANK",
    "fails",
    why="""`torch.distributed.launch` passed `--local_rank`; torchrun sets the variable `LOCAL_RANK` and passes nothing.
    Under torchrun every rank has the default: all use one GPU, or none. (`lockstep run` passes the option where a
    script declares it.)""",
    example="""
    - import argparse
    + import os
      import torch
      import torch.distributed as dist

    - parser = argparse.ArgumentParser()
    - parser.add_argument("--local_rank", type=int, default=0)
    - args = parser.parse_args()
    - torch.cuda.set_device(args.local_rank)
    + torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
      dist.init_process_group("nccl")
      dist.destroy_process_group()
    """,
)
def local_rank_option(script: Script) -> Iterator[Violation]:
    """Find the option `--local_rank` in programs that do not read the variable `LOCAL_RANK`."""
    if script.matches(r"\bLOCAL_RANK\b") or script.flavours - {"ddp"}:
        return
    for call in script.methods("add_argument"):
        words = [arg.value for arg in call.args if isinstance(arg, ast.Constant)]
        if {"--local_rank", "--local-rank"} & set(words):
            yield Violation(call)


@rule(
    "LS103",
    "no device set for NCCL",
    "no rank sets its device: collectives of objects use GPU 0 on every rank; call torch.cuda.set_device",
    "fails",
    why="""Collectives of objects (`broadcast_object_list`, `all_gather_object` and the like) send tensors of the current
    device. Where a rank has not set its device, that is GPU 0 on every rank, and NCCL fails with a duplicate GPU.""",
    example="""
    + import os
    + import torch
      import torch.distributed as dist

      def main(settings):
    +     torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
          dist.init_process_group("nccl")
          dist.broadcast_object_list(settings)
          dist.destroy_process_group()
    """,
)
def no_device(script: Script) -> Iterator[Violation]:
    """Find collectives of Python objects over NCCL, in programs that set no device.

    `barrier` is not reported: its device is that of an earlier collective, or else follows from the rank.
    """
    if sets_device(script) or not script.plain:
        return
    backends = [
        script.constants(argument(call, "backend", 0))
        for one in script.program
        for call in one.calls("dist.init_process_group")
    ]
    if not backends or any(values != ["nccl"] for values in backends):
        return
    for call in script.calls(*_OF_OBJECTS):
        group = argument(call, "group", _OF_OBJECTS[script.name(call.func)])
        if group is None and argument(call, "device") is None:
            yield Violation(call)


_OF_OBJECTS = {  # collectives of objects, and the position of their argument `group`
    "dist.broadcast_object_list": 2,
    "dist.all_gather_object": 2,
    "dist.gather_object": 3,
    "dist.scatter_object_list": 3,
}


def sets_device(script: Script) -> bool:
    """Whether a program sets the GPU of each rank."""
    return script.matches(r"set_device|device_id\s*=|CUDA_VISIBLE_DEVICES|cuda\.device\(")


@rule(
    "LS104",
    "cuda without an index",
    "without torch.cuda.set_device this is GPU 0 on every rank: set the device, or name the index",
    "fails",
    why="""`.cuda()`, `.to("cuda")` and `torch.device("cuda")` mean the current device, which is GPU 0 until
    `torch.cuda.set_device` is called: all ranks of a node share GPU 0, run out of memory, or NCCL finds a duplicate GPU.""",
    example="""
    + import os
    + import torch
      import torch.distributed as dist
      from torch.nn.parallel import DistributedDataParallel

      def main(net):
    +     torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
          dist.init_process_group("nccl")
          model = DistributedDataParallel(net.cuda())
          dist.destroy_process_group()
    """,
)
def cuda_without_index(script: Script) -> Iterator[Violation]:
    """Find the first move to `cuda` without an index, in programs that set no device."""
    if sets_device(script) or not script.plain or "DDP" not in script.called:
        return
    for call in script.module.calls:
        name, device = script.name(call.func), argument(call, "device", 0)
        bare = method(call) == "cuda" and device is None and not name.startswith("torch")
        to = method(call) == "to" or (name == "torch.device" and argument(call, "index", 1) is None)
        first = call.args[0] if call.args else None
        if bare or (to and isinstance(first, ast.Constant) and first.value == "cuda"):
            yield Violation(call)
            return


@rule(
    "LS105",
    "CUDA_VISIBLE_DEVICES set too late",
    "CUDA has been started above, and does not look at CUDA_VISIBLE_DEVICES again: set it first",
    "fails",
    why="""CUDA reads the variable once, when the process first uses a GPU. Set after that it has no effect, and all
    ranks compute on the same GPUs.""",
    example="""
      import os
      import torch
      import torch.distributed as dist

      def main(rank):
    +     os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)
          dist.init_process_group("nccl")
          print(torch.cuda.get_device_name())
    -     os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)
          dist.destroy_process_group()
    """,
)
def visible_devices_late(script: Script) -> Iterator[Violation]:
    """Find assignments to CUDA_VISIBLE_DEVICES after a use of CUDA in the same function."""
    for node, key, _ in _environment(script):
        if key != "CUDA_VISIBLE_DEVICES":
            continue
        scope = script.module.scope(node)
        for call in script.module.calls:
            name = script.name(call.func)
            starts = name.startswith("torch.cuda.") and name not in _BEFORE_START
            starts = starts or method(call) == "cuda"
            same = script.module.scope(call) is scope and call.lineno < node.lineno
            if starts and same and not script.module.exclusive(call, node):
                yield Violation(node)
                break


#: Functions of `torch.cuda` that do not initialize CUDA.
_BEFORE_START = {
    f"torch.cuda.{name}" for name in ("manual_seed", "manual_seed_all", "amp.GradScaler")
}


@rule(
    "LS107",
    "no destroy_process_group",
    "the process group is never destroyed: call dist.destroy_process_group() at the end",
    "misleads",
    why="""NCCL's process group warns at exit that it was not destroyed and that resources may leak. The warning stands last
    in the log, where the reason of a failure is looked for.""",
    example="""
      import torch.distributed as dist

      def main(model, loader, optimizer):
          dist.init_process_group("nccl")
          for x in loader:
              model(x).backward()
              optimizer.step()
    +     dist.destroy_process_group()
    """,
)
def no_destroy(script: Script) -> Iterator[Violation]:
    """Find process groups that may use NCCL and are never destroyed."""
    if script.matches("destroy_process_group") or not script.plain or not script.trains:
        return
    for call in script.calls("dist.init_process_group"):
        backends = script.constants(argument(call, "backend", 0))
        if any("nccl" in str(one) for one in backends) or (not backends and script.cuda):
            yield Violation(call)
            return


@rule(
    "LS109",
    "DataParallel beside DistributedDataParallel",
    "this model is in DistributedDataParallel already: leave DataParallel out",
    "fails",
    why="""Each rank has one device. DataParallel around or inside DistributedDataParallel copies the model to all GPUs of
    the node in every rank, and gradients of the copies are not reduced.""",
    example="""
      import torch.distributed as dist
      from torch import nn
      from torch.nn.parallel import DistributedDataParallel as DDP

    - def build(net):
    -     dist.init_process_group("nccl")
    -     model = DDP(net)
    -     model = nn.DataParallel(model)
    -     dist.destroy_process_group()
    + def build(net, distributed):
    +     if distributed:
    +         dist.init_process_group("nccl")
    +         model = DDP(net)
    +     else:
    +         model = nn.DataParallel(net)
          return model
    +
    + dist.destroy_process_group()
    """,
)
def both_wrappers(script: Script) -> Iterator[Violation]:
    """Find models wrapped in both DataParallel and DistributedDataParallel."""
    for mine, other in (("DataParallel", "DDP"), ("DDP", "DataParallel")):
        for call in script.calls(mine):
            if call.args and always_wrapped(script, call.args[0], other):
                yield Violation(call)


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
        given = argument(call, "method", 0) or argument(call, "start_method")
        starts = "mp.Process" in script.called or ".Process" in script.called
        starts = starts or script.name(call.func) != "mp.get_context"
        if starts and script.constants(given) == ["fork"] and script.matches("nccl"):
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
