"""Rules on loops and optimizers of `lockstep.Run` (family LS6); `microbatches.py` and `kept_variables.py` have further ones."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from lockstep.tools.check.rule import Violation, rule
from lockstep.tools.check.rules.step import every_nth
from lockstep.tools.check.script import Script
from lockstep.tools.check.syntax import Function, Loop, all_arguments, argument, dotted, method


@rule(
    "LS602",
    "random draw before the Run",
    "the run seeds its generators when it begins: this draw comes from another state; move it inside",
    "misleads",
    why="""`lockstep.Run` sets the generators from its seed. A draw before that is not a function of the seed, and
    changes with the way the script is started.""",
    example="""
      import lockstep
      import torch

    - data = torch.randn(256, 8)
      with lockstep.Run("toy", seed=0, replicas=2) as run:
    +     data = torch.randn(256, 8)
          loader = run.loader(data, batch_size=32)
    """,
)
def early_draw(script: Script) -> Iterator[Violation]:
    """Find draws from global random generators above the call of `lockstep.Run` in the same function.

    Scripts that seed a generator are left out.
    """
    if script.matches(r"manual_seed|random\.seed"):
        return
    draws = r"torch\.(rand|randn|randint|randperm|normal|bernoulli|multinomial)$|(numpy\.)?random\.(?!default_rng|Generator|RandomState|SeedSequence|Random)\w+$"
    for run in script.calls("lockstep.Run"):
        for call in script.module.calls:
            drawn = re.match(draws, script.name(call.func)) and argument(call, "generator") is None
            if drawn and script.module.earlier(call, run):
                yield Violation(call)


@rule(
    "LS603",
    "optimizer or scheduler not given to the run",
    "the run does not know this: it acts on every microbatch, and is not saved; pass it through run.optimizer or run.scheduler",
    "corrupts",
    why="""`run.optimizer` and `run.scheduler` let `step()` act once per global batch, and make the object part of what is
    saved. Others act once per microbatch, of which a rank has as many as it hosts replicas.""",
    example="""
      import lockstep
      import torch

      with lockstep.Run("toy", seed=0, replicas=2) as run:
          model = run.model(torch.nn.Linear(8, 1))
    -     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    +     optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    """,
)
def not_given(script: Script) -> Iterator[Violation]:
    """Find optimizers and schedulers of torch that are not passed to the run."""
    known = {
        value
        for one in script.program
        for call in one.methods("optimizer", "scheduler", "register")
        for wrapped in call.args
        for value in one.sources(wrapped)
    }
    inner = {
        value
        for call in script.module.calls
        if script.name(call.func).startswith("torch.optim.lr_scheduler.")
        for arg in all_arguments(call)
        for part in ast.walk(arg)
        if isinstance(part, ast.expr)
        for value in script.sources(part)
    }
    for call in script.module.calls:
        name = script.name(call.func)
        kind = "scheduler" if name.startswith("torch.optim.lr_scheduler.") else "optimizer"
        if not re.match(r"torch\.optim\.(lr_scheduler\.)?[A-Z]\w+$", name) or call in known:
            continue
        scope = script.module.scope(call)
        if isinstance(scope, Function) and not re.search(r"\brun\b|lockstep", ast.unparse(scope)):
            continue  # a function without Lockstep, in the same file
        if kind == "optimizer" or call not in inner:
            message = f"the run does not know this {kind}: it acts on every microbatch, and is not saved; pass it through run.{kind}"
            yield Violation(call, message)


@rule(
    "LS606",
    "loss.backward() in a Lockstep loop",
    "this backward pass goes around the run: call run.backward(loss)",
    "corrupts",
    why="""`run.backward` weights the loss of each microbatch and reduces gradients in a fixed order. The loss's own `backward`
    leaves the gradients of one microbatch.""",
    example="""
      import lockstep

      with lockstep.Run("toy", seed=0, replicas=2) as run:
          for x, y in run.loader(data(), batch_size=32):
              loss = loss_of(model(x), y)
    -         loss.backward()
    +         run.backward(loss)
              optimizer.step()
    """,
)
def own_backward(script: Script) -> Iterator[Violation]:
    """Find `loss.backward()` in loops over a loader of `lockstep.Run`."""
    for loop in script.step_loops:
        made = script.made_by(script.iterated(loop))
        of_run = _is_batch(script, loop) or any(method(call) == "loader" for call in made)
        for call in script.methods("backward") if of_run else ():
            if script.step_loop(call) is loop and "loss" in ast.unparse(call.func).lower():
                yield Violation(call)


def _is_batch(script: Script, loop: ast.AST) -> bool:
    """Whether a loop goes over a batch of `run.batches`: the variable of a loop around it."""
    over = script.iterated(loop) if isinstance(loop, Loop) else None
    return over is not None and any(
        dotted(one.target) == dotted(over) != ""
        and isinstance(outer := script.iterated(one), ast.Call)
        and script.of_run(outer.func, "batches")
        for one in script.module.above(loop)
        if isinstance(one, ast.For)
    )


@rule(
    "LS607",
    "step taken every n-th time",
    "the run refuses this with several replicas: call optimizer.step() in every iteration, and raise batch_size",
    "fails",
    why="""`optimizer.step()` acts once per global batch by itself. To accumulate over more samples, raise `batch_size`, and
    set `replicas` above the number of ranks where memory is short.""",
    example="""
      import lockstep

    - with lockstep.Run("toy", seed=0, replicas=2) as run:
    -     for i, (x, y) in enumerate(run.loader(data(), batch_size=32)):
    + with lockstep.Run("toy", seed=0, replicas=8) as run:
    +     for x, y in run.loader(data(), batch_size=128):
              run.backward(loss_of(model(x), y))
    -         if (i + 1) % 4 == 0:
    -             optimizer.step()
    +         optimizer.step()
    """,
)
def nth_step(script: Script) -> Iterator[Violation]:
    """Find optimizer steps under a modulo condition in loops of `lockstep.Run`."""
    yield from map(Violation, every_nth(script))
