"""Edit scripts: pass models, optimizers, schedulers to `run.model`, `run.optimizer`, `run.scheduler`."""

from __future__ import annotations

import ast
import re

from lockstep.tools.check.syntax import argument, dotted, method_calls, receiver, root, stored
from lockstep.tools.convert import precision, questions
from lockstep.tools.convert.draft import REPLICAS, RUN, Draft, origins

_OPTIMIZER = re.compile(r"^torch\.optim\.(?!lr_scheduler|swa_utils)(\w+\.)?[A-Z]\w*$")
_SCHEDULER = re.compile(r"^torch\.optim\.lr_scheduler\.[A-Z]\w*$|(^|\.)get_\w*schedule\w*$")
#: Layers with batch statistics, and models that contain such layers.
_NORMALISED = re.compile(r"^torch\.nn\.(Lazy)?BatchNorm|^torchvision\.models\.")
#: Classes with a method `step` that need no conversion here.
_STEPS = (*precision.SCALERS, "torch.profiler.profile")
#: Wrappers that `run.model` replaces, and their arguments that name devices.
_WRAPPERS = ("DDP", "DataParallel")
_DEVICES = ("device_ids", "output_device", "dim")


def convert(draft: Draft) -> None:
    """Edit the draft: pass models, optimizers, schedulers to the run; remove wrappers such as DDP.

    If a script for one device uses BatchNorm, a note for the user is added.
    """
    script = draft.script
    made = [call for call in draft.module.calls if _OPTIMIZER.match(script.name(call.func))]
    schedulers = [call for call in draft.module.calls if _SCHEDULER.search(script.name(call.func))]
    made += _stepped(draft, {*made, *schedulers})
    for call in made:
        _optimizer(draft, call)
    _wrappers(draft)
    for call in schedulers:
        if not _is_part(draft, call):
            draft.edit("wrap", call, f"{RUN}.scheduler")
    _frozen_later(draft)
    normalised = any(_NORMALISED.match(name) for name in script.called)
    if normalised and "ddp" not in script.flavours:
        draft.notes.append(questions.NORMALISED.format(REPLICAS))


def _stepped(draft: Draft, known: set[ast.Call]) -> list[ast.Call]:
    """Return the calls that make optimizers of other libraries: objects with `step` and `zero_grad`.

    `known` are the calls that make torch's optimizers and schedulers. The user is asked about other objects
    whose `step` a training loop calls.
    """
    script, found = draft.script, []
    zeroed = [ast.unparse(call.func) for call in script.methods("zero_grad")]
    loops = [loop for loop in draft.module.loops if not isinstance(loop, ast.While)]
    elements = {dotted(loop.target) for loop in loops}
    for call in script.methods("step", "step_update"):
        owner = receiver(call)
        if script.step_loop(call) is None or known & set(script.sources(owner)):
            continue
        if script.runs_backward(call):
            continue
        calls = [origin for origin in origins(script, owner) if isinstance(origin, ast.Call)]
        if calls and f"{ast.unparse(owner)}.zero_grad" in zeroed:
            found += calls
        elif dotted(owner) not in elements and not script.made_by(owner, *_STEPS):
            draft.ask(call, questions.OPTIMIZER.format(ast.unparse(owner)))
    return list(dict.fromkeys(found))


def _optimizer(draft: Draft, call: ast.Call) -> None:
    roots = _roots(draft, call)
    if not roots:
        draft.ask(call, questions.PARAMETERS)
        return
    for variable in roots:
        _model(draft, variable, call)
    draft.edit("wrap", call, f"{RUN}.optimizer")


def _roots(draft: Draft, call: ast.Call) -> list[ast.expr]:
    """Return the variables of the models whose parameters the optimizer `call` is given."""
    given = argument(call, "params", 0) or argument(call, "model", 0)
    script, found = draft.script, {}
    if given is None:
        return []
    for value in [given, *script.sources(given)]:
        for called in method_calls(value, "parameters", "named_parameters"):
            variable = root(receiver(called))
            if variable is not None and variable in draft.module.parents:
                found[dotted(variable)] = variable
    if not found and dotted(given) and not _OPTIMIZER.match(script.name(call.func)):
        return [given]  # `create_optimizer(model, …)`
    return list(found.values())


def _model(draft: Draft, variable: ast.expr, call: ast.Call) -> None:
    """Edit the draft: pass the model in `variable` to `run.model` before `call` makes its optimizer."""
    found = origins(draft.script, variable)
    if draft.models.intersection(found):
        return
    draft.models.update(found)
    created = draft.script.made_by(variable)
    draft.within_run += [one for one in created if one in draft.module.parents]
    made = found[0] if len(found) == 1 and found[0] in draft.module.parents else None
    code = f"{dotted(variable)} = {RUN}.model({dotted(variable)})"
    if made is None or isinstance(made, ast.Name | ast.Attribute):
        statement = draft.module.statement(call)
        assert statement is not None
        draft.edit("before", statement, code)
    elif change := _changed_after(draft, variable, made, call):
        draft.edit("after", draft.line_statement(change), code)
    elif isinstance(made, ast.Call) and draft.script.name(made.func) in _WRAPPERS:
        for name in _DEVICES:
            draft.edit("argument", made, name=name)
        draft.edit("replace", made.func, f"{RUN}.model")
    else:
        draft.edit("wrap", made, f"{RUN}.model")


