"""Convert loss scaling: the run's argument `precision="fp16"` replaces a GradScaler."""

from __future__ import annotations

import ast

from lockstep.tools.check.syntax import all_arguments, argument, method
from lockstep.tools.convert import questions
from lockstep.tools.convert.draft import RUN, Draft

SCALERS = ("torch.amp.GradScaler", "torch.cuda.amp.GradScaler", "torch.amp.grad_scaler.GradScaler")


def convert(draft: Draft) -> None:
    """Edit the draft: remove the script's GradScaler, and make the run with `precision="fp16"`."""
    script, module = draft.script, draft.module
    scalers = list(script.calls(*SCALERS))
    if not scalers:
        return
    enabled = argument(scalers[0], "enabled")
    switch = "" if enabled is None else f' if {module.source(enabled)} else "fp32"'
    draft.precision = f', precision="fp16"{switch}'
    for made in scalers:
        statement = module.statement(made)
        # The first argument of torch.amp's is the device.
        first = "cuda" not in script.name(made.func)
        if made.args[first:] or {word.arg for word in made.keywords} - {"device", "enabled"}:
            draft.ask(made, questions.SCALER)
        elif isinstance(statement, ast.Assign):
            draft.droppable.add(statement)
    for call in module.calls:
        if isinstance(call.func, ast.Attribute) and script.made_by(call.func.value, *SCALERS):
            _call(draft, call, call.func.attr)


def _call(draft: Draft, call: ast.Call, name: str) -> None:
    statement = draft.alone(call)
    above = draft.module.parents.get(call)
    whole = draft.module.parents.get(above) if isinstance(above, ast.Attribute) else None
    if name == "step" and len(all_arguments(call)) == 1 and call.args:
        draft.edit("replace", call, f"{draft.module.source(call.args[0])}.step()")
    elif isinstance(whole, ast.Call) and method(whole) == "backward":
        if not all_arguments(whole):
            draft.edit("unwrap", call)
            draft.edit("receiver", whole, f"{RUN}.backward")
    elif statement and (name == "unscale_" or (name == "update" and not all_arguments(call))):
        draft.removed.add(statement)
    else:
        draft.ask(call, questions.SCALER)
