"""Facts about one file for rules: training loops, rank-dependent branches, wrapped models."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cached_property
from typing import cast

from lockstep.tools.check.arguments import argument
from lockstep.tools.check.project import Project
from lockstep.tools.check.source import Function, Loop, Module, dotted

#: Names of values that say which rank a process is.
_RANK = re.compile(r"^(?!lora_|matrix_|low_|max_)(\w*_)?rank$|(^|_)process_index$|^node_id$")
#: Names of values that are true on one rank, or on one rank of each node.
_MAIN = re.compile(
    r"^_?(is_)?(local_|global_|world_)?(main|master|primary|chief)_(process|rank|worker|proc|node)$"
    r"|^is_(main|master|primary|chief|rank_?zero|rank_?0|first_rank)$|^is_global_zero$|^rank_?zero$"
    r"|^should_save$"
)
_OF_RANK = re.compile(
    r"^(LOCAL_|GROUP_|NODE_)?RANK$|^(SLURM|PMI|OMPI_COMM_WORLD)_\w*(RANK|PROCID|LOCALID)$"
)
_WORLD = re.compile(
    r"^(\w*_)?(world_size|num_processes|n_?gpus?\w*|num_gpus|n_ranks|nprocs|num_replicas)$"
)
#: Names of data that a model is measured on, not trained.
EVALUATION = re.compile(
    r"(?<![a-z])(val|valid|validat(e|ion)|test|eval|evaluat(e|ion)|dev)"
    r"(?=[^a-z]|$|set|loader|data|ds|sampler|dl|iter)"
)
#: Starts that make a program one of several processes, by the flavour of script.
FLAVOURS = {
    "dist.init_process_group": "ddp",
    "dist.init_device_mesh": "ddp",
    "DDP": "ddp",
    "Accelerator": "accelerate",
    "Fabric": "fabric",
    "lockstep.Run": "lockstep",
}
#: A guard whose body runs on one rank.
_GUARD_CALLS = {"main_process_first", "local_main_process_first", "rank_zero_first"}
_GUARD_DECORATORS = {
    "rank_zero_only",
    "on_main_process",
    "on_local_main_process",
    "main_process_only",
    "master_only",
}


class Script:
    """One file within its program, and the answers that rules share.

    Args:
        project: all files that were read.
        module: the file that is checked.
    """

    def __init__(self, project: Project, module: Module) -> None:
        self.project, self.module = project, module
        self.program = project.program(module)
        self._others: dict[Module, Script] = {module: self}

    # What there is ---------------------------------------------------------------------------------

    def name(self, node: ast.AST) -> str:
        """Return what an expression is called where it was defined (`dist.barrier`, `DDP`)."""
        return self.project.name(self.module, node)

    def calls(self, *names: str) -> Iterator[ast.Call]:
        """Yield the calls in this file of functions with these names."""
        for name in names:
            yield from self.project.calls(self.module, name)

    def methods(self, *names: str) -> Iterator[ast.Call]:
        """Yield the calls in this file of methods with these names."""
        for call in self.module.calls:
            if isinstance(call.func, ast.Attribute) and call.func.attr in names:
                yield call

    @cached_property
    def called(self) -> set[str]:
        """Every function and every method that the program calls, by name and by last name."""
        return {name for module in self.program for name in self.project.called(module)}

    def found(self, pattern: str) -> list[str]:
        """Return what a pattern finds in the source of the whole program."""
        return [one for module in self.program for one in self.project.found(module, pattern)]

    def says(self, pattern: str) -> bool:
        """Whether the source of the program has something, for what need not be understood to be there."""
        return any(self.project.found(module, pattern) for module in self.program)

    @cached_property
    def flavours(self) -> set[str]:
        """Which kinds of distributed script the program is: ddp, accelerate, fabric, lockstep."""
        names = FLAVOURS.keys() & self.called
        made = [one for module in self.program for one in self.project.calls(module, "Fabric")]
        devices = [argument(one, "devices", 2) for one in made]
        if devices and all(isinstance(one, ast.Constant) and one.value == 1 for one in devices):
            names -= {"Fabric"}
        return {FLAVOURS[name] for name in names}

    @cached_property
    def plain(self) -> bool:
        """Whether the program is a script of `torch.distributed`, without a framework above it."""
        trainers = ("lightning", "pytorch_lightning", "deepspeed", "transformers.Trainer", "ignite")
        imported = {name for module in self.program for name in module.imports.values()}
        return self.flavours == {"ddp"} and not any(
            name == one or name.startswith(one + ".") for name in imported for one in trainers
        )

    @cached_property
    def cuda(self) -> bool:
        """Whether the program uses CUDA."""
        return bool(self.says(r"\bcuda\b|\bnccl\b|torch\.accelerator"))

    # Values ----------------------------------------------------------------------------------------

    def sources(self, node: ast.expr) -> list[ast.expr]:
        """Return the expressions that a value may come from."""
        return [value for _, value in self.project.sources(self.module, node)]

    def made_by(self, node: ast.expr, *names: str) -> list[ast.Call]:
        """Return the calls of functions with these names that a value may come from."""
        return [
            value
            for module, value in self.project.sources(self.module, node)
            if isinstance(value, ast.Call) and self.project.name(module, value.func) in names
        ]

    def constants(self, node: ast.expr) -> list[object]:
        """Return the constants that a value may be."""
        return [value.value for value in self.sources(node) if isinstance(value, ast.Constant)]

    def constants_of(self, node: ast.expr | None) -> list[object]:
        """Return the constants that an argument may be, none where it is not there."""
        return [] if node is None else self.constants(node)

    # The rank --------------------------------------------------------------------------------------

    def is_rank(self, node: ast.expr) -> bool:
        """Whether an expression is the number of a rank, or read as one of its parts."""
        return any(self._says_rank(one) for one in ast.walk(node))

    def _says_rank(self, node: ast.AST) -> bool:
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name):
                return bool(_RANK.match(name)) or (
                    isinstance(node, ast.Name) and self._is_spawned_rank(node)
                )
            case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name)):
                return name in ("get_rank", "get_local_rank", "get_global_rank")
            case ast.Constant(value=str(text)):
                return bool(_OF_RANK.match(text))
        return False

    def _is_spawned_rank(self, node: ast.Name) -> bool:
        """Whether a name is the first parameter of a function that `mp.spawn` runs."""
        scope = self.module.scope(node)
        if not isinstance(scope, Function) or not scope.args.args:
            return False
        sites = self.project.sites.get(scope, ())
        spawned = any(site.positional[:1] == (None,) for _, site in sites)
        return spawned and scope.args.args[0].arg == node.id

    def is_world_size(self, node: ast.expr) -> bool:
        """Whether an expression has the number of ranks in it."""
        for one in ast.walk(node):
            match one:
                case ast.Name(id=name) | ast.Attribute(attr=name):
                    own = dotted(one).endswith("world.size")
                    if own or _WORLD.match(name) or name == "get_world_size":
                        return True
                case ast.Constant(value=str(text)):
                    if re.search(r"WORLD_SIZE$", text):
                        return True
        return False

    def by_rank(self, test: ast.expr) -> bool:
        """Whether a condition holds on some ranks and not on others."""
        match test:
            case ast.BoolOp():
                return any(self.by_rank(value) for value in test.values)
            case ast.UnaryOp(op=ast.Not()):
                return self.by_rank(test.operand)
            case ast.Compare():
                return self._compares_rank(test)
            case ast.Name(id=name) | ast.Attribute(attr=name):
                return bool(_MAIN.match(name)) or self._named(test)
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
                return bool(_MAIN.match(name)) or self._answers_by_rank(test)
        return False

    def _named(self, test: ast.expr) -> bool:
        """Whether a name stands for a comparison of the rank: `main = rank == 0`."""
        return any(
            isinstance(value, ast.Compare) and self._compares_rank(value)
            for value in self.sources(test)
        )

    def _answers_by_rank(self, call: ast.Call) -> bool:
        called = self.project.callee(self.module, call)
        return called is not None and any(
            isinstance(value, ast.Compare) and self._compares_rank(value)
            for value in self.sources(call)
        )

    def _compares_rank(self, test: ast.Compare) -> bool:
        sides = [test.left, *test.comparators]
        available = [_says_available(side, test.ops[0]) for side in sides]
        listed = [side for side in sides if isinstance(side, ast.Tuple | ast.List)]
        if any(available) and not listed:
            return False  # `local_rank != -1`: whether there are ranks
        return any(self.is_rank(side) or self._from_rank(side) for side in sides)

    def _from_rank(self, node: ast.expr) -> bool:
        """Whether a value was a rank where it comes from: `self.gpu_id`, given as `rank`."""
        if not isinstance(node, ast.Name | ast.Attribute):
            return False
        values = self.project.sources(self.module, node)
        return any(self.of(home).is_rank(value) for home, value in values)

    def guard(self, node: ast.AST, depth: int = 4) -> ast.AST | None:
        """Return the branch, or the decorator, by which only some ranks come to a node."""
        current: ast.AST = node
        while (parent := self.module.parents.get(current)) is not None:
            test = parent.test if isinstance(parent, ast.If | ast.IfExp) else None
            if test is not None and current is not test and self.by_rank(test):
                return parent
            if isinstance(parent, ast.With | ast.AsyncWith) and self._one_rank(parent):
                return parent
            if found := self._left_early(parent, current):
                return found
            if isinstance(parent, Function):
                return self._guarded_function(parent, depth)
            current = parent
        return None

    def _one_rank(self, node: ast.With | ast.AsyncWith) -> bool:
        calls = [item.context_expr for item in node.items]
        return any(
            isinstance(call, ast.Call) and dotted(call.func).rpartition(".")[2] in _GUARD_CALLS
            for call in calls
        )

    def _left_early(self, parent: ast.AST, child: ast.AST) -> ast.If | None:
        """Return the `if rank != 0: return` that stands before a statement in its block."""
        block = getattr(parent, "body", None)
        for one in block if isinstance(block, list) and child in block else ():
            if one is child:
                break
            leaves = isinstance(one, ast.If) and not one.orelse
            leaves = leaves and isinstance(one.body[-1], ast.Return | ast.Continue | ast.Raise)
            if leaves and self.by_rank(one.test):
                return cast("ast.If", one)
        return None

    def _guarded_function(self, function: Function, depth: int) -> ast.AST | None:
        for decorator in function.decorator_list:
            text = dotted(decorator.func if isinstance(decorator, ast.Call) else decorator)
            if text.rpartition(".")[2] in _GUARD_DECORATORS:
                return decorator
        sites = self.project.sites.get(function, ())
        if not sites or depth == 0:
            return None
        guards = [self.of(module).guard(site.call, depth - 1) for module, site in sites]
        return guards[0] if all(guards) else None

    def of(self, module: Module) -> Script:
        """Return the same questions for another module of the program."""
        if module not in self._others:
            other = self._others[module] = Script(self.project, module)
            other._others = self._others
        return self._others[module]

    # Order -----------------------------------------------------------------------------------------

    def exclusive(self, one: ast.AST, other: ast.AST) -> bool:
        """Whether two nodes stand in different branches of one condition."""
        branches = dict(self._branches(other))
        return any(
            node in branches and branches[node] != branch for node, branch in self._branches(one)
        )

    def _branches(self, node: ast.AST) -> Iterator[tuple[ast.AST, bool]]:
        current = node
        while (parent := self.module.parents.get(current)) is not None:
            if isinstance(parent, ast.If | ast.IfExp) and current is not parent.test:
                body = parent.body if isinstance(parent, ast.If) else [parent.body]
                yield parent, current in body
            current = parent

    def earlier(self, one: ast.expr, other: ast.expr) -> bool:
        """Whether, in the same function, one call comes before another on the same way."""
        return (
            self.module.scope(one) is self.module.scope(other)
            and (one.lineno, one.col_offset) < (other.lineno, other.col_offset)
            and not self.exclusive(one, other)
        )

    # Loops -----------------------------------------------------------------------------------------

    def level(self, body: list[ast.stmt], depth: int = 5) -> int | None:
        """Return how many loops stand between a block and `backward`, `None` if it is not there."""
        found = [self._level(statement, depth) for statement in body]
        levels = [level for level in found if level is not None]
        return min(levels, default=None)

    def _level(self, node: ast.AST, depth: int) -> int | None:
        if isinstance(node, Function | ast.ClassDef | ast.Lambda):
            return None
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute) and node.func.attr == "backward":
                return 0
            called = self.project.callee(self.module, node)
            method = isinstance(node.func, ast.Attribute) and called is not None
            model = method and called is not None and called.name == "forward"
            if called is not None and depth and called.name != "__init__" and not model:
                home = self.project.module_of(called)
                level = self.of(home).level(called.body, depth - 1)
                if level is not None:
                    return level
        found = [self._level(child, depth) for child in ast.iter_child_nodes(node)]
        levels = [level for level in found if level is not None]
        return min(levels) + isinstance(node, Loop) if levels else None

    @cached_property
    def _levels(self) -> dict[ast.AST, int | None]:
        return {loop: self.level(loop.body) for loop in self.module.loops}

    @property
    def step_loops(self) -> list[Loop]:
        """The loops that take a step, or a part of one, in each iteration."""
        return [loop for loop in self.module.loops if self._levels[loop] == 0]

    @property
    def epoch_loops(self) -> list[Loop]:
        """The loops around those."""
        return [loop for loop in self.module.loops if (self._levels[loop] or 0) > 0]

    @cached_property
    def trains(self) -> bool:
        """Whether the program has a loop that trains."""
        scripts = [self.of(module) for module in self.program]
        return any(one.step_loops for one in scripts)

    def step_loop(self, node: ast.AST, *, always: bool = False, depth: int = 3) -> ast.AST | None:
        """Return the training loop whose steps come to a node.

        Args:
            node: a call, say, in the loop or in a function that is called there.
            always: whether it has to be every step, without a condition.
            depth: how many calls are followed.
        """
        current = node
        while (parent := self.module.parents.get(current)) is not None:
            conditional = isinstance(parent, ast.If) and current is not parent.test
            if always and (conditional or isinstance(parent, ast.ExceptHandler)):
                return None
            if isinstance(parent, Loop) and current in parent.body:
                if self._levels[parent] == 0:
                    return parent
                if self._levels[parent] is not None:
                    return None
            if isinstance(parent, Function):
                return self._caller_loop(parent, always=always, depth=depth)
            current = parent
        return None

    def _caller_loop(self, function: Function, *, always: bool, depth: int) -> ast.AST | None:
        for module, site in self.project.sites.get(function, ()) if depth else ():
            found = self.of(module).step_loop(site.call, always=always, depth=depth - 1)
            if found is not None:
                return found
        return None

    def iterated(self, loop: Loop) -> ast.expr | None:
        """Return the loader, or whatever a `for` goes over, without `enumerate` and `tqdm`."""
        node = None if isinstance(loop, ast.While) else loop.iter
        while isinstance(node, ast.Call) and node.args:
            name = dotted(node.func).rpartition(".")[2]
            if name not in ("enumerate", "tqdm", "trange", "iter", "zip", "islice", "log_every"):
                break
            node = node.args[0]
        return node

    @cached_property
    def loaders(self) -> set[ast.AST]:
        """The calls of DataLoader that a training loop of the program goes over."""
        found: set[ast.AST] = set()
        for module in self.program:
            other = self.of(module)
            for loop in other.step_loops:
                node = other.iterated(loop)
                if node is not None:
                    found.update(other.made_by(node, "DataLoader"))
        return found

    def evaluates(self, node: ast.AST) -> bool:
        """Whether a node belongs to an evaluation, by `no_grad` or by the function's name."""
        current: ast.AST = node
        while (parent := self.module.parents.get(current)) is not None:
            if isinstance(parent, ast.With):
                texts = [ast.unparse(item.context_expr) for item in parent.items]
                if any(re.search(r"no_grad|inference_mode", text) for text in texts):
                    return True
            if isinstance(parent, Function):
                texts = [ast.unparse(one) for one in parent.decorator_list]
                named = EVALUATION.search(parent.name.lower())
                return bool(named) or any(re.search(r"no_grad|inference", text) for text in texts)
            current = parent
        return False

    def bound_name(self, call: ast.expr) -> str:
        """Return the name that the value of an expression is bound to: `train_loader`, `self.data`."""
        parent = self.module.parents.get(call)
        match parent:
            case ast.Assign(targets=[target]):
                return dotted(target)
            case ast.AnnAssign(target=target):
                return dotted(target)
            case ast.IfExp():
                return self.bound_name(parent)
        return ""


def _says_available(side: ast.expr, operator: ast.cmpop) -> bool:
    """Whether a comparison with this side asks if there are ranks: `is None`, `!= -1`, `>= 0`."""
    if isinstance(side, ast.UnaryOp):
        return True
    if not isinstance(side, ast.Constant):
        return False
    return side.value in (None, "") or (side.value == 0 and isinstance(operator, ast.GtE | ast.Lt))
