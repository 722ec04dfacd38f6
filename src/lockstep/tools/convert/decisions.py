"""Questions to the user about decisions that depend on one rank's values, or count microbatches."""

from __future__ import annotations

import ast
import re

from lockstep.tools.check.assignments import counter
from lockstep.tools.check.syntax import Loop, all_arguments, dotted, operands, root, variables
from lockstep.tools.convert import loops, questions
from lockstep.tools.convert.draft import Draft, origins

#: Functions that return the time, which differs between ranks.
_CLOCK = re.compile(r"\b(time|monotonic|perf_counter)\(\)")
#: Settings in an optimizer's `param_groups`.
_SETTINGS = {"lr", "momentum", "betas", "weight_decay", "eps"}


def convert(draft: Draft) -> None:
    """Add questions to `draft` about decisions that depend on one rank's values.

    They are changes of the learning rate, and early ends of training.
    """
    script = draft.script
    for call in script.methods("step"):
        loop = script.step_loop(call)
        read = {dotted(variable) for variable in variables(*all_arguments(call))}
        if loop is not None and read & counter(loop):
            draft.ask(call, questions.RATE)
        elif loop is None and any(_of_training(draft, arg) for arg in all_arguments(call)):
            draft.ask(call, questions.OWN)
    for node in ast.walk(draft.module.tree):
        match node:
            case (
                ast.Assign(targets=[ast.Subscript(slice=ast.Constant(value=name))])
                | ast.AugAssign(target=ast.Subscript(slice=ast.Constant(value=name)))
            ) if name in _SETTINGS:  # `group["lr"] = …`
                if script.step_loop(node) is not None:
                    draft.ask(node, questions.RATE)
                elif any(_of_training(draft, test) for test in draft.tests(node)):
                    draft.ask(node, questions.OWN)
        leaves = isinstance(node, ast.Break | ast.Return) or loops.exits(draft, node)
        if leaves and _leaves_by_training(draft, node):
            draft.ask(node, questions.OWN)


def _leaves_by_training(draft: Draft, node: ast.AST) -> bool:
    """Whether `node` leaves the loop over epochs under a condition on results of training or the time."""
    loop = next((parent for parent in draft.module.above(node) if isinstance(parent, Loop)), None)
    return loop in draft.script.epoch_loops and any(
        _of_training(draft, test) or _CLOCK.search(ast.unparse(test))
        for test in draft.tests(node, loop)
    )


def _of_training(draft: Draft, node: ast.expr, depth: int = 3) -> bool:
    """Whether the value of `node` is computed in a training loop, and so from one rank's microbatches.

    Variables and calls are followed over `depth` levels.
    """
    script, module = draft.script, draft.module
    for name in operands(node):
        if _filled(draft, name, depth):
            return True
        for value in script.sources(name):
            if value not in module.parents:
                continue
            if any(parent in script.step_loops for parent in module.above(value)):
                return True
            if script.runs_backward(value):
                return True
            others = [] if value is name or not depth else [value, *draft.tests(value)]
            if any(_of_training(draft, one, depth - 1) for one in others):
                return True
    return False


def _filled(draft: Draft, name: ast.expr, depth: int) -> bool:
    """Whether a method call, such as `losses.append(x)`, gives `name` values from training.

    Every call with arguments in a training loop counts, and elsewhere a call with an argument that comes
    from training. `depth`: number of levels over which arguments are followed.
    """
    script, module, owner = draft.script, draft.module, root(name)
    if (
        owner is None
        or dotted(owner) in ("", "self", *module.imports)
        or draft.models & set(origins(script, owner))
    ):
        return False
    for call in module.calls:
        receiver = root(call.func)
        if not call.args or call is name or receiver is None or dotted(receiver) != dotted(owner):
            continue
        if isinstance(owner, ast.Name) and module.scope(call) is not module.scope(name):
            continue
        if isinstance(call.func, ast.Attribute) and script.step_loop(call) is not None:
            return True
        if depth and any(_of_training(draft, arg, depth - 1) for arg in call.args):
            return True
    return False
