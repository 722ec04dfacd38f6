"""Convert the setup of a DDP script: process group, samplers, devices, seeds, `mp.spawn`."""

from __future__ import annotations

import ast
import re

from lockstep.tools.check.script import Script
from lockstep.tools.check.syntax import Function, argument, method, reads, receiver, stored
from lockstep.tools.convert import questions, unused
from lockstep.tools.convert.draft import REPLICAS, RUN, Draft
from lockstep.tools.convert.run_scope import RunScope

_GOES = ("dist.init_process_group", "dist.destroy_process_group", "torch.cuda.set_device")
_ADDRESS = re.compile(r"^MASTER_(ADDR|PORT)$")
_COLLECTIVE = re.compile(
    r"^dist\.(all_\w+|reduce\w*|broadcast\w*|gather\w*|scatter\w*|monitored_barrier)$"
)


def convert(draft: Draft) -> None:
    """Edit the draft of a DDP script: remove the setup of DDP, and replace barriers.

    Removed are process groups, `set_epoch`, `set_device` and the variables `MASTER_…`. Collectives are
    removed in an evaluation; about other ones the user is asked. Devices are replaced in any script, with
    DDP or without.
    """
    _device_names(draft)
    _devices_of_ranks(draft)
    script = draft.script
    if "ddp" not in script.flavours:
        return
    for call in [*script.calls(*_GOES), *script.methods("set_epoch")]:
        _remove(draft, call)
    for statement in ast.walk(draft.module.tree):
        match statement:
            case ast.Assign(targets=[ast.Subscript(slice=ast.Constant(value=key)), *_]) if (
                _ADDRESS.match(str(key))
            ):
                draft.removed.add(statement)
    for call in draft.module.calls:
        name = script.name(call.func)
        if name == "dist.barrier":
            draft.edit("replace", call, f"{RUN}.barrier()")
        elif not _COLLECTIVE.match(name):
            continue
        elif script.evaluates(call) and script.step_loop(call) is None:
            _remove(draft, call)  # each rank evaluates on all of the data
        else:
            draft.ask(call, questions.COLLECTIVE.format(name))
    for call in script.calls("DataLoader"):
        _sampler(draft, call)


def _remove(draft: Draft, call: ast.Call) -> None:
    if statement := draft.alone(call):
        draft.removed.add(statement)
    else:
        draft.ask(call, questions.TAKEN)


# Samplers ------------------------------------------------------------------------------------------


def _sampler(draft: Draft, call: ast.Call) -> None:
    """Edit a DataLoader of a DDP script: `shuffle` replaces the DistributedSampler.

    The batch size of a training loader, which was per rank, becomes that of all ranks.
    """
    made = draft.script.made_by(argument(call, "sampler"), "DistributedSampler")
    trains = call in draft.script.loaders
    if made:
        order = argument(made[0], "shuffle", 3)
        asked = "True" if order is None else draft.module.source(order)
        draft.edit("argument", call, name="sampler")
        draft.edit("argument", call, "" if asked == "False" else asked, "shuffle")
        for sampler in made:
            match draft.module.statement(sampler):
                case ast.Assign(targets=[ast.Name(), *_]) as statement:
                    draft.droppable.add(statement)
            left_out = argument(sampler, "drop_last", 5)
            drops = left_out is not None and ast.unparse(left_out) != "False"
            if trains and (drops or argument(sampler, "seed", 4) is not None):
                draft.ask(call, questions.SAMPLER)
    if trains and made:
        _batch(draft, call)
    elif trains and argument(call, "batch_sampler") is None:
        draft.ask(call, questions.BATCH_SIZE)


def _batch(draft: Draft, call: ast.Call) -> None:
    """Edit the `batch_size` of a DDP loader: from a size per rank to that of a global batch.

    A size is multiplied by the number of replicas; a division by the number of ranks is removed. If the
    size depends on the number of ranks in another way, the user is asked.
    """
    script, given = draft.script, argument(call, "batch_size", 1)
    match given:
        case None:
            draft.edit("argument", call, f"{RUN}.replicas", "batch_size")
        case ast.BinOp(left=left, op=ast.Div() | ast.FloorDiv(), right=right) if (
            script.is_world_size(right)
        ):
            draft.edit("replace", given, draft.module.source(left))
        case _ if any(script.is_world_size(source) for source in script.sources(given)):
            draft.ask(call, questions.BATCH_SIZE)
        case _:
            text = draft.operand(given)
            draft.edit("replace", given, f"{text} * {RUN}.replicas")
            draft.notes.append(questions.PER_RANK.format(text, REPLICAS))


# Devices -------------------------------------------------------------------------------------------


def _device_names(draft: Draft) -> None:
    """Replace devices with a fixed number, such as `cuda:0`, by `cuda`: each rank has its own device."""
    for node in ast.walk(draft.module.tree):
        if isinstance(node, ast.Constant) and re.fullmatch(r"cuda:\d+", str(node.value)):
            draft.edit("replace", node, '"cuda"')


