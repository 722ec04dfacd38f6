"""Edit scripts so that training loops iterate over `run.loader(loader)` instead of `loader`."""

from __future__ import annotations

import ast

from lockstep.tools.check.script import EVALUATION, Script
from lockstep.tools.check.syntax import Loop, argument, dotted, last_name, stored, variables
from lockstep.tools.convert import questions
from lockstep.tools.convert.draft import RUN, Draft, origins


def convert(draft: Draft) -> None:
    """Edit the draft: training loops iterate over `run.loader(…)`.

    The user is asked about training loops without a loader.
    """
    script = draft.script
    given: set[ast.expr] = set()
    for loop in script.step_loops:
        over = script.iterated(loop)
        found = [] if over is None else _gone_over(script, over)
        # A loop that both trains and evaluates has several loaders: take those for training.
        training = [one for one in found if not EVALUATION.search(script.bound_name(one).lower())]
        for made in training or found:
            if made not in given:
                given.add(made)
                _loader(draft, loop, made)
        if not found:
            draft.ask(loop, _unknown(over))
        _others(draft, loop)
    for loop in draft.module.loops:  # evaluations over a loader of the run
        over = script.iterated(loop)
        if over is None or script.level(loop.body) is not None:
            continue
        if given.intersection(_gone_over(script, over)):
            draft.ask(loop, questions.SHARE)


def _unknown(node: ast.expr | None) -> str:
    """Return the question to the user about a training loop whose iterable `node` is no known loader."""
    return questions.LOADER.format("a while loop" if node is None else ast.unparse(node)[:60])


def _others(draft: Draft, loop: Loop) -> None:
    """Add a question to `draft` about a loop that uses several loaders, or only some batches of one loader.

    Such loops call `zip`, `cycle`, `next` or `islice`.
    """
    inside = ast.walk(loop.iter) if isinstance(loop, ast.For) else ()
    for call in (one for one in inside if isinstance(one, ast.Call)):
        name = last_name(call.func)
        if name == "islice":
            draft.ask(loop, questions.LEAVES)
        elif name in ("zip", "cycle"):
            draft.ask(loop, _unknown(call))
            break
    for call in draft.module.calls:
        drawn = dotted(call.func) == "next" and "parameters(" not in ast.unparse(call)
        if drawn and draft.script.step_loop(call) is loop:
            draft.ask(call, _unknown(call))


def _gone_over(script: Script, node: ast.expr) -> list[ast.expr]:
    """Return the expressions that may be the iterable `node` of a loop, such as `DataLoader(…)`.

    Variables are followed to their values, and a progress bar (`tqdm`) to the iterable inside of it.
    """
    found: list[ast.expr] = []
    for origin in origins(script, node):
        match origin:
            case ast.IfExp(body=body, orelse=orelse):
                found += [*_gone_over(script, body), *_gone_over(script, orelse)]
            case ast.Call(func=func, args=[inner, *_]) if dotted(func).endswith("tqdm"):
                found += _gone_over(script, inner)
            case ast.Tuple(elts=[]) | ast.List(elts=[]):
                pass
            case _:
                found.append(origin)
    return found


def _loader(draft: Draft, loop: Loop, made: ast.expr) -> None:
    script = draft.script
    calls = script.made_by(made, "DataLoader")
    if not calls or made not in draft.module.parents:
        draft.ask(loop, _unknown(made))
        return
    for call in calls:
        if argument(call, "batch_sampler") is not None and "ddp" in script.flavours:
            draft.ask(call, questions.BATCH_SAMPLER)
        size = argument(call, "batch_size", 1)
        if size is not None and dotted(size) and "ddp" not in script.flavours:
            _sizes(draft, loop, last_name(size))
    draft.edit("wrap", made, f"{RUN}.loader")


def _sizes(draft: Draft, loop: Loop, name: str) -> None:
    """Add questions to `draft` about reads of the batch size `name` in a loop: a microbatch is smaller."""
    own = stored(loop)
    for node in variables(draft.module.tree, context=ast.Load):
        if last_name(node) != name or dotted(node) in own or draft.script.is_shown(node):
            continue
        if draft.script.step_loop(node) is loop:
            draft.ask(node, questions.SIZE.format(name))