def _changed_after(
    draft: Draft, variable: ast.expr, made: ast.expr, call: ast.Call
) -> ast.stmt | None:
    """Return the last statement that changes a model before its optimizer is made, or `None`.

    `made` creates the model in `variable`, and `call` its optimizer; only statements between them count.
    They assign to a part of the model, or are loops that freeze parameters.
    """
    module, name = draft.module, dotted(variable)
    found: list[ast.stmt] = []
    for node in ast.walk(module.scope(variable)):
        changes = False
        match node:
            case ast.Assign(targets=targets):
                changes = any(
                    isinstance(target, ast.Attribute | ast.Subscript)
                    and dotted(target) != name
                    and dotted(root(target) or target) == name
                    for target in targets
                )
            case ast.For(iter=over):
                freezes = "requires_grad" in ast.unparse(node)
                calls = method_calls(over, "parameters", "named_parameters", "children", "modules")
                changes = freezes and any(dotted(root(one) or one) == name for one in calls)
            case ast.Expr(value=ast.Call(func=ast.Attribute(attr="requires_grad_") as func)):
                changes = dotted(root(func) or func) == name
        if changes and isinstance(node, ast.stmt) and module.scope(node) is module.scope(call):
            found.append(node)
    between = [one for one in found if made.lineno < one.lineno < call.lineno]
    return max(between, key=lambda one: one.lineno, default=None)


def _frozen_later(draft: Draft) -> None:
    """Add questions to `draft` about parameters that are frozen or unfrozen once training has begun."""
    script, module = draft.script, draft.module
    begun = [*script.step_loops, *script.epoch_loops]
    for node in ast.walk(module.tree):
        match node:
            case (
                ast.Call(func=ast.Attribute(value=owner, attr="requires_grad_"))
                | ast.Assign(targets=[ast.Attribute(value=owner, attr="requires_grad")])
            ) if _has_parameters(draft, owner):
                scope = module.scope(node)
                late = any(one.lineno < node.lineno and module.scope(one) is scope for one in begun)
                if late and not _is_given_later(draft, node):
                    draft.ask(node, questions.FROZEN)


def _is_given_later(draft: Draft, node: ast.expr | ast.stmt) -> bool:
    """Whether `draft` inserts `run.model(…)` right after the statement or loop that contains `node`."""
    around = [node, *draft.module.above(node)]
    return any(edit.kind == "after" and edit.node in around for edit in draft.edits)


def _has_parameters(draft: Draft, node: ast.expr) -> bool:
    """Whether `node` is a part of a model of the run, or an element of a loop over `….parameters()`."""
    for parent in draft.module.above(node):
        if isinstance(parent, ast.For) and dotted(node) in stored(parent.target):
            calls = method_calls(parent.iter, "parameters", "named_parameters")
            return any(_is_part_of_model(draft, receiver(call)) for call in calls)
    return _is_part_of_model(draft, node)


def _is_part_of_model(draft: Draft, node: ast.expr, depth: int = 3) -> bool:
    """Whether the value of `node` is a model of the run or a part of one, such as `model.encoder`.

    Variables are followed over `depth` levels.
    """
    owner = root(node)
    if owner is None or not depth:
        return False
    found = origins(draft.script, owner)
    return bool(draft.models.intersection(found)) or any(
        _is_part_of_model(draft, one, depth - 1) for one in found if one is not owner
    )


def _wrappers(draft: Draft) -> None:
    """Edit the draft: replace `DDP(model)` and `model.module` by `model`, since `run.model` wraps it."""
    script, module = draft.script, draft.module
    for call in script.calls(*_WRAPPERS):
        if call in draft.models or not call.args:
            continue
        match module.parents.get(call):
            case ast.Assign(targets=[target]) as statement if dotted(target) == dotted(
                call.args[0]
            ):
                draft.removed.add(statement)
            case _:
                draft.edit("unwrap", call)
    for node in ast.walk(module.tree):
        match node:
            case ast.Attribute(value=value, attr="module") if script.made_by(value, *_WRAPPERS):
                draft.edit("unwrap", node)
    for call in script.calls("torch.nn.SyncBatchNorm.convert_sync_batchnorm"):
        draft.edit("replace", call.func, f"{RUN}.sync_batchnorm")


def _is_part(draft: Draft, call: ast.Call) -> bool:
    """Whether the scheduler that `call` makes is an argument of another scheduler."""
    script = draft.script
    for other in draft.module.calls:
        if other is call or not _SCHEDULER.search(script.name(other.func)):
            continue
        if other.args and other in draft.module.above(call):
            return True
        for given in other.args:
            parts = given.elts if isinstance(given, ast.List | ast.Tuple) else [given]
            if any(call in (part, *script.sources(part)) for part in parts):
                return True
    return False