def _devices_of_ranks(draft: Draft) -> None:
    """Replace devices that are computed from the rank, as in `.to(rank)`, by `run.device`."""
    script, module = draft.script, draft.module
    for call in script.calls("torch.device"):
        if any(_of_rank(script, arg) for arg in call.args):
            draft.edit("replace", call, f"{RUN}.device")
    for call in script.methods("to", "cuda"):
        if call.args and _of_rank(script, call.args[0]):
            if method(call) == "cuda":
                draft.edit("replace", call.func, f"{draft.operand(receiver(call))}.to")
            draft.edit("replace", call.args[0], f"{RUN}.device")
    for values in (*module.bound.values(), *module.attributes.values()):
        for value in values:
            text = isinstance(value, ast.JoinedStr) and "cuda" in ast.unparse(value)
            modulo = isinstance(value, ast.BinOp) and "device_count" in ast.unparse(value)
            if (text or modulo) and isinstance(value, ast.expr) and script.is_rank(value):
                draft.edit("replace", value, f"{RUN}.device")


def _of_rank(script: Script, node: ast.expr) -> bool:
    """Whether `node`, the argument of a call such as `.to(…)`, is the number of the rank."""
    if isinstance(node, ast.Call):
        return False
    return script.is_rank(node) or any(
        script.is_rank(value)
        for value in script.sources(node)
        if isinstance(value, ast.Name | ast.Attribute) or "int(" in ast.unparse(value)[:4]
    )


# Together with the scope of the run ----------------------------------------------------------------


def seeds(draft: Draft, scope: RunScope) -> None:
    """Edit the draft: the seed of the script becomes the argument `seed` of `lockstep.Run`.

    The user is asked if the seed is not known before the run is made.
    """
    script, module = draft.script, draft.module
    for call in script.calls("torch.manual_seed", "torch.random.manual_seed"):
        statement = module.statement(call)
        if not call.args or not isinstance(statement, ast.Expr):
            continue
        given = _without_rank(script, call.args[0])
        numbers = [one for one in script.constants(given) if type(one) is int]
        if statement in scope.block and (known := _known_before(script, scope, statement, given)):
            draft.seed = module.source(known)
            draft.removed.add(statement)
            scope.start = min(scope.start, scope.block.index(statement))
            return
        above = module.parents.get(statement)
        tested = isinstance(above, ast.If) and ast.unparse(given) in ast.unparse(above.test)
        if tested and above in scope.block:
            draft.seed = f"{module.source(given)} or 0"
        elif len(numbers) == 1 and len(script.sources(given)) == 1:
            draft.seed = str(numbers[0])
        else:
            draft.ask(call, questions.SEED)


def _known_before(
    script: Script, scope: RunScope, statement: ast.stmt, seed: ast.expr
) -> ast.expr | None:
    """Return an expression for the seed that can be evaluated before the run is made, or `None`.

    `statement` sets the value of `seed` as the seed, after the place where `scope` makes the run.
    """
    bound = stored(*scope.block[scope.start : scope.block.index(statement)])
    values = [_without_rank(script, source) for source in script.sources(seed)]
    for value in [seed, *(values if len(values) == 1 else [])]:
        if not any(isinstance(node, ast.Name) and node.id in bound for node in ast.walk(value)):
            return value
    return None


def _without_rank(script: Script, node: ast.expr) -> ast.expr:
    """Return the expression of a seed without the rank that is added to it: `42` for `42 + rank`.

    Any other expression `node` is returned as it is.
    """
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) and script.is_rank(node):
        return node.left if script.is_rank(node.right) else node.right
    return node


def spawned(draft: Draft, scope: RunScope) -> None:
    """Replace `mp.spawn(f, …)` by a call of `f`, which makes the run.

    The user is asked if the run is made elsewhere.
    """
    script, source = draft.script, draft.module.source
    for call in script.calls("mp.spawn"):
        target = script.project.definition(draft.module, call.args[0]) if call.args else None
        given = argument(call, "args", 1)
        own = target is scope.scope
        if not own or not isinstance(target, Function) or not isinstance(given, ast.Tuple):
            draft.ask(call, questions.SPAWN)
            continue
        words = ", ".join(source(element) for element in given.elts)
        draft.edit("replace", call, f"{source(call.args[0])}({words})")
        draft.edit("parameter", target, "")
        dead = set(unused.gone(draft))
        rank, *others = [arg.arg for arg in target.args.args]
        sizes = [one for one in others if script.is_world_size(ast.Name(one))]
        for name in (rank, *sizes):
            value = "world.rank" if name == rank else "replicas"
            if any(variable not in dead for variable in reads(name, target)):
                draft.edit("before", scope.block[scope.start], f"{name} = {RUN}.{value}")
