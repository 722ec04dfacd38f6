"""Rules on code that Lockstep loops execute once per microbatch instead of once per step (family LS6)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from lockstep.tools.check.rule import Violation, rule
from lockstep.tools.check.script import SHOWS, Script
from lockstep.tools.check.syntax import argument, dotted, last_name, reads

#: Functions that may be given a model in each microbatch, since they do not change it.
_HARMLESS = {*SHOWS, "append", "watch"}
#: Functions of torch that clip gradients.
_CLIPS = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_")
#: Methods of a model that return its parameters or buffers.
_STATES = ("parameters", "named_parameters", "buffers", "named_buffers", "state_dict")


@rule(
    "LS604",
    "mean over tokens without a weight",
    "this loss is a mean over the targets that are not ignored: give run.backward their number as weight=",
    "corrupts",
    why="""`run.backward` weights microbatches by their samples. A mean over tokens, or pixels, has a different count in each
    microbatch, so that the sum is not the gradient of the mean over the global batch.""",
    example="""
      import lockstep
      import torch.nn.functional as F

      with lockstep.Run("toy", seed=0, replicas=2) as run:
          for x, y in run.loader(data(), batch_size=32):
              loss = F.cross_entropy(model(x), y, ignore_index=0)
    -         run.backward(loss)
    +         run.backward(loss, weight=(y != 0).sum())
    """,
)
def no_weight(script: Script) -> Iterator[Violation]:
    """Find losses that are not means over samples and are passed to `backward` without a weight."""
    for call in script.methods("backward"):
        if not call.args or argument(call, "weight", 1) is not None:
            continue
        losses = script.made_by(call.args[0])
        names = {name for one in losses for name in counts_otherwise(script, one)}
        if "ignore_index" in names:
            yield Violation(call)
        elif names:
            message = "this loss is a mean over class weights: give run.backward the sum of those as weight="
            yield Violation(call, message)


def counts_otherwise(script: Script, call: ast.Call) -> Iterator[str]:
    """Yield the arguments (`ignore_index`, `weight`) that keep a loss from being a mean over samples."""
    functions = ("torch.nn.functional.cross_entropy", "torch.nn.functional.nll_loss")
    modules = script.made_by(call.func, "torch.nn.CrossEntropyLoss", "torch.nn.NLLLoss")
    for one in [call] if script.name(call.func) in functions else modules:
        for name, place in (("ignore_index", None), ("weight", 2 if one is call else 0)):
            value = argument(one, name, place)
            absent = value is None or (isinstance(value, ast.Constant) and value.value is None)
            if not absent and argument(one, "reduction") is None:
                yield name


@rule(
    "LS605",
    "work of the step done per microbatch",
    "this is done once per microbatch, and belongs to the step",
    "corrupts",
    why="""The body of `for x, y in loader` runs once per replica that a rank hosts, so what is counted or averaged there
    depends on the layout. Between the batches of `run.batches(loader)` code runs once per step; `run.step` counts steps.""",
    example="""
      import lockstep

      with lockstep.Run("toy", seed=0, replicas=2) as run:
          loader = run.loader(data(), batch_size=32)
    -     for x, y in loader:
    -         run.backward(loss_of(model(x), y))
    -         optimizer.step()
    +     for batch in run.batches(loader):
    +         for x, y in batch:
    +             run.backward(loss_of(model(x), y))
    +             optimizer.step()
              ema.update_parameters(model)
    """,
)
def per_microbatch(script: Script) -> Iterator[Violation]:
    """Find what a loop does once per microbatch, and should do once per global batch.

    This is: updates of model averages, changes of parameters, reads of gradients, step counters, and calls
    with the model under a condition such as `run.step % 100 == 0`.
    """
    updates = [call for call in script.module.calls if _updates(script, call)]
    model = (
        "this is done with the model once per microbatch: do it between the batches of run.batches"
    )
    parameters = "parameters are changed, or gradients read, once per microbatch: the whole gradient is there in the last one, for run.clip_grad_norm_ and the optimizer"
    count = "{} counts microbatches, whose number depends on the layout: use run.step; calls every n-th step belong between the batches of run.batches"
    clip = "this clips what this rank has of the gradient: call run.clip_grad_norm_ or run.clip_grad_value_"
    for call in updates:
        yield Violation(call, clip if last_name(call.func) in _CLIPS else model)
    inside = {script.callee(call) for call in updates}
    for node in ast.walk(script.module.tree):
        match node:
            case ast.For(iter=over) | ast.comprehension(iter=over):
                if script.module.scope(over) in inside or not _in_step(script, over):
                    continue
                if _over_parameters(script, over):
                    yield Violation(over, parameters)
            case ast.AugAssign(target=target, op=ast.Add(), value=ast.Constant(value=1)):
                name = dotted(target)
                if name and _in_step(script, node) and _decides(script, node, name):
                    yield Violation(node, count.format(name))
            case ast.If(test=test) if _in_step(script, node) and _tests_step(script, test):
                if any(_evaluates(script, statement) for statement in node.body):
                    yield Violation(node, model)


def _in_step(script: Script, node: ast.AST) -> bool:
    """Whether a node is executed once per microbatch: in a training loop, but not over `run.batches`."""
    loop = script.step_loop(node)
    return isinstance(loop, ast.For) and not ast.unparse(loop.iter).count(".batches(")


def _tests_step(script: Script, test: ast.expr) -> bool:
    """Whether a condition, such as `run.step % 100 == 0`, computes with `run.step` modulo a number."""
    return any(
        isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Mod)
        and any(script.of_run(one, "step") for one in ast.walk(node.left))
        for node in ast.walk(test)
    )


def _evaluates(script: Script, statement: ast.stmt) -> bool:
    """Whether a statement calls a function with a model of the run, such as `evaluate(model, loader)`."""
    calls = [node for node in ast.walk(statement) if isinstance(node, ast.Call)]
    return any(
        isinstance(call.func, ast.Name) and any(_is_model(script, arg) for arg in call.args)
        for call in calls
    )


def _updates(script: Script, call: ast.Call) -> bool:
    """Whether `call` gives a model of the run to other code in each microbatch, for no result.

    An example is `ema.update(model)`. Methods of an object that was made from a model count, too; calls for
    output, such as `print`, do not.
    """
    func, name = call.func, last_name(call.func)
    statement = script.module.parents.get(call)
    if not isinstance(statement, ast.Expr) or name in _HARMLESS or not _in_step(script, call):
        return False
    owner = func.value if isinstance(func, ast.Attribute) else None
    if script.runs_backward(call):
        return False
    if script.made_by(owner, "lockstep.Run") or (owner and _is_model(script, owner)):
        return False
    values = [*call.args, *(value for made in script.made_by(owner) for value in made.args)]
    return name == "update_parameters" or any(_is_model(script, value) for value in values)


def _is_model(script: Script, node: ast.expr) -> bool:
    """Whether the value of `node` is a model of the run, or the parameters or buffers of one."""
    match node:
        case ast.Call(func=ast.Attribute(value=owner, attr=name)) if name in _STATES:
            return _is_model(script, owner)
        case ast.Name() | ast.Attribute():
            return any(script.of_run(made.func, "model") for made in script.made_by(node))
    return False


def _over_parameters(script: Script, over: ast.expr) -> bool:
    """Whether the loop over `over` iterates over parameters, and changes them or reads their gradients."""
    if not any(f".{name}()" in ast.unparse(over) for name in _STATES):
        return False
    loop = next(
        parent for parent in script.module.above(over) if not isinstance(parent, ast.comprehension)
    )
    names = [node.attr for node in ast.walk(loop) if isinstance(node, ast.Attribute)]
    return any(re.fullmatch(r"grad|[a-z]\w*(?<!requires_grad)_", name) for name in names)


def _decides(script: Script, node: ast.AugAssign, name: str) -> bool:
    """Whether code uses the counter `name` for more than output, a return value or a divisor.

    `node` is the statement, such as `steps += 1`, that counts.
    """
    module = script.module
    own = module.enclosing_class(node) if name.startswith("self.") else module.scope(node)
    for read in reads(name, own or module.tree):
        scope = module.scope(read)
        parameters = [] if isinstance(scope, ast.Module) else ast.walk(scope.args)
        local = (scope, name) in module.bound or any(
            isinstance(one, ast.arg) and one.arg == name for one in parameters
        )
        other = scope is not own and local
        if not (other or script.is_shown(read) or _divides(script, read)):
            return True
    return False


def _divides(script: Script, read: ast.AST) -> bool:
    """Whether the value read at `read` is returned, or is the divisor of a division."""
    for parent, child in script.module.ancestry(read):
        match parent:
            case ast.BinOp(op=ast.Div(), right=right) if right is child:
                return True
            case ast.stmt():
                return isinstance(parent, ast.Return)
    return False
