"""Models, optimizers and schedulers: `run.model`, `run.optimizer`, `run.scheduler`."""

from __future__ import annotations

import ast
import re

from lockstep.tools.check.arguments import argument
from lockstep.tools.check.source import dotted
from lockstep.tools.convert import precision, questions
from lockstep.tools.convert.draft import REPLICAS, RUN, Draft, origins, root

_OPTIMIZER = re.compile(r"^torch\.optim\.(?!lr_scheduler|swa_utils)(\w+\.)?[A-Z]\w*$")
_SCHEDULER = re.compile(r"^torch\.optim\.lr_scheduler\.[A-Z]\w*$|(^|\.)get_\w*schedule\w*$")
#: Layers, and models that have them, whose statistics are those of a part of a batch.
_NORMALISED = re.compile(r"^torch\.nn\.(Lazy)?BatchNorm|^torchvision\.models\.")
#: What else has a method `step`: the run knows it, or it counts steps for itself alone.
_STEPS = (*precision.SCALERS, "torch.profiler.profile")
#: Wrappers that Lockstep stands in for, and their arguments that name devices.
_WRAPPERS = ("DDP", "DataParallel")
_DEVICES = ("device_ids", "output_device", "dim")


def convert(draft: Draft) -> None:
    """Give models, optimizers and schedulers to the run."""
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
    normalised = any(_NORMALISED.match(name) for name in script.called)
    if normalised and "ddp" not in script.flavours:
        draft.notes.append(questions.NORMALISED.format(REPLICAS))


def _stepped(draft: Draft, known: set[ast.Call]) -> list[ast.Call]:
    """Return the calls that make what is stepped and zeroed, by other names than torch's."""
    script, found = draft.script, []
    zeroed = {
        dotted(call.func.value)
        for call in script.methods("zero_grad")
        if isinstance(call.func, ast.Attribute)
    }
    elements = {
        dotted(loop.target) for loop in draft.module.loops if not isinstance(loop, ast.While)
    }
    for call in script.methods("step", "step_update"):
        assert isinstance(call.func, ast.Attribute)
        receiver, called = call.func.value, script.callee(call)
        if script.step_loop(call) is None or known & set(script.sources(receiver)):
            continue
        if called is not None and script.level(called.body) is not None:
            continue  # it trains
        calls = [one for one in origins(script, receiver) if isinstance(one, ast.Call)]
        if calls and dotted(receiver) in zeroed:
            found += calls
        elif dotted(receiver) not in elements and not script.made_by(receiver, *_STEPS):
            draft.ask(call, questions.OPTIMIZER.format(dotted(receiver)))
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
    """Return the variables whose parameters an optimizer is given."""
    given = argument(call, "params", 0) or argument(call, "model", 0)
    script, found = draft.script, {}
    for value in [] if given is None else [given, *script.sources(given)]:
        for node in ast.walk(value):
            called = node.func if isinstance(node, ast.Call) else None
            if isinstance(called, ast.Attribute) and called.attr in (
                "parameters",
                "named_parameters",
            ):
                variable = root(called.value)
                if variable is not None and variable in draft.module.parents:
                    found[dotted(variable)] = variable
    if (
        not found
        and given is not None
        and dotted(given)
        and not _OPTIMIZER.match(script.name(call.func))
    ):
        found[dotted(given)] = given  # `create_optimizer(model, …)`
    return list(found.values())


def _model(draft: Draft, variable: ast.expr, call: ast.Call) -> None:
    """Give the model that a variable is to the run, before the optimizer is made."""
    found = origins(draft.script, variable)
    if any(one in draft.held for one in found):
        return
    draft.held.update(found)
    made_in = [
        one
        for home, one in draft.script.project.sources(draft.module, variable)
        if home is draft.module
    ]
    draft.inside += [
        one for one in made_in if isinstance(one, ast.Call) and one in draft.module.parents
    ]
    made = found[0] if len(found) == 1 else None
    if (
        made is None
        or made not in draft.module.parents
        or isinstance(made, ast.Name | ast.Attribute)
    ):
        draft.edit(
            "before",
            _statement(draft, call),
            f"{dotted(variable)} = {RUN}.model({dotted(variable)})",
        )
    elif change := _changed_after(draft, variable, made, call):
        at = _after(draft, change)
        draft.edit("after", at, f"{dotted(variable)} = {RUN}.model({dotted(variable)})")
    elif isinstance(made, ast.Call) and draft.script.name(made.func) in _WRAPPERS:
        for name in _DEVICES:
            draft.edit("argument", made, name=name)
        draft.edit("callee", made, f"{RUN}.model")
    else:
        draft.edit("wrap", made, f"{RUN}.model")


def _statement(draft: Draft, node: ast.expr) -> ast.stmt:
    statement = draft.module.statement(node)
    assert statement is not None
    return statement


def _after(draft: Draft, node: ast.AST) -> ast.stmt:
    return draft.line_statement(node)


def _changed_after(
    draft: Draft, variable: ast.expr, made: ast.expr, call: ast.Call
) -> ast.stmt | None:
    """Return the last statement before an optimizer that changes its model's layers or freezes them."""
    module, name = draft.module, dotted(variable)
    found = None
    for node in ast.walk(module.scope(variable)):
        if not isinstance(node, ast.Assign | ast.For) or module.scope(node) is not module.scope(
            call
        ):
            continue
        if not made.lineno < node.lineno < call.lineno:
            continue
        targets = node.targets if isinstance(node, ast.Assign) else []
        layers = any(
            isinstance(one, ast.Attribute | ast.Subscript)
            and dotted(one) != name
            and dotted(root(one) or one) == name
            for one in targets
        )
        freezes = isinstance(node, ast.For) and f"{name}." in ast.unparse(node.iter)
        if (layers or (freezes and "requires_grad" in ast.unparse(node))) and (
            found is None or node.lineno > found.lineno
        ):
            found = node
    return found


def _wrappers(draft: Draft) -> None:
    """Leave of `DDP(model)` and of `model.module` the model, where the run holds it already."""
    script, module = draft.script, draft.module
    for call in script.calls(*_WRAPPERS):
        if call in draft.held or not call.args:
            continue
        match module.statement(call):
            case ast.Assign(targets=[target], value=value) as statement if value is call and dotted(
                target
            ) == dotted(call.args[0]):
                draft.remove(statement)
            case _:
                draft.edit("inside", call)
    for node in ast.walk(module.tree):
        if (
            isinstance(node, ast.Attribute)
            and node.attr == "module"
            and script.made_by(node.value, *_WRAPPERS)
        ):
            draft.edit("inside", node)
    for call in script.calls("torch.nn.SyncBatchNorm.convert_sync_batchnorm"):
        draft.edit("callee", call, f"{RUN}.sync_batchnorm")


def _is_part(draft: Draft, call: ast.Call) -> bool:
    """Whether a scheduler is one of those that another scheduler is made of."""
    script = draft.script
    for other in draft.module.calls:
        if other is call or not _SCHEDULER.search(script.name(other.func)):
            continue
        for given in other.args:
            values = [
                given,
                *(one for part in _listed(script, given) for one in script.sources(part)),
            ]
            if call in values or other in draft.module.above(call):
                return True
    return False


def _listed(script: object, node: ast.expr) -> list[ast.expr]:
    return list(node.elts) if isinstance(node, ast.List | ast.Tuple) else [node]
