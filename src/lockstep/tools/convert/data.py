"""Loaders: the data of a training loop goes through `run.loader`."""

from __future__ import annotations

import ast

from lockstep.tools.check.arguments import argument
from lockstep.tools.check.rules.microbatches import is_shown
from lockstep.tools.check.script import EVALUATION, Script
from lockstep.tools.check.source import Loop, dotted, last_name
from lockstep.tools.convert import questions
from lockstep.tools.convert.carried import stored
from lockstep.tools.convert.draft import RUN, Draft, origins


def convert(draft: Draft) -> None:
    """Give the loaders of training loops to the run."""
    script, held = draft.script, set()
    for loop in script.step_loops:
        given = script.iterated(loop)
        found = [] if given is None else _gone_over(script, given)
        for one in _trained_on(script, found):
            if one not in held:
                held.add(one)
                _loader(draft, loop, one)
        if not found:
            draft.ask(loop, questions.LOADER.format(_text(given)))
        _others(draft, loop)
    _measured(draft, held)


def _others(draft: Draft, loop: Loop) -> None:
    """Ask about what goes beside the loader of a loop, and about parts of a loader."""
    inside = ast.walk(loop.iter) if isinstance(loop, ast.For) else ()
    for call in (one for one in inside if isinstance(one, ast.Call)):
        name = last_name(call.func)
        if name == "islice":
            draft.ask(loop, questions.LEAVES)
        elif name in ("zip", "cycle"):
            draft.ask(loop, questions.LOADER.format(_text(call)))
            break
    for call in draft.module.calls:
        drawn = dotted(call.func) == "next" and "parameters(" not in ast.unparse(call)
        if drawn and draft.script.step_loop(call) is loop:
            draft.ask(call, questions.LOADER.format(_text(call)))


def _text(node: ast.expr | None) -> str:
    return "a while loop" if node is None else ast.unparse(node)[:60]


def _gone_over(script: Script, node: ast.expr) -> list[ast.expr]:
    """Return what a loop goes over, where it is made: behind a bar, in either branch."""
    found: list[ast.expr] = []
    for one in origins(script, node):
        match one:
            case ast.IfExp(body=body, orelse=orelse):
                found += [*_gone_over(script, body), *_gone_over(script, orelse)]
            case ast.Call(func=func, args=[inner, *_]) if dotted(func).endswith("tqdm"):
                found += _gone_over(script, inner)
            case ast.Tuple(elts=[]) | ast.List(elts=[]):
                pass
            case _:
                found.append(one)
    return found


def _trained_on(script: Script, found: list[ast.expr]) -> list[ast.expr]:
    """Return, where a loop trains and measures by turns, what it trains on."""
    named = {one: script.bound_name(one).lower() for one in found}
    left = [one for one in found if not EVALUATION.search(named[one])]
    return left or found


def _loader(draft: Draft, loop: Loop, made: ast.expr) -> None:
    script = draft.script
    calls = script.made_by(made, "DataLoader")
    if not calls or made not in draft.module.parents:
        draft.ask(loop, questions.LOADER.format(_text(made)))
        return
    for call in calls:
        if argument(call, "batch_sampler") is not None:
            draft.ask(call, questions.BATCH_SAMPLER)
        size = argument(call, "batch_size", 1)
        if size is not None and dotted(size) and "ddp" not in script.flavours:
            _sizes(draft, loop, last_name(size))
    draft.edit("wrap", made, f"{RUN}.loader")


def _sizes(draft: Draft, loop: Loop, name: str) -> None:
    """Ask where a training loop reads the size of a batch: a microbatch has a part of it."""
    own = stored(loop)
    for node in ast.walk(draft.module.tree):
        read = isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load)
        same = read and last_name(node) == name and dotted(node) not in own
        if same and draft.script.step_loop(node) is loop and not is_shown(draft.script, node):
            draft.ask(node, questions.SIZE.format(name))


def _measured(draft: Draft, held: set[ast.expr]) -> None:
    """Ask about loops that measure over a loader of the run: a rank sees its share there."""
    script = draft.script
    for loop in draft.module.loops:
        if script.level(loop.body) is not None or isinstance(loop, ast.While):
            continue
        given = script.iterated(loop)
        if given is not None and any(one in held for one in _gone_over(script, given)):
            draft.ask(loop, questions.SHARE)
