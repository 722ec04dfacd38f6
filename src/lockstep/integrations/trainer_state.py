"""State of a `transformers.Trainer`, in a form that `run.register` saves and restores with the run."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from transformers.trainer_callback import ExportableState, TrainerState

#: Fields of `TrainerState` that belong to one process or one launch, and are not saved.
_OF_PROCESS = (
    *("is_local_process_zero", "is_world_process_zero", "trial_name", "trial_params"),
    "stateful_callbacks",  # only the main rank sets it; callbacks are saved separately
)
#: Ends of names of logged values that are times; they differ from launch to launch.
_TIMES = ("_runtime", "_per_second")
#: Attributes of Trainer and TRL's trainers that change in each step, and are saved.
_CARRIED = ("_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step", "current_flos")
_CARRIED_BY_TRL = ("_metrics", "_total_train_tokens")
#: Attributes of a trainer that are not lost in a crash: saved here, or computed again.
KEPT = frozenset({*_CARRIED, *_CARRIED_BY_TRL, "_tr_loss", "_weight"})


class TrainingProgress:
    """Saves and restores the state, callbacks and running sums of a `transformers.Trainer`, as text.

    Logged times are left out, since they differ from launch to launch.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.first_step = 0
        self.latest: list[float | None] = [None, None]  # norm of gradients, learning rate

    def state_dict(self) -> dict[str, str]:
        """Return a dict whose one value is the trainer's state as JSON, in which floats are exact."""
        trainer = self._trainer
        names = [name for name in (*_CARRIED, *_CARRIED_BY_TRL) if hasattr(trainer, name)]
        state = dataclasses.asdict(trainer.state)
        for name in _OF_PROCESS:
            del state[name]
        if state["best_model_checkpoint"] is not None:
            state["best_model_checkpoint"] = Path(state["best_model_checkpoint"]).name
        state["log_history"] = [_without_times(entry) for entry in state["log_history"]]
        values = {
            "state": state,
            "control": dataclasses.asdict(trainer.control),
            "callbacks": [_plain(callback) for callback in trainer.callback_handler.callbacks],
            "carried": {name: getattr(trainer, name) for name in names},
            "loss": float(trainer._tr_loss),
            "first_step": self.first_step,
            "latest": self.latest,
        }
        return {"json": json.dumps(values)}

    def load_state_dict(self, state: dict[str, str]) -> None:
        """Set the trainer's attributes to the values that `state_dict` returned."""
        trainer, values = self._trainer, json.loads(state["json"])
        own = {name: getattr(trainer.state, name) for name in _OF_PROCESS}
        trainer.state = TrainerState(**own, **values["state"])
        best = trainer.state.best_model_checkpoint
        if best is not None:
            trainer.state.best_model_checkpoint = str(Path(trainer.args.output_dir, best))
        for name, value in values["control"].items():
            setattr(trainer.control, name, value)
        for callback, plain in zip(
            trainer.callback_handler.callbacks, values["callbacks"], strict=False
        ):
            vars(callback).update(plain)
        for name, value in values["carried"].items():
            _restore(trainer, name, value)
        trainer._tr_loss = torch.tensor(values["loss"], dtype=torch.float64)
        self.first_step, self.latest = values["first_step"], values["latest"]


def _without_times(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if not name.endswith(_TIMES)}


def _plain(callback: Any) -> dict[str, Any]:
    """Return a callback's attributes that are numbers, text, `None` or containers of these.

    Empty for a callback of transformers itself, unless the callback is an `ExportableState`.
    """
    is_own = type(callback).__module__.startswith("transformers.")
    if is_own and not isinstance(callback, ExportableState):
        return {}  # the process's own: whether a logger has begun, the progress bar
    return {name: value for name, value in vars(callback).items() if _is_plain(value)}


def _is_plain(value: object) -> bool:
    if isinstance(value, list):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(k, str) and _is_plain(v) for k, v in value.items())
    return value is None or type(value) in (bool, int, float, str)


def _restore(trainer: Any, name: str, value: Any) -> None:
    own = getattr(trainer, name, None)
    if not isinstance(own, dict):
        setattr(trainer, name, value)
        return
    for key, part in value.items():  # TRL's metrics: lists in dictionaries with defaults
        own[key].clear()
        own[key].update(part)
