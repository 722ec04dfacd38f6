"""Run the user's script or module as `__main__`, as `python` does."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

from lockstep.errors import ScriptNotFoundError


def check(kind: str, target: str) -> None:
    """Refuse a script that is no file, and a program that cannot be found; modules are found by workers.

    Raises:
        ScriptNotFoundError: if it is not there.
    """
    if kind == "script":
        check_script(target)
    elif kind == "program" and shutil.which(target) is None:
        raise ScriptNotFoundError(
            f"the program {target} is not there, or may not be executed; expected one on PATH or a path",
            hint="a Python script needs no --no-python",
        )


def check_script(target: str) -> None:
    """Raise `ScriptNotFoundError` for a script that is not there, or is a directory."""
    path = Path(target)
    if path.is_file():
        return
    what = "is a directory" if path.is_dir() else "does not exist"
    raise ScriptNotFoundError(
        f"the script {target} {what}; expected a Python file",
        hint="-m runs a module by its name",
    )


def run_script(path: str, args: list[str]) -> None:
    """Run the file `path` as `python path args` would.

    Raises:
        ScriptNotFoundError: if it cannot be read.
    """
    _set_path(str(Path(path).resolve().parent))
    sys.argv[:] = [path, *args]
    absolute = str(Path(path).absolute())
    module = _fresh_main()
    module.__file__ = absolute
    module.__loader__ = SourceFileLoader("__main__", absolute)
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise ScriptNotFoundError(f"{path} cannot be read: {error.strerror}") from None
    _execute(compile(text, absolute, "exec", dont_inherit=True), module)


def run_module(name: str, args: list[str]) -> None:
    """Run the module `name` as `python -m name args` would.

    Raises:
        ScriptNotFoundError: if there is no such module, or it cannot be run.
    """
    _set_path(str(Path.cwd()))
    sys.argv[:] = ["-m", *args]
    spec = _find(name)
    if spec.submodule_search_locations is not None:
        spec = _find(f"{name}.__main__")
    code = spec.loader.get_code(spec.name) if isinstance(spec.loader, SourceFileLoader) else None
    if code is None:
        raise ScriptNotFoundError(f"module {name!r} has no source that could be run")
    module = _fresh_main()
    module.__file__ = spec.origin
    module.__spec__ = spec
    module.__loader__ = spec.loader
    module.__package__ = spec.parent
    sys.argv[0] = spec.origin or name
    _execute(code, module)


def _execute(code: CodeType, module: ModuleType) -> None:
    exec(code, module.__dict__)  # noqa: S102 - running the user's code is what a launcher is for


def _set_path(directory: str) -> None:
    # `python -P` and PYTHONSAFEPATH: the interpreter put no directory in front, so none is replaced.
    if sys.flags.safe_path:
        return
    sys.path[:1] = [directory]


def _fresh_main() -> ModuleType:
    """Return a new `__main__`, leaving the launcher's own alive."""
    module = ModuleType("__main__")
    module.__dict__["__builtins__"] = sys.modules["builtins"]
    module.__annotations__ = {}
    sys.modules["__lockstep_main__"] = sys.modules["__main__"]
    sys.modules["__main__"] = module
    return module


def _find(name: str) -> ModuleSpec:
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        # An import that fails inside the user's own package is the user's error, not a missing target.
        if error.name is None or not name.startswith(error.name):
            raise
        spec = None
    if spec is None:
        raise ScriptNotFoundError(
            f"there is no module {name!r}",
            hint="-m takes a module's name, without -m a file is run",
        )
    return spec
