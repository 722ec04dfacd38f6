"""Rules on code in every training step: waiting, accumulated and scaled gradients (family LS4)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from lockstep.tools.check.rule import Violation, rule
from lockstep.tools.check.rules.divergence import collective
from lockstep.tools.check.script import SHOWS, Script
from lockstep.tools.check.syntax import Function, all_arguments, last_name, method_calls, receiver

_TENSOR = re.compile(r"loss|logits|outputs?\b|preds?\b|grad|norm|correct|acc")
#: Functions that convert their arguments to text or a number; `log` may be that of torch.
_CONVERTS = SHOWS - {"log"} | {"float"}


@rule(
    "LS402",
    "waiting for the GPU in each step",
    "reading a tensor waits for the GPU in each step: keep the tensor, and read it every so many steps",
    "slow",
    why="""`.item()`, `.cpu()`, `.tolist()`, `float(…)`, and printing a tensor or giving it to a progress bar or a logger wait
    until the GPU has done all that was asked of it. In each step the CPU then cannot run ahead, and the GPU waits for the next step's kernels.""",
    example="""
      import torch.distributed as dist

      def train(model, loader, optimizer):
          dist.init_process_group("nccl")
          total = 0.0
          for x in loader:
              loss = model(x.cuda(0))
              loss.backward()
              optimizer.step()
    -         total += loss.item()
    +         total += loss.detach()
    +     print(total.item())
          dist.destroy_process_group()
    """,
)
def waits_each_step(script: Script) -> Iterator[Violation]:
    """Find copies of GPU tensors to the host in each training step, such as `loss.item()`."""
    if not script.cuda or "lockstep" in script.flavours:
        return
    for call in script.module.calls:
        what = _reads(script, call)
        if what and not script.evaluates(call) and script.step_loop(call, always=True) is not None:
            message = f"{what} waits for the GPU in each step: keep the tensor, and read it every so many steps"
            yield Violation(call, message)


def _reads(script: Script, call: ast.Call) -> str:
    """Return a short text for a call that copies a tensor to the host, such as `loss.item()`.

    For a function that shows a tensor, the text is such as `print of loss`. Return "" for other calls.
    """
    match call.func:
        case ast.Attribute(value=of, attr="item" | "tolist" | "cpu" | "numpy" as method):
            text = ast.unparse(of)
            fits = _TENSOR.search(text.lower()) and ".cpu()" not in text
            return f"{text}.{method}()" if fits else ""
    name = last_name(call.func)
    values = all_arguments(call) if name in _CONVERTS else []
    shown = (part for value in values for part in _shown(value))
    return next((f"{name} of {ast.unparse(one)}" for one in shown if _is_tensor(script, one)), "")


def _shown(value: ast.expr) -> list[ast.expr]:
    """Return the values put into text by an f-string, `format` or `%`; for other expressions `[value]`."""
    match value:
        case ast.JoinedStr(values=parts):
            return [part.value for part in parts if isinstance(part, ast.FormattedValue)]
        case ast.Call(func=ast.Attribute(attr="format"), args=values):
            return values
        case ast.BinOp(op=ast.Mod(), right=ast.Tuple(elts=values)):
            return values
        case ast.BinOp(op=ast.Mod(), right=right):
            return [right]
    return [value]


def _is_tensor(script: Script, node: ast.expr) -> bool:
    """Whether a value is named like a loss or an output, and comes from a call that returns a tensor."""
    if not re.search(r"(^|_)(loss|logits|outputs?)$", last_name(node)):
        return False
    values = script.sources(node)
    read = r"\.item\(|\.tolist\(|\bfloat\(|\bnp\.|numpy|\.avg\b|round\("
    made = any(isinstance(value, ast.Call) for value in values)
    return made and not any(re.search(read, ast.unparse(value)) for value in values)


@rule(
    "LS403",
    "barrier in each step",
    "the ranks wait for each other in every step: reducing gradients keeps them together already",
    "slow",
    why="""DistributedDataParallel's reduction lets no rank run ahead by more than a step. A barrier beside it adds a
    round trip, and takes the overlap between steps away.""",
    example="""
      import torch.distributed as dist
      from torch.nn.parallel import DistributedDataParallel as DDP

      def train(net, loader, optimizer):
          dist.init_process_group()
          model = DDP(net)
          for x in loader:
              model(x).backward()
              optimizer.step()
    -         dist.barrier()
    +     dist.barrier()
          dist.destroy_process_group()
    """,
)
def barrier_each_step(script: Script) -> Iterator[Violation]:
    """Find barriers in every training step."""
    for call in script.module.calls:
        name = collective(script, call) or ""
        waits = name.endswith(("barrier", "wait_for_everyone")) and script.guard(call) is None
        if waits and script.step_loop(call, always=True) is not None:
            yield Violation(call)


