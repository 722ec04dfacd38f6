"""Rules on loss scaling and gradient clipping (family LS4)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from lockstep.tools.check.rule import Violation, rule
from lockstep.tools.check.script import Script
from lockstep.tools.check.syntax import Function


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
