"""Replace reads of rank and world size in DDP scripts; ask the user about values computed from them."""

from __future__ import annotations

import ast
import re

from lockstep.tools.check.script import Script
from lockstep.tools.check.syntax import dotted, root, variables
from lockstep.tools.convert import questions
from lockstep.tools.convert.draft import RUN, Draft

#: Environment variables, and the attributes of the run with their values. The number of replicas replaces
#: that of ranks, so that values computed from it are the same on every layout.
_VARIABLES = {
    r"RANK$": "world.rank",
    r"LOCAL_RANK$": "world.local_rank",
    r"WORLD_SIZE$": "replicas",
}
_ANSWERS = {"dist.get_rank": "world.rank", "dist.get_world_size": "replicas"}
_REDUCES = re.compile(r"^dist\.(all_)?(reduce|gather)\w*$")


def convert(draft: Draft) -> None:
    """Edit a DDP script's draft: replace reads of rank and world size by attributes of the run.

    The user is asked about computations with the rank or the world size.
    """
    if "ddp" not in draft.script.flavours:
        return
    _asked(draft)
    for node in ast.walk(draft.module.tree):
        if _takes_part(draft.script, node):
            draft.ask(node, questions.PART)
        elif _divides_sum(draft, node):
            draft.ask(node, questions.DIVIDED)
        elif _computes(draft, node):
            draft.ask(node, questions.RANK)


# The rank and the number of ranks --------------------------------------------------------------------


def _asked(draft: Draft) -> None:
    """Edit the draft: replace reads of rank and world size by attributes of the run.

    Tests whether the script runs under DDP, such as `dist.is_initialized()`, are replaced by `True`.
    """
    options = _options(draft)
    for node in ast.walk(draft.module.tree):
        if isinstance(node, ast.expr) and (named := _variable(node)):
            if isinstance(node, ast.Compare):
                draft.edit("replace", node, "True")
            else:
                draft.edit("replace", _number(draft, node), f"{RUN}.{named}")
        elif isinstance(node, ast.Call):
            _answer(draft, node)
        elif isinstance(node, ast.Attribute) and dotted(node) in options:
            draft.edit("replace", node, f"{RUN}.world.local_rank")


def _variable(node: ast.expr) -> str:
    """Return the run's attribute for the environment variable, such as `RANK`, that `node` reads.

    `"RANK" in os.environ` counts as a read. For other nodes, return an empty text.
    """
    match node:
        case (
            ast.Subscript(value=place, slice=ast.Constant(value=key))
            | ast.Call(func=place, args=[ast.Constant(value=key), *_])
            | ast.Compare(left=ast.Constant(value=key), ops=[ast.In()], comparators=[place])
        ) if dotted(place).endswith(("environ", "environ.get", "getenv")):
            names = (name for form, name in _VARIABLES.items() if re.match(form, str(key)))
            return next(names, "")
    return ""


def _number(draft: Draft, node: ast.expr) -> ast.expr:
    """Return the call `int(…)` if `node` is an argument of such a call; otherwise `node` itself."""
    parent = draft.module.parents.get(node)
    return parent if isinstance(parent, ast.Call) and dotted(parent.func) == "int" else node


def _answer(draft: Draft, call: ast.Call) -> None:
    name = draft.script.name(call.func)
    if name == "dist.is_initialized":
        draft.edit("replace", call, "True")
    elif name in _ANSWERS and not call.args:
        match draft.module.parents.get(call), name:
            case (
                ast.Compare(ops=[ast.Eq()], comparators=[ast.Constant(value=0)]) as comparison,
                "dist.get_rank",
            ):
                draft.edit("replace", comparison, f"{RUN}.is_main_process")
            case _:
                draft.edit("replace", call, f"{RUN}.{_ANSWERS[name]}")


def _options(draft: Draft) -> set[str]:
    """Return the variables, such as `args.local_rank`, that hold the option `--local_rank`."""
    options = [arg for call in draft.script.methods("add_argument") for arg in call.args]
    if not any(re.fullmatch("'--local[-_]rank'", ast.unparse(one)) for one in options):
        return set()
    read = {dotted(node) for node in variables(draft.module.tree)}
    named = {variable for variable in read if re.fullmatch(r"(?!self\.)\w+\.local_rank", variable)}
    return {one for one in named if (None, one) not in draft.module.attributes}


# Values computed from the rank ------------------------------------------------------------------------


def _takes_part(script: Script, node: ast.AST) -> bool:
    """Whether `node` selects the data of one rank: `data[rank::n]`, `range(rank, …)`, `i % n == rank`."""
    match node:
        case ast.Slice():
            return script.is_rank(node)
        case ast.Subscript(slice=ast.Name() | ast.Attribute() as index):
            device = re.search("local|gpu|device", ast.unparse(node))
            return script.is_rank(index) and not device
        case ast.Call(func=func, args=args):
            counts = dotted(func).endswith(("range", "islice"))
            return counts and any(script.is_rank(arg) for arg in args)
        case ast.BinOp(left=left, op=ast.Mod(), right=right):
            shown = isinstance(left, ast.Constant | ast.JoinedStr)
            return script.is_world_size(right) and not (shown or script.is_rank(left))
    return False


def _divides_sum(draft: Draft, node: ast.AST) -> bool:
    """Whether a node divides by the world size, in a function that also calls a reducing collective."""
    script, scope = draft.script, draft.module.scope
    match node:
        case (
            ast.BinOp(left=total, op=ast.Div() | ast.FloorDiv(), right=number)
            | ast.AugAssign(target=total, op=ast.Div() | ast.FloorDiv(), value=number)
        ):
            calls = [call for call in draft.module.calls if scope(call) is scope(node)]
            reduced = {
                dotted(root(argument) or call)
                for call in calls
                if _REDUCES.match(script.name(call.func))
                for argument in call.args[:1]
            }
            if script.is_world_size(number):
                return bool(reduced)
            named = script.made_by(number, "dist.get_world_size")
            return bool(named) and dotted(root(total) or node) in reduced
    return False


def _computes(draft: Draft, node: ast.AST) -> bool:
    """Whether `node` adds, subtracts or multiplies the rank.

    Expressions in an f-string, or in an argument of `print` or `torch.manual_seed`, do not count.
    """
    match node:
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult(), right=right):
            sides = [one for one in (left, right) if not isinstance(one, ast.BinOp)]
            above = list(draft.module.above(node))
            calls = [dotted(parent.func) for parent in above if isinstance(parent, ast.Call)]
            shown = any(isinstance(parent, ast.JoinedStr) for parent in above)
            shown = shown or any(re.search("print|torch.manual_seed", call) for call in calls)
            return not shown and any(draft.script.is_rank(side) for side in sides)
    return False
