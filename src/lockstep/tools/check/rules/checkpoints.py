"""Rules on saving and loading checkpoints (family LS3)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from lockstep.tools.check.fix import Edit
from lockstep.tools.check.order import conditions, launcher_only, precedes, wrapped_before
from lockstep.tools.check.rule import Violation, rule
from lockstep.tools.check.rules.wrapping import always_wrapped
from lockstep.tools.check.script import Script
from lockstep.tools.check.syntax import argument, dotted, receiver, spread


@rule(
    "LS301",
    "saving on all ranks",
    "all ranks write this file at once: save on one rank",
    "corrupts",
    why="""Ranks that write one file at the same time leave a mixture, or a file that another rank is still writing when
    it is read. On a shared file system this is so over all nodes.""",
    example="""
      import torch
      import torch.distributed as dist

      def finish(model):
          dist.init_process_group()
    -     torch.save(model.state_dict(), "model.pt")
    +     if dist.get_rank() == 0:
    +         torch.save(model.state_dict(), "model.pt")
          dist.destroy_process_group()
    """,
    fix="puts the call under `if dist.get_rank() == 0:`, unless states are sharded or a run may have no process group there",
)
def save_everywhere(script: Script) -> Iterator[Violation]:
    """Find `torch.save` calls that all ranks make with the same path."""
    if not script.plain:
        return
    for call in script.calls("torch.save"):
        path, saved = argument(call, "f", 1), argument(call, "obj", 0)
        if path is None or saved is None or script.guard(call) is not None:
            continue
        if any(script.is_rank(value) for value in [path, *script.sources(path)]):
            continue
        if not _own(script, path) and not launcher_only(script, call):
            yield Violation(call, edit=_guarded(script, call))


def _own(script: Script, path: ast.expr) -> bool:
    """Whether a path is private to a process: a memory buffer, an open file, a temporary directory."""
    made = [dotted(call.func) for call in script.made_by(path)]
    private = r"\btmp_?(path|dir)\b|tempfile\.|mkdtemp|TemporaryDirectory|TemporaryFile"
    return any(name.endswith(("BytesIO", "open")) for name in made) or any(
        re.search(private, ast.unparse(value)) for value in script.sources(path)
    )


def _guarded(script: Script, call: ast.Call) -> Edit | None:
    """Return the edit that puts a call under `if dist.get_rank() == 0:`; `None` if this is not safe."""
    names = [name for name, full in script.module.imports.items() if full == "torch.distributed"]
    statement = script.module.parents.get(call)
    sharded = {"FSDP", "fully_shard"} & script.called
    if names and isinstance(statement, ast.Expr) and not sharded and _has_group(script, call):
        return Edit("guard", statement, f"{names[0]}.get_rank() == 0")
    return None


def _has_group(script: Script, call: ast.Call) -> bool:
    """Whether the process group surely exists at `call`, so that `get_rank` works there."""
    made = [
        (one, start) for one in script.program for start in one.calls("dist.init_process_group")
    ]
    ends = [(one, end) for one in script.program for end in one.calls("dist.destroy_process_group")]
    return any(
        not conditions(home, start) and precedes(home, start, script, call) for home, start in made
    ) and all(precedes(home, end, script, call) is False for home, end in ends)


@rule(
    "LS302",
    "checkpoint with the prefix module.",
    "names in this checkpoint begin with module.: save model.module.state_dict()",
    "misleads",
    why="""DistributedDataParallel holds the model as `module`, so `state_dict()` of the wrapper has `module.` before every
    name. A script that has no wrapper cannot load it.""",
    example="""
      import torch
      import torch.distributed as dist
      from torch.nn.parallel import DistributedDataParallel as DDP

      def main(net):
          dist.init_process_group()
          model = DDP(net)
          if dist.get_rank() == 0:
    -         torch.save(model.state_dict(), "model.pt")
    +         torch.save(model.module.state_dict(), "model.pt")
          dist.destroy_process_group()
    """,
    fix="saves the state of `model.module`, unless the model is wrapped in some runs only",
)
def prefixed(script: Script) -> Iterator[Violation]:
    """Find saves of a DDP wrapper's `state_dict`, whose keys begin with `module.`.

    Programs that call `load_state_dict`, or handle this prefix, are left out.
    """
    handled = r"load_state_dict|['\"]module\.|consume_prefix|hasattr\(\w+, ['\"]module"
    if script.matches(handled):
        return
    for save in script.calls("torch.save"):
        for call in ast.walk(save):
            match call:
                case ast.Call(func=ast.Attribute(value=ast.expr() as model, attr="state_dict")):
                    wrapped = wrapped_before(script, model, "DDP")
                    if wrapped is not None and dotted(model):
                        edit = Edit("replace", call, f"{ast.unparse(model)}.module.state_dict()")
                        own = wrapped in script.module.parents
                        sure = own and always_wrapped(script, model, "DDP")
                        yield Violation(call, edit=edit if sure else None)


@rule(
    "LS303",
    "state of the model loaded into its wrapper",
    "the checkpoint has the names of model.module, and the wrapper's begin with module.: load into model.module",
    "fails",
    why="""The names in `model.module.state_dict()` do not begin with `module.`. `load_state_dict` of the wrapper misses every
    one of them, or with `strict=False` silently loads nothing.""",
    example="""
      import torch
      import torch.distributed as dist
      from torch.nn.parallel import DistributedDataParallel as DDP

      def main(net):
          dist.init_process_group()
          model = DDP(net)
    -     model.load_state_dict(torch.load("model.pt", map_location="cpu"))
    +     model.module.load_state_dict(torch.load("model.pt", map_location="cpu"))
          if dist.get_rank() == 0:
              torch.save(model.module.state_dict(), "model.pt")
          dist.destroy_process_group()
    """,
)
def loaded_into_wrapper(script: Script) -> Iterator[Violation]:
    """Find `load_state_dict` of a DDP wrapper, in programs that save the state of `model.module`."""
    saves = script.findall(r"(\w+)\.state_dict\(")
    if "module" not in saves or script.matches(r"['\"]module\.|consume_prefix"):
        return
    for call in script.methods("load_state_dict"):
        model = receiver(call)
        wrapped = isinstance(model, ast.Name) and wrapped_before(script, model, "DDP") is not None
        if wrapped and ast.unparse(model) not in saves:
            yield Violation(call)


@rule(
    "LS307",
    "torch.load without map_location",
    "every rank loads to the GPU that the file was saved from: pass map_location",
    "fails",
    why="""Tensors are loaded to the device that they were saved from, which is GPU 0 for what rank 0 saved. All ranks of a
    node then hold a copy there, and GPU 0 runs out of memory.""",
    example="""
      import torch
      import torch.distributed as dist

      def resume(model):
          dist.init_process_group("nccl")
    -     model.load_state_dict(torch.load("model.pt"))
    +     model.load_state_dict(torch.load("model.pt", map_location="cpu"))
          dist.destroy_process_group()
    """,
    fix="""passes `map_location="cpu"`""",
)
def load_without_map(script: Script) -> Iterator[Violation]:
    """Find `torch.load` without `map_location` on several ranks of a program that uses GPUs."""
    if not script.plain or not script.cuda:
        return
    for call in script.calls("torch.load"):
        given = _mapped(call) or any(
            _mapped(other) and script.module.exclusive(call, other)
            for other in script.calls("torch.load")
        )  # a script with `if gpu is None: torch.load(path) else: …` handles devices
        if not given and script.guard(call) is None and not launcher_only(script, call):
            yield Violation(call, edit=Edit("argument", call, '"cpu"', "map_location"))


def _mapped(call: ast.Call) -> bool:
    return argument(call, "map_location", 1) is not None or spread(call)
