"""Assign a device to each local rank, from `--devices` and the devices of the machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lockstep.errors import DeviceError, UsageError
from lockstep.launch.devices.gpus import Gpu, fits, parts, visible
from lockstep.launch.devices.machine import Machine
from lockstep.launch.spec import LaunchSpec
from lockstep.world.devices_asked import CHOSEN, SHOWN, Ids, Word, parse


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDevice:
    """Device of one local rank, with the environment variables that select it."""

    device: str = "cpu"  # `cpu`, or `cuda:K`
    gpu: Gpu | None = None
    env: Mapping[str, str] = field(default_factory=dict, repr=False)


def asked(spec: LaunchSpec, environ: Mapping[str, str]) -> Word | Ids:
    """Return the requested devices, from `--devices` or its environment variable.

    The result is `auto`, `cpu` or `gpu`, or a tuple with an index or id of a GPU for each rank.

    Raises:
        UsageError: if the requested devices contradict `-n`.
    """
    origin, text = spec.settings.origin("devices"), spec.settings.value("devices", environ)
    wanted = parse(text or "auto", origin)
    if spec.n == "cpu" and wanted not in ("auto", "cpu") and origin == "--devices":
        raise UsageError(f"-n cpu and --devices {text} contradict each other", hint="choose one")
    if spec.n == "gpu" and wanted == "cpu":
        raise UsageError(
            "-n gpu and --devices cpu contradict each other", hint="choose one of them"
        )
    return "cpu" if spec.n == "cpu" else wanted


def ranks_without_looking(spec: LaunchSpec, environ: Mapping[str, str], cores: int) -> int | None:
    """Return the number of ranks that `-n` and `--devices` request, without listing GPUs.

    Returns `None` if this number depends on the number of GPUs. `cores` is the number of this machine's
    cores.
    """
    wanted = asked(spec, environ)
    if isinstance(wanted, tuple):
        return len(wanted)
    if isinstance(spec.n, int | None):
        return spec.n or 1
    return cores if wanted == "cpu" else None


def rank_devices(
    spec: LaunchSpec,
    machine: Machine,
    environ: Mapping[str, str],
    local_ranks: range,
    *,
    own: bool = False,
) -> tuple[RankDevice, ...]:
    """Return the devices of this launcher's ranks.

    `local_ranks` are the numbers of these ranks on their node. With `own`, a scheduler has given each
    launcher of the node its own GPUs, so the visible GPUs belong to this launcher's ranks alone. Otherwise
    all ranks of the node use the visible GPUs.

    Raises:
        DeviceError: if a requested GPU is missing or hidden.
    """
    wanted = asked(spec, environ)
    if isinstance(wanted, tuple):
        return _named(choose(spec, machine, environ), machine)
    if wanted == "cpu" or machine.gpus == 0:
        env = {"LOCKSTEP_DEVICES": "cpu"} if spec.n == "cpu" else {}
        return (RankDevice(env=env),) * len(local_ranks)
    left = visible(machine.cards, environ)
    split = any(parts(gpu, machine.cards) for gpu in left.gpus)
    known = left.gpus if left.ordered and not split else ()  # in the order of torch's indices
    shown = environ.get(machine.visible_variable)
    seen = {} if shown is None else {SHOWN: shown}
    return tuple(
        RankDevice(
            device=f"{machine.device_type}:{k}",
            gpu=known[k] if k < len(known) else None,
            # The device of other ranks follows from their local rank.
            env={CHOSEN: f"{machine.device_type}:{k}", **seen} if own else {},
        )
        for k in (range(len(local_ranks)) if own else local_ranks)
    )


def _named(gpus: Sequence[Gpu], machine: Machine) -> tuple[RankDevice, ...]:
    # CUDA shows a process a single MIG device: make only its own visible to each rank.
    alone = any(gpu.parent for gpu in gpus)
    everything, kind = ",".join(gpu.entry for gpu in gpus), machine.device_type
    found = []
    for k, gpu in enumerate(gpus):
        shown, device = (gpu.entry, f"{kind}:0") if alone else (everything, f"{kind}:{k}")
        env = {machine.visible_variable: shown, SHOWN: shown, CHOSEN: device}
        # A nested launch must not apply the list again to the remaining GPUs.
        found.append(RankDevice(device=device, gpu=gpu, env={**env, "LOCKSTEP_DEVICES": "gpu"}))
    return tuple(found)


def choose(spec: LaunchSpec, machine: Machine, environ: Mapping[str, str]) -> tuple[Gpu, ...]:
    """Return the GPUs that `--devices`, or its environment variable, names in a list.

    Raises:
        DeviceError: if a GPU is missing, hidden or named twice.
    """
    ids = asked(spec, environ)
    assert isinstance(ids, tuple), "called for a list only"
    if machine.gpus == 0 and not machine.cards:
        raise no_gpus(machine)
    search = _Search(spec.settings.origin("devices"), machine, environ)
    gpus = tuple(search.find(one) for one in ids)
    search.check(ids, gpus)
    return gpus


def no_gpus(machine: Machine) -> DeviceError:
    """Return the error for requested GPUs on a machine without GPUs."""
    why = f": {machine.problem}" if machine.problem else ""
    return DeviceError(
        f"GPUs were asked for, but torch sees none on this machine{why}",
        hint="--devices cpu and a number for -n run on the processor",
    )


class _Search:
    """Looks up GPUs by index or id for `--devices`."""

    def __init__(self, origin: str, machine: Machine, environ: Mapping[str, str]) -> None:
        self._origin = origin
        self._machine = machine
        self._everything = machine.cards
        self._hiding = environ.get(machine.visible_variable)
        self._left = visible(machine.cards, environ)

    def find(self, wanted: str) -> Gpu:
        """Return the GPU for one entry of `--devices`, an index or an id."""
        if not self._everything:
            return self._without_facts(wanted)
        return self._by_index(int(wanted)) if wanted.isdecimal() else self._by_id(wanted)

    def _without_facts(self, wanted: str) -> Gpu:
        """Return the GPU with index `wanted` if only the number of GPUs is known, as with ROCm."""
        if not wanted.isdecimal():
            raise self._error(f"{wanted} cannot be looked up: {self._machine.problem}")
        index = int(wanted)
        if index >= self._machine.gpus:
            raise self._error(f"there is no GPU {index}; torch sees {self._machine.gpus}")
        entries = [entry.strip() for entry in (self._hiding or "").split(",")]
        entry = entries[index] if self._hiding and index < len(entries) else wanted
        if entry.isdecimal():
            return Gpu(index=int(entry), label=f"GPU {entry}")
        return Gpu(index=index, label=f"GPU {index}", uuid=entry)

    def _by_index(self, index: int) -> Gpu:
        left = self._left.gpus
        if index >= len(left):
            physical = [one for one in self._everything if not one.parent and one.index == index]
            raise self._hidden(physical[0]) if physical else self._absent(f"GPU {index}")
        # Without CUDA_VISIBLE_DEVICES, indices are those of nvidia-smi.
        if self._hiding is not None and not self._left.ordered:
            raise self._error(
                f"{self._machine.visible_variable}={self._hiding} has indices that CUDA counts from "
                "the fastest GPU on, on a machine with several models",
                hint="export CUDA_DEVICE_ORDER=PCI_BUS_ID, or name GPUs by id: GPU-…",
            )
        return left[index]

    def _by_id(self, wanted: str) -> Gpu:
        found = fits(wanted, self._everything)
        if len(found) > 1:
            raise self._error(
                f"{wanted} fits {len(found)} GPUs: {_listed(found)}; expected an id that fits one"
            )
        if not found:
            raise self._absent(wanted)
        if not {found[0].uuid, found[0].parent} & {gpu.uuid for gpu in self._left.gpus}:
            raise self._hidden(found[0])
        return found[0]

    def check(self, ids: Sequence[str], gpus: Sequence[Gpu]) -> None:
        """Raise an error if `gpus` contradict each other, or one is split into MIG devices.

        GPUs contradict each other if one is named twice, or together with its MIG device. `ids` are the
        entries of `--devices` that name the GPUs.

        Raises:
            DeviceError: in these cases.
        """
        for k, gpu in enumerate(gpus):
            for j, other in enumerate(gpus[:k]):
                if other == gpu:
                    raise self._error(f"{gpu} is named twice: as {ids[j]} and as {ids[k]}")
                if gpu.uuid is not None and gpu.uuid == other.parent:
                    raise self._error(f"{other.short} is a part of {gpu}; expected one of them")
                if other.uuid is not None and other.uuid == gpu.parent:
                    raise self._error(f"{gpu.short} is a part of {other}; expected one of them")
        for gpu in gpus:
            split = () if gpu.parent else parts(gpu, self._everything)
            if split:
                raise self._error(
                    f"{gpu} is split into MIG devices; expected one of them: {_listed(split)}"
                )

    def _hidden(self, gpu: Gpu) -> DeviceError:
        left = _listed(self._left.gpus, numbered=True) or "none"
        return self._error(
            f"{gpu} is hidden by {self._machine.visible_variable}={self._hiding}, which leaves {left}",
            hint="indices count from 0 among what is left; or unset the variable",
        )

    def _absent(self, what: str) -> DeviceError:
        return self._error(f"there is no {what}; expected one of {_listed(self._everything)}")

    def _error(self, text: str, *, hint: str | None = None) -> DeviceError:
        return DeviceError(f"{self._origin}: {text}", hint=hint)


def _listed(gpus: Sequence[Gpu], *, numbered: bool = False) -> str:
    return "; ".join(f"{k} = {gpu}" if numbered else str(gpu) for k, gpu in enumerate(gpus))
