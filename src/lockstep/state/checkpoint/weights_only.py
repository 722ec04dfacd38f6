"""Read and write a model's `state_dict` as a file of `torch.save` or of safetensors."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lockstep.errors import CheckpointError, ModelError, UsageError, listed
from lockstep.state.checkpoint.parts import whole
from lockstep.state.files.atomic_file import replacing

if TYPE_CHECKING:
    from types import ModuleType

_TORCH = (".pt", ".pth", ".bin")
_SAFETENSORS = ".safetensors"
SUFFIXES = (*_TORCH, _SAFETENSORS)
#: Keys under which programs put the `state_dict` in a larger file.
_WRAPPERS = ("state_dict", "model_state_dict", "model")
#: Prefix that DataParallel and DistributedDataParallel add to every name.
_PREFIX = "module."
#: Number of differences that a message lists.
_LISTED = 5


def check_suffix(path: Path) -> None:
    """Raise an error unless `path` has a suffix of weights files, such as `.pt` or `.safetensors`.

    It is also an error if `path` ends in `.safetensors`, and that package is not installed.

    Raises:
        UsageError: naming the allowed suffixes, or the missing package.
    """
    if path.suffix not in SUFFIXES:
        raise UsageError(f"{path} has the suffix {path.suffix!r}; expected {', '.join(SUFFIXES)}")
    if path.suffix == _SAFETENSORS:
        _safetensors()


def read_weights(path: Path) -> dict[str, Tensor]:
    """Return the tensors in a file of weights by name, on the CPU, without the prefix `module.`.

    A file of torch may contain a `state_dict`, or a dictionary with one as `state_dict`, `model_state_dict`
    or `model`. Only tensors and plain values are unpickled.

    Raises:
        UsageError: if the suffix is not that of a weights file.
        CheckpointError: if the file cannot be read, or contains no weights.
    """
    check_suffix(path)
    if not path.is_file():
        raise CheckpointError(f"the weights {path} are not there; expected a file")
    state = _unwrapped(path, _read(path))
    if state and all(name.startswith(_PREFIX) for name in state):
        return {name.removeprefix(_PREFIX): tensor for name, tensor in state.items()}
    return state


def write_weights(path: Path, state: Mapping[str, Any], *, here: bool = True) -> None:
    """Write a `state_dict` to a file, atomically.

    If tensors are sharded over ranks, all ranks call this function, and gather one tensor after the other.
    Only the rank that passes `here=True` keeps the gathered tensors and writes the file. A safetensors file
    contains tensors alone; a file of torch has all values of the `state_dict`.

    Raises:
        UsageError: if the suffix is not that of a weights file.
        CheckpointError: if the file cannot be written.
    """
    check_suffix(path)
    tensors: dict[str, Any] = {}
    for name, value in state.items():
        gathered = whole(value)
        if here:
            tensors[name] = gathered.cpu() if isinstance(gathered, Tensor) else gathered
    if not here:
        return
    try:
        with replacing(path) as file:
            _write(file, tensors, safe=path.suffix == _SAFETENSORS)
    except (OSError, RuntimeError) as error:
        cause = error if isinstance(error, OSError) else error.__context__
        reason = cause.strerror if isinstance(cause, OSError) else None
        raise CheckpointError(f"{path} cannot be written: {reason or error}") from error


def check_fit(model: str, state: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
    """Raise an error unless `weights` have exactly the tensor names and shapes of `state`.

    `state` is the `state_dict` of a model, and `model` the model's name in the message.

    Raises:
        ModelError: naming missing and unexpected names, and names with a different shape.
    """
    own = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    problems = [
        *_listed("missing", [name for name in own if name not in weights]),
        *_listed("unexpected", [name for name in weights if name not in own]),
        *_listed(
            "of a different shape",
            [
                f"{name} ({tuple(weights[name].shape)}, expected {tuple(tensor.shape)})"
                for name, tensor in own.items()
                if name in weights and weights[name].shape != tensor.shape
            ],
        ),
    ]
    if problems:
        raise ModelError(
            f"the weights don't fit {model}: " + "; ".join(problems),
            hint="the file is of another model, or of another version of it",
        )


def _listed(what: str, names: list[str]) -> list[str]:
    return [f"{what}: {listed(names, _LISTED)}"] if names else []


def _write(file: Any, tensors: dict[str, Any], *, safe: bool) -> None:
    if not safe:
        torch.save(tensors, file)
        return
    # The format has neither strides nor tensors that share memory.
    apart = {
        name: tensor.clone(memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
        if isinstance(tensor, Tensor)
    }
    file.write(_safetensors().save(apart, metadata={"format": "pt"}))


def _read(path: Path) -> Any:
    try:
        if path.suffix == _SAFETENSORS:
            return _read_safetensors(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} is not weights-only, it contains pickled objects: {str(error).splitlines()[0]}",
            hint="save a state_dict; objects of Python are not read, since they could be programs",
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, zipfile.BadZipFile) as error:
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        raise CheckpointError(f"the weights {path} cannot be read: {reason}") from error


def _read_safetensors(path: Path) -> Any:
    import safetensors

    try:
        return _safetensors().load_file(path)
    except safetensors.SafetensorError as error:
        raise ValueError(error) from error


def _unwrapped(path: Path, loaded: Any) -> dict[str, Tensor]:
    while isinstance(loaded, Mapping) and (
        inner := next((key for key in _WRAPPERS if isinstance(loaded.get(key), Mapping)), None)
    ):
        loaded = loaded[inner]
    if isinstance(loaded, Mapping) and all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in loaded.items()
    ):
        return dict(loaded)
    raise CheckpointError(
        f"{path} holds no weights; expected tensors by name, alone or as {', '.join(_WRAPPERS)}",
        hint="save model.state_dict()",
    )


def _safetensors() -> ModuleType:
    try:
        import safetensors.torch
    except ImportError as error:
        raise UsageError(
            f"safetensors cannot be imported: {error}",
            hint="pip install 'torch-lockstep[safetensors]', or a file that ends in .pt",
        ) from error
    return safetensors.torch
