"""Query one file on behalf of rules: training loops, rank-dependent branches, wrapped models."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cached_property

from lockstep.tools.check.project import Project
from lockstep.tools.check.source import Module
from lockstep.tools.check.syntax import (
    Function,
    Loop,
    argument,
    before,
    dotted,
    last_name,
    method,
)

#: Names of variables with the rank of a process.
_RANK = re.compile(r"^(?!lora_|matrix_|low_|max_)(\w*_)?rank$|(^|_)process_index$|^node_id$")
#: Names of variables that are true on one rank, or on one rank of each node.
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
#: Names of data for evaluation.
EVALUATION = re.compile(
    r"(?<![a-z])(val|valid|validat(e|ion)|test|eval|evaluat(e|ion)|dev)"
    r"(?=[^a-z]|$|set|loader|data|ds|sampler|dl|iter)"
)
#: Names of functions and methods that show or log their arguments, and compute nothing with them.
SHOWS = {
    "print", "write", "log", "debug", "info", "warning", "log_metric", "log_metrics",
    "add_scalar", "add_scalars", "add_histogram", "set_description", "set_postfix",
}  # fmt: skip
#: Functions whose calls make a program a distributed one, and the library that each shows.
FLAVOURS = {
    "dist.init_process_group": "ddp",
    "dist.init_device_mesh": "ddp",
    "DDP": "ddp",
    "Accelerator": "accelerate",
    "Fabric": "fabric",
    "lockstep.Run": "lockstep",
}
#: Functions around the loader in the head of a loop.
_ITERATORS = {"enumerate", "tqdm", "trange", "iter", "zip", "islice", "log_every"}
#: Context managers and decorators whose body runs on one rank, or on one rank first.
_GUARD_CALLS = {"main_process_first", "local_main_process_first", "rank_zero_first"}
_GUARD_DECORATORS = {
    *("rank_zero_only", "on_main_process", "on_local_main_process"),
    *("main_process_only", "master_only"),
}


class Script:
    """A source file of a program, with methods by which rules query the file or the whole program.

    `scripts` has the `Script` of each module of the project for which there is one already.
    """

    def __init__(self, project: Project, module: Module, scripts: dict[Module, Script]) -> None:
        self.project, self.module, self._scripts = project, module, scripts
        scripts[module] = self

    def of(self, module: Module) -> Script:
        """Return the `Script` of `module`, another module of the project."""
        return self._scripts.get(module) or Script(self.project, module, self._scripts)

    # The program -----------------------------------------------------------------------------------

    @cached_property
    def program(self) -> list[Script]:
        """This file and all other files of the programs that contain it."""
        return [self.of(module) for module in self.project.programs[self.module]]

    def name(self, node: ast.AST) -> str:
        """Return an expression's qualified name, with usual abbreviations: `dist.barrier`, `DDP`."""
        return self.module.name(node)

    def calls(self, *names: str) -> Iterator[ast.Call]:
        """Return the calls in this file of functions with the qualified names `names`."""
        return (call for name in names for call in self.module.calls_by_name.get(name, ()))

    def methods(self, *names: str) -> Iterator[ast.Call]:
        """Return the calls in this file of methods with the names `names`."""
        return (call for call in self.module.calls if method(call) in names)

    def callee(self, node: ast.AST) -> Function | None:
        """Return the function that the call `node` runs, if the project defines it; else `None`."""
        return self.project.callee(self.module, node) if isinstance(node, ast.Call) else None

    def callers(self, function: ast.AST) -> list[tuple[Script, ast.Call]]:
        """Return the calls of a function in the whole project, each with the file that contains it."""
        sites = self.project.sites.get(function, ())
        return [(self.of(module), site.call) for module, site in sites]

    @cached_property
    def called(self) -> set[str]:
        """Names of all functions and methods that the program calls; a method's name begins with a dot."""
        return {name for script in self.program for name in script.module.called}

    def findall(self, pattern: str) -> list[str]:
        """Return the matches of the regular expression `pattern` in all files of the program."""
        return [text for script in self.program for text in script.module.findall(pattern)]

    def matches(self, pattern: str) -> bool:
        """Whether the regular expression `pattern` matches somewhere in the source of the program."""
        return any(script.module.findall(pattern) for script in self.program)

    @cached_property
    def flavours(self) -> set[str]:
        """The distributed libraries that the program uses: ddp, accelerate, fabric, lockstep, adapter.

        `adapter` stands for `lockstep.integrations`; with it, other libraries are not named.
        """
        imported = {name for script in self.program for name in script.module.imports.values()}
        if any(name.startswith("lockstep.integrations.") for name in imported):
            return {"adapter"}
        names = FLAVOURS.keys() & self.called
        made = [call for script in self.program for call in script.calls("Fabric")]
        devices = [argument(call, "devices", 2) for call in made]
        if devices and all(isinstance(one, ast.Constant) and one.value == 1 for one in devices):
            names -= {"Fabric"}
        return {FLAVOURS[name] for name in names}

    @cached_property
    def plain(self) -> bool:
        """Whether the program uses `torch.distributed` without another library on top of it."""
        trainers = ("lightning", "pytorch_lightning", "deepspeed", "transformers.Trainer", "ignite")
        imported = {name for script in self.program for name in script.module.imports.values()}
        return self.flavours == {"ddp"} and not any(
            name == one or name.startswith(one + ".") for name in imported for one in trainers
        )

    @cached_property
    def cuda(self) -> bool:
        """Whether the program uses CUDA."""
        return self.matches(r"\bcuda\b|\bnccl\b|torch\.accelerator")

    # Values ----------------------------------------------------------------------------------------

    def sources(self, node: ast.expr | None) -> list[ast.expr]:
        """Return the expressions from which `node` may get its value; an empty list for `None`."""
        return [value for _, value in self.project.sources(self.module, node)] if node else []

    def made_by(self, node: ast.expr | None, *names: str) -> list[ast.Call]:
        """Return the calls from which `node` may get its value: all, or those of the functions `names`."""
        return [
            value
            for module, value in (self.project.sources(self.module, node) if node else ())
            if isinstance(value, ast.Call) and (not names or module.name(value.func) in names)
        ]

    def of_run(self, node: ast.AST, *names: str) -> bool:
        """Whether `node` is an attribute of a `lockstep.Run` with one of `names`, such as `run.model`."""
        return (
            isinstance(node, ast.Attribute)
            and node.attr in names
            and bool(self.made_by(node.value, "lockstep.Run"))
        )

    def constants(self, node: ast.expr | None) -> list[object]:
        """Return the constants that may be the value of `node`; an empty list for `None`."""
        return [value.value for value in self.sources(node) if isinstance(value, ast.Constant)]

    def bound_name(self, node: ast.expr) -> str:
        """Return the variable to which an expression is assigned, such as `train_loader`, or ""."""
        match self.module.parents.get(node):
            case ast.Assign(targets=[target]) | ast.AnnAssign(target=target):
                return dotted(target)
            case ast.IfExp() as parent:
                return self.bound_name(parent)
        return ""

    def is_shown(self, node: ast.AST) -> bool:
        """Whether the value of `node` is only shown or collected: printed, logged, appended to a list."""
        for parent in self.module.above(node):
            if isinstance(parent, Loop):
                return False
            shows = isinstance(parent, ast.Call) and last_name(parent.func) in {*SHOWS, "append"}
            if shows or isinstance(parent, ast.JoinedStr):
                return True
        return False

    # The rank --------------------------------------------------------------------------------------

    def is_rank(self, node: ast.expr) -> bool:
        """Whether an expression is, or contains, the rank of the process."""
        return any(self._is_rank(part) for part in ast.walk(node))

    def _is_rank(self, node: ast.AST) -> bool:
        match node:
            case ast.Name(id=name):
                return bool(_RANK.match(name)) or self._is_spawned_rank(node)
            case ast.Attribute(attr=name):
                return bool(_RANK.match(name))
            case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name)):
                return name in ("get_rank", "get_local_rank", "get_global_rank")
            case ast.Constant(value=str(text)):
                return bool(_OF_RANK.match(text))
        return False

    def _is_spawned_rank(self, node: ast.Name) -> bool:
        """Whether a name is the first parameter of a function that `mp.spawn` runs, which is the rank."""
        scope = self.module.scope(node)
        if not isinstance(scope, Function) or [arg.arg for arg in scope.args.args[:1]] != [node.id]:
            return False
        sites = self.project.sites.get(scope, ())
        return any(site.positional[:1] == (None,) for _, site in sites)

    def is_world_size(self, node: ast.expr) -> bool:
        """Whether an expression is, or contains, the world size."""
        for part in ast.walk(node):
            match part:
                case ast.Name(id=name) | ast.Attribute(attr=name):
                    own = dotted(part).endswith("world.size")
                    if own or _WORLD.match(name) or name == "get_world_size":
                        return True
                case ast.Constant(value=str(text)) if re.search(r"WORLD_SIZE$", text):
                    return True
        return False

    def by_rank(self, test: ast.expr) -> bool:
        """Whether the condition `test` is true on some ranks and false on others, such as `rank == 0`."""
        match test:
            case ast.BoolOp(values=values):
                return any(self.by_rank(value) for value in values)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return self.by_rank(operand)
            case ast.Compare():
                return self._compares_rank(test)
            case ast.Name(id=name) | ast.Attribute(attr=name):
                pass
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
                pass
            case _:
                return False
        return bool(_MAIN.match(name)) or any(  # `main = rank == 0`
            isinstance(value, ast.Compare) and self._compares_rank(value)
            for value in self.sources(test)
        )

    def _compares_rank(self, test: ast.Compare) -> bool:
        sides = [test.left, *test.comparators]
        available = any(_asks_for_ranks(side, test.ops[0]) for side in sides)
        if available and not any(isinstance(side, ast.Tuple | ast.List) for side in sides):
            return False
        return any(self.is_rank(side) or self._from_rank(side) for side in sides)

    def _from_rank(self, node: ast.expr) -> bool:
        """Whether a variable gets its value from the rank, such as `self.gpu_id` from `rank`."""
        if not isinstance(node, ast.Name | ast.Attribute):
            return False
        values = self.project.sources(self.module, node)
        return any(self.of(home).is_rank(value) for home, value in values)

    def guard(self, node: ast.AST, depth: int = 4) -> ast.AST | None:
        """Return the `if`, `with` or decorator that lets only some ranks execute a node, or `None`.

        The function that contains the node is examined in the same way, over `depth` levels of calls.
        """
        for parent, child in self.module.ancestry(node):
            match parent:
                case ast.If(test=test) | ast.IfExp(test=test) if child is not test:
                    if self.by_rank(test):
                        return parent
                case ast.With(items=items) | ast.AsyncWith(items=items):
                    calls = (item.context_expr for item in items)
                    names = [last_name(call.func) for call in calls if isinstance(call, ast.Call)]
                    if _GUARD_CALLS.intersection(names):
                        return parent
            for branch in before(parent, child):  # `if rank != 0: return`
                if (
                    isinstance(branch, ast.If)
                    and not branch.orelse
                    and isinstance(branch.body[-1], ast.Return | ast.Continue | ast.Raise)
                    and self.by_rank(branch.test)
                ):
                    return branch
            if isinstance(parent, Function):
                return self._guarded_function(parent, depth)
        return None

    def _guarded_function(self, function: Function, depth: int) -> ast.AST | None:
        for decorator in function.decorator_list:
            named = decorator.func if isinstance(decorator, ast.Call) else decorator
            if last_name(named) in _GUARD_DECORATORS:
                return decorator
        callers = self.callers(function) if depth else []
        guards = [caller.guard(call, depth - 1) for caller, call in callers]
        return guards[0] if guards and all(guards) else None

    # Loops -----------------------------------------------------------------------------------------

    def level(self, nodes: Iterable[ast.AST], depth: int = 5) -> int | None:
        """Return how many loops in `nodes` are around a call of `backward`; `None` without such a call.

        Calls of functions are followed over `depth` levels.
        """
        levels = [self._level(node, depth) for node in nodes]
        return min((level for level in levels if level is not None), default=None)

    def _level(self, node: ast.AST, depth: int) -> int | None:
        if isinstance(node, Function | ast.ClassDef | ast.Lambda):
            return None
        if isinstance(node, ast.Call):
            if method(node) == "backward":
                return 0
            called = self.callee(node) if depth else None
            model = bool(method(node)) and called is not None and called.name == "forward"
            if called is not None and called.name != "__init__" and not model:
                home = self.of(self.project.module_of(called))
                if (level := home.level(called.body, depth - 1)) is not None:
                    return level
        level = self.level(ast.iter_child_nodes(node), depth)
        return None if level is None else level + isinstance(node, Loop)

    def runs_backward(self, node: ast.AST) -> bool:
        """Whether `node` is a call of a function of the project that contains a backward pass."""
        called = self.callee(node)
        return called is not None and self.level(called.body) is not None

    @cached_property
    def _levels(self) -> dict[ast.AST, int | None]:
        return {loop: self.level(loop.body) for loop in self.module.loops}

    @property
    def step_loops(self) -> list[Loop]:
        """Loops whose iterations are one training step or one microbatch each."""
        return [loop for loop in self.module.loops if self._levels[loop] == 0]

    @property
    def epoch_loops(self) -> list[Loop]:
        """Loops around loops of training steps, such as the loop over epochs."""
        return [loop for loop in self.module.loops if (self._levels[loop] or 0) > 0]

    @cached_property
    def trains(self) -> bool:
        """Whether the program has a training loop."""
        return any(script.step_loops for script in self.program)

    def step_loop(self, node: ast.AST, *, always: bool = False, depth: int = 3) -> ast.AST | None:
        """Return the training loop around a node, or around a call of the function that contains the node.

        With `always`, return `None` if an iteration may skip the node. Calls are followed over `depth`
        levels.
        """
        for parent, child in self.module.ancestry(node):
            conditional = isinstance(parent, ast.If) and child is not parent.test
            if always and (conditional or isinstance(parent, ast.ExceptHandler)):
                return None
            inside = isinstance(parent, Loop) and child in parent.body
            if inside and (level := self._levels[parent]) is not None:
                return parent if level == 0 else None
            if isinstance(parent, Function):
                found = (
                    caller.step_loop(call, always=always, depth=depth - 1)
                    for caller, call in (self.callers(parent) if depth else ())
                )
                return next((loop for loop in found if loop is not None), None)
        return None

    def iterated(self, loop: Loop) -> ast.expr | None:
        """Return the iterable of a `for` loop, such as a loader, without `enumerate` or `tqdm`."""
        node = None if isinstance(loop, ast.While) else loop.iter
        while isinstance(node, ast.Call) and node.args:
            if last_name(node.func) not in _ITERATORS:
                break
            node = node.args[0]
        return node

    @cached_property
    def loaders(self) -> set[ast.AST]:
        """The DataLoader calls whose loaders the program's training loops iterate over."""
        return {
            call
            for script in self.program
            for loop in script.step_loops
            for call in script.made_by(script.iterated(loop), "DataLoader")
        }

    def evaluates(self, node: ast.AST) -> bool:
        """Whether a node belongs to an evaluation, judged by `no_grad` or by the function's name."""
        for parent in self.module.above(node):
            if isinstance(parent, ast.With):
                texts = [ast.unparse(item.context_expr) for item in parent.items]
            elif isinstance(parent, Function):
                texts = [ast.unparse(decorator) for decorator in parent.decorator_list]
            else:
                continue
            if any(re.search(r"no_grad|inference", text) for text in texts):
                return True
            if isinstance(parent, Function):
                return bool(EVALUATION.search(parent.name.lower()))
        return False


def _asks_for_ranks(side: ast.expr, operator: ast.cmpop) -> bool:
    """Whether comparing a rank with `side` only tests for a distributed run, as `rank != -1` does."""
    if isinstance(side, ast.UnaryOp):
        return True
    zero = isinstance(operator, ast.GtE | ast.Lt)
    return isinstance(side, ast.Constant) and (
        side.value in (None, "") or (zero and side.value == 0)
    )
