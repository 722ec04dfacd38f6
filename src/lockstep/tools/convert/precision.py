"""Loss scaling: a GradScaler is the run's `precision="fp16"`."""

from __future__ import annotations

import ast

from lockstep.tools.check.arguments import argument
from lockstep.tools.convert import passes, questions
from lockstep.tools.convert.draft import RUN, Draft

SCALERS = ("torch.amp.GradScaler", "torch.cuda.amp.GradScaler", "torch.amp.grad_scaler.GradScaler")


def convert(draft: Draft) -> None:
    """Let the run scale losses."""
    script, module = draft.script, draft.module
    scalers = list(script.calls(*SCALERS))
    if not scalers:
        return
    enabled = argument(scalers[0], "enabled")
    draft.precision = _precision(draft, enabled)
    for made in scalers:
        statement = module.statement(made)
        first = "cuda" not in script.name(made.func)  # of torch.amp the device
        if made.args[first:] or {word.arg for word in made.keywords} - {"device", "enabled"}:
            draft.ask(made, questions.SCALER)
        elif isinstance(statement, ast.Assign):
            draft.fading.add(statement)
    for call in draft.module.calls:
        if isinstance(call.func, ast.Attribute) and script.made_by(call.func.value, *SCALERS):
            _call(draft, call, call.func.attr)


def _precision(draft: Draft, enabled: ast.expr | None) -> str:
    if enabled is None:
        return ', precision="fp16"'
    return f', precision="fp16" if {draft.module.source(enabled)} else "fp32"'


def _call(draft: Draft, call: ast.Call, method: str) -> None:
    source, statement = draft.module.source, draft.module.statement(call)
    above = draft.module.parents.get(call)
    whole = draft.module.parents.get(above) if isinstance(above, ast.Attribute) else None
    if method == "step" and len([*call.args, *call.keywords]) == 1 and call.args:
        draft.edit("replace", call, f"{source(call.args[0])}.step()")
    elif isinstance(whole, ast.Call) and passes.is_backward(whole):
        if not (whole.args or whole.keywords):
            draft.edit("inside", call)
            draft.edit("owner", whole, f"{RUN}.backward")
    elif (
        isinstance(statement, ast.Expr)
        and statement.value is call
        and (method == "unscale_" or (method == "update" and not (call.args or call.keywords)))
    ):
        draft.remove(statement)
    else:
        draft.ask(call, questions.SCALER)
