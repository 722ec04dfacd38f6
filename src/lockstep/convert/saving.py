"""Files: what every rank would write is written by one."""

from __future__ import annotations

import ast
import re

from lockstep.check.source import Function
from lockstep.convert import questions
from lockstep.convert.draft import RUN, Draft, ancestors

_WRITES = re.compile(
    r"^shutil\.(copy\w*|move|rmtree)$|^os\.(rename|replace|remove|unlink|symlink)$"
)
#: What writes files by other names than torch's.
_OTHERS = re.compile(
    r"(^|\.)(savefig|save_image|SummaryWriter)$|^numpy\.save\w*$|^(json|pickle)\.dump$"
)
_OF_OPTIMIZERS = re.compile(r"^torch\.optim\.")


def convert(draft: Draft) -> None:
    """Let the main rank write what `torch.save` writes."""
    script = draft.script
    for call in script.calls("torch.save"):
        statement = draft.module.statement(call)
        if not isinstance(statement, ast.Expr) or statement.value is not call:
            draft.ask(call, questions.SAVE)
        elif script.guard(call) is None:
            _save(draft, call, statement)
    for call in draft.module.calls:
        statement = draft.module.statement(call)
        alone = isinstance(statement, ast.Expr) and statement.value is call
        if _WRITES.match(script.name(call.func)) and alone and _near_save(draft, call):
            draft.edit("guard", draft.line_statement(call), f"{RUN}.is_main_process")
        elif _OTHERS.search(script.name(call.func)) and script.guard(call) is None:
            draft.ask(call, questions.SAVE)


def _save(draft: Draft, call: ast.Call, statement: ast.Expr) -> None:
    module = draft.module
    match call.args:
        case [ast.Call(func=ast.Attribute(value=model, attr="state_dict"), args=[]), path] if (
            not call.keywords
        ):
            if not _by_value(draft, call) and not _is_optimizer(draft, model):
                name = module.source(model).removesuffix(".module")
                draft.edit("replace", call, f"{RUN}.export({module.source(path)}, {name})")
                return
    draft.edit("guard", statement, f"{RUN}.is_main_process")


def _is_optimizer(draft: Draft, node: ast.expr) -> bool:
    """Whether a state is that of an optimizer, a schedule or an average, which are no models of the run."""
    script = draft.script
    return any(
        isinstance(one, ast.Call) and bool(_OF_OPTIMIZERS.match(script.name(one.func)))
        for one in script.sources(node)
    )


def _by_value(draft: Draft, node: ast.AST) -> bool:
    """Whether a node stands under a condition that may differ between ranks: a comparison."""
    for one in ancestors(draft.module, node):
        if isinstance(one, Function):
            return False
        if isinstance(one, ast.If) and "__name__" not in ast.unparse(one.test):
            return any(isinstance(part, ast.Compare) for part in ast.walk(one.test))
    return False


def _near_save(draft: Draft, node: ast.AST) -> bool:
    """Whether a function, or the file, also saves."""
    scope = draft.module.scope(node)
    calls = draft.script.calls("torch.save")
    return draft.script.guard(node) is None and any(
        draft.module.scope(one) is scope for one in calls
    )
