"""Loss scaling: a GradScaler is the run's `precision="fp16"`."""

from __future__ import annotations

import ast

from lockstep.check.arguments import argument
from lockstep.convert import questions
from lockstep.convert.draft import RUN, Draft

_SCALERS = ("torch.amp.GradScaler", "torch.cuda.amp.GradScaler", "torch.amp.grad_scaler.GradScaler")


def convert(draft: Draft) -> None:
    """Let the run scale losses."""
    script, module = draft.script, draft.module
    scalers = list(script.calls(*_SCALERS))
    if not scalers:
        return
    enabled = argument(scalers[0], "enabled")
    draft.precision = _precision(draft, enabled)
    for made in scalers:
        statement = module.statement(made)
        if isinstance(statement, ast.Assign):
            draft.fading.add(statement)
    for call in draft.module.calls:
        if isinstance(call.func, ast.Attribute) and script.made_by(call.func.value, *_SCALERS):
            _call(draft, call, call.func.attr)


def _precision(draft: Draft, enabled: ast.expr | None) -> str:
    if enabled is None:
        return ', precision="fp16"'
    return f', precision="fp16" if {draft.module.source(enabled)} else "fp32"'


def _call(draft: Draft, call: ast.Call, method: str) -> None:
    source, statement = draft.module.source, draft.module.statement(call)
    above = draft.module.parents.get(call)
    if method == "step" and call.args:
        draft.edit("replace", call, f"{source(call.args[0])}.step()")
    elif method == "scale" and isinstance(above, ast.Attribute) and above.attr == "backward":
        whole = draft.module.parents.get(above)
        if isinstance(whole, ast.Call):
            draft.edit("replace", whole, f"{RUN}.backward({source(call.args[0])})")
    elif method in ("unscale_", "update") and isinstance(statement, ast.Expr):
        draft.remove(statement)
    else:
        draft.ask(call, questions.SCALER)
