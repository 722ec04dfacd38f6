"""Edit scripts so that only the main rank writes files, such as those of `torch.save`."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from lockstep.tools.check.syntax import Function, argument
from lockstep.tools.convert import questions
from lockstep.tools.convert.draft import RUN, Draft, origins

_WRITES = re.compile(
    r"^shutil\.(copy\w*|move|rmtree)$|^os\.(rename|replace|remove|unlink|symlink)$"
)
#: Functions other than `torch.save` that write files.
_OTHERS = re.compile(
    r"(^|\.)(savefig|save_image|SummaryWriter|FileHandler|to_csv|to_json|to_parquet|to_pickle)$"
    r"|(^|\.)(write_text|write_bytes|save_pretrained|save_file)$|^torch\.(jit\.save|onnx\.export)$"
    r"|^numpy\.save\w*$|^(json|pickle)\.dump$|^wandb\.init$|^mlflow\.start_run$"
)


def convert(draft: Draft) -> None:
    """Edit the draft: put `torch.save` under `if run.is_main_process`, and let loads wait for it.

    The user is asked about other calls that write files.
    """
    script = draft.script
    saving = {draft.module.scope(call) for call in script.calls("torch.save")}
    for call in script.calls("torch.save"):
        statement = draft.alone(call)
        if statement is None:
            draft.ask(call, questions.SAVE)
        elif not _is_guarded(draft, call):
            _save(draft, call, statement)
    for call in draft.module.calls:
        moves = _WRITES.match(script.name(call.func)) and draft.alone(call) is not None
        if not (moves or _writes(draft, call)) or _is_guarded(draft, call):
            continue
        if moves and draft.module.scope(call) in saving:
            draft.edit("guard", draft.line_statement(call), f"{RUN}.is_main_process")
        elif _writes(draft, call):
            draft.ask(call, questions.SAVE)
    _wait_for_files(draft)


def _wait_for_files(draft: Draft) -> None:
    """Add `run.barrier()` before each `torch.load` of a file that the same function has saved above it."""
    script, module = draft.script, draft.module
    saves = [(call, argument(call, "f", 1)) for call in script.calls("torch.save")]
    for load in script.calls("torch.load"):
        path = argument(load, "f", 0)
        if path is None or _is_guarded(draft, load) or script.step_loop(load) is not None:
            continue
        text = ast.unparse(path)
        if any(
            saved is not None
            and ast.unparse(saved) == text
            and call.lineno < load.lineno
            and module.scope(call) is module.scope(load)
            for call, saved in saves
        ):
            draft.edit("before", draft.line_statement(load), f"{RUN}.barrier()")


def _is_guarded(draft: Draft, node: ast.AST) -> bool:
    """Whether an `if`, `with` or decorator lets only some ranks, such as the main rank, execute `node`.

    An `if` such as `if rank == 0 or debug` does not count, since other ranks may execute its body.
    """
    guard = draft.script.guard(node)
    return guard is not None and not (
        isinstance(guard, ast.If)
        and any(
            isinstance(one, ast.BoolOp)
            and isinstance(one.op, ast.Or)
            and not all(draft.script.by_rank(value) for value in one.values)
            for one in ast.walk(guard.test)
        )
    )


def _writes(draft: Draft, call: ast.Call) -> bool:
    """Whether a call writes a file: `open` judged by its mode, other functions by their names.

    In a statement about which the user is asked already, only calls of `open` count.
    """
    name = draft.script.name(call.func)
    if name.rpartition(".")[2] == "open":
        mode = argument(call, "mode", 0 if isinstance(call.func, ast.Attribute) else 1)
        return isinstance(mode, ast.Constant) and bool(re.search("[wax+]", str(mode.value)))
    inside = any(parent in draft.questions for parent in draft.module.above(call))
    return bool(_OTHERS.search(name) or _WRITES.match(name)) and not inside


def _save(draft: Draft, call: ast.Call, statement: ast.Expr) -> None:
    module = draft.module
    match call.args:
        case [ast.Call(func=ast.Attribute(value=model, attr="state_dict"), args=[]), path] if (
            not call.keywords
        ):
            if isinstance(model, ast.Attribute) and model.attr == "module":
                model = model.value
            known = draft.models.intersection(origins(draft.script, model))
            texts = [node.value for node in ast.walk(path) if isinstance(node, ast.Constant)]
            suffixes = {Path(str(one)).suffix for one in [*texts, *draft.script.constants(path)]}
            exports = suffixes <= {"", ".pt", ".pth", ".bin"}  # suffixes that `run.export` accepts
            if known and exports and not _by_value(draft, call):
                code = f"{RUN}.export({module.source(path)}, {module.source(model)})"
                draft.edit("replace", call, code)
                return
    draft.edit("guard", statement, f"{RUN}.is_main_process")


def _by_value(draft: Draft, node: ast.AST) -> bool:
    """Whether `node` is in a training loop, or under an `if` that compares values.

    The result of such a comparison may differ between ranks.
    """
    for parent in draft.module.above(node):
        if parent in draft.script.step_loops:
            return True
        if isinstance(parent, Function):
            return False
        if isinstance(parent, ast.If) and "__name__" not in ast.unparse(parent.test):
            return any(isinstance(part, ast.Compare) for part in ast.walk(parent.test))
    return False
