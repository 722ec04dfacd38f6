"""Seed random generators before the first line of a Lockstep script, with the same seed on all ranks.

Inside a run, Lockstep sets the generators itself. Random numbers that a script draws earlier, such as a
split of its data, must be the same on all ranks, after a restart, and when a run is resumed.
"""

from __future__ import annotations

import importlib.util
import random
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, FunctionType, ModuleType
from typing import Any

from lockstep.engine.layout import keys

_Seed = Callable[[ModuleType], object]


def seed_generators(environ: Mapping[str, str]) -> None:
    """Seed the generators of Python, NumPy and torch from `LOCKSTEP_SEED`, the same on all ranks.

    The generator of a package that is not imported yet is seeded at its import.
    """
    seed = environ.get("LOCKSTEP_SEED", "0")
    key = keys.derive(0, keys.SCRIPT, zlib.crc32(seed.encode()))
    random.seed(key)
    seeds: dict[str, _Seed] = {
        "numpy": lambda numpy: numpy.random.seed(key & 0xFFFFFFFF),
        "torch": lambda torch: torch.manual_seed(key),
    }
    for name in seeds.keys() & sys.modules.keys():
        seeds.pop(name)(sys.modules[name])
    if seeds:
        sys.meta_path.insert(0, _SeededWhenImported(seeds))


class _SeededWhenImported(MetaPathFinder):
    """Import hook that seeds a package's random generator after its import."""

    def __init__(self, seeds: dict[str, _Seed]) -> None:
        self._seeds = seeds

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        seed = self._seeds.pop(name, None)
        spec = None if seed is None else importlib.util.find_spec(name)
        if seed is None or spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_and_seed(module: ModuleType) -> None:
            execute(module)
            seed(module)

        spec.loader.exec_module = exec_and_seed  # type: ignore[method-assign]
        return spec


def names_run(function: object) -> bool:
    """Whether the code of `function`, or of a function that it names, mentions `lockstep` or `Run`.

    Functions are followed through the global variables of their modules, to any depth.
    """
    todo, seen = [function], set[int]()
    while todo:
        one = todo.pop()
        if not isinstance(one, FunctionType) or id(one) in seen:
            continue
        seen.add(id(one))
        names = _names(one.__code__)
        if names & {"lockstep", "Run"}:
            return True
        todo += [one.__globals__.get(name) for name in names]
    return False


def _names(code: CodeType) -> set[str]:
    inner: list[Any] = [one for one in code.co_consts if isinstance(one, CodeType)]
    return {*code.co_names, *code.co_freevars}.union(*map(_names, inner))