@rule(
    "LS404",
    "accumulation without no_sync",
    "gradients are reduced in every backward pass, and used in every n-th: put the others under model.no_sync()",
    "slow",
    why="""DistributedDataParallel reduces gradients in each backward pass. Where several passes add up to one step, all but
    the last reduction are for nothing.""",
    example="""
    + import contextlib
      import torch.distributed as dist
      from torch.nn.parallel import DistributedDataParallel as DDP

      def train(net, loader, optimizer):
          dist.init_process_group()
          model = DDP(net)
          for i, x in enumerate(loader):
    -         model(x).backward()
    -         if (i + 1) % 4 == 0:
    +         last = (i + 1) % 4 == 0
    +         with contextlib.nullcontext() if last else model.no_sync():
    +             model(x).backward()
    +         if last:
                  optimizer.step()
                  optimizer.zero_grad()
          dist.destroy_process_group()
    """,
)
def no_no_sync(script: Script) -> Iterator[Violation]:
    """Find optimizer steps that are made only every n-th iteration, in programs that use DDP.

    Such a program accumulates gradients. It is skipped if it uses `no_sync`, or a trainer library.
    """
    if "DDP" not in script.called or not script.plain:
        return
    if script.matches(r"no_sync|grad_sync|gradient_sync"):
        return
    yield from map(Violation, every_nth(script))


def every_nth(script: Script) -> Iterator[ast.Call]:
    """Yield optimizer steps under `if i % n == 0` in loops that call `backward` outside of this `if`."""
    for call in script.methods("step"):
        branch = script.module.parents.get(script.module.statement(call) or call)
        named = re.search(r"optim|opt$|scaler", ast.unparse(receiver(call)))
        if not named or not isinstance(branch, ast.If):
            continue
        modulo = any(isinstance(node, ast.Mod) for node in ast.walk(branch.test))
        inside = method_calls(branch, "backward")
        if modulo and not inside and script.step_loop(branch) is not None:
            yield call


@rule(
    "LS405",
    "clipping before unscale_",
    "these gradients are still multiplied by the loss scale: call scaler.unscale_(optimizer) before",
    "corrupts",
    why="""After `scaler.scale(loss).backward()` gradients are multiplied by the loss scale, 65,536 at first. Clipped
    then, nearly every gradient is cut down to `max_norm / scale`, and training stands still or follows noise.""",
    example="""
      import torch
      from torch.nn.parallel import DistributedDataParallel

      def step(model, loss, optimizer, scaler: torch.amp.GradScaler):
          model = DistributedDataParallel(model)
          scaler.scale(loss).backward()
    +     scaler.unscale_(optimizer)
          torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
          scaler.step(optimizer)
          scaler.update()
    """,
)
def clip_before_unscale(script: Script) -> Iterator[Violation]:
    """Find clipping after a scaled backward pass in the same function, without `unscale_` in between."""
    if ".unscale_gradients" in script.called:
        return
    scaled = [call for call in script.methods("backward") if scaled_loss(call)]
    for call in script.calls("torch.nn.utils.clip_grad_norm_", "torch.nn.utils.clip_grad_value_"):
        scope = script.module.scope(call)
        before = [one for one in scaled if script.module.earlier(one, call)]
        unscaled = any(
            script.module.scope(one) is scope and one.lineno <= call.lineno
            for one in script.methods("unscale_")
        )
        if before and not unscaled and isinstance(scope, Function | ast.Module):
            yield Violation(call)


def scaled_loss(call: ast.Call) -> bool:
    """Whether a call has the form `scaler.scale(loss).backward()`."""
    match call.func:
        case ast.Attribute(value=ast.Call(func=ast.Attribute(attr="scale"))):
            return True
    return False


@rule(
    "LS406",
    "loss scaler stepped wrongly",
    "the optimizer steps by scaled gradients, or scaler.update() is never called",
    "corrupts",
    why="""Gradients of a scaled loss are multiplied by the scale. `scaler.step(optimizer)` divides by it and leaves steps
    with infinities out, which `optimizer.step()` does not. `scaler.update()` has to follow each step: a second one without
    it raises "step() has already been called since the last update()".""",
    example="""
      import torch
      import torch.distributed as dist

      def train(model, loader, optimizer):
          dist.init_process_group("nccl")
          scaler = torch.amp.GradScaler()
          for x in loader:
              scaler.scale(model(x)).backward()
    -         optimizer.step()
    +         scaler.step(optimizer)
              scaler.update()
          dist.destroy_process_group()
    """,
)
def wrong_scaler(script: Script) -> Iterator[Violation]:
    """Find optimizer steps on gradients that are still scaled, and loss scalers without an `update`."""
    for backward in script.methods("backward"):
        if not scaled_loss(backward):
            continue
        scope = script.module.scope(backward)
        steps = [one for one in script.methods("step") if script.module.scope(one) is scope]
        by_scaler = [one for one in steps if one.args]
        for step in steps:
            plain = re.search(r"optim|opt$", ast.unparse(step.func)) and not step.args
            if plain and not by_scaler and not script.module.exclusive(step, backward):
                yield Violation(
                    step, "these gradients are scaled: call scaler.step(optimizer) instead"
                )
        if by_scaler and ".update" not in script.called:
            second = "the second step raises RuntimeError: call scaler.update() after each"
            yield Violation(by_scaler[0], second, harm="fails")
