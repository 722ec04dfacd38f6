"""`FitState`: state of a Lightning `Trainer` during `fit`, as `run.register` saves and restores it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loops.fit_loop import RestartStage
from lightning.pytorch.loops.loop import _Loop

from lockstep.integrations import process
from lockstep.integrations.lightning_metrics import StepMetrics

#: Attributes of Lightning's logger connector whose values are used in later batches.
_CONNECTOR = (
    "_progress_bar_metrics",
    "_logged_metrics",
    "_callback_metrics",
    "_current_fx",
    "_first_loop_iter",
)
#: Arguments of `self.log` that a logged value keeps.
_LOG = (
    "prog_bar",
    "logger",
    "on_step",
    "on_epoch",
    "enable_graph",
    "add_dataloader_idx",
    "metric_attribute",
)
#: Sums of a logged value over the batches of an epoch.
_SUMS = ("value", "cumulated_batch_size", "_forward_cache", "has_reset", "_update_count")


class FitState:
    """Saves and restores loops, callbacks, datamodule and logged values of a call of `Trainer.fit`.

    Paths of checkpoints are saved without their directory, which is no part of the result.
    """

    def __init__(self, trainer: Any, strategy: Any, metrics: StepMetrics, number: int) -> None:
        self._trainer, self._run, self._metrics = trainer, strategy.run, metrics
        self._loops: dict[str, Any] | None = None
        self._frozen: dict[str, Any] | None = None
        self._register_callbacks()
        self._fix_directories(f"lightning-{number}")

    def _register_callbacks(self) -> None:
        """Pass those callbacks to `run.register` whose `state_dict` the script, not Lightning, defines."""
        registered = self._run._session.state.registered
        for callback in self._trainer.callbacks:
            if _is_of_script(callback) and all(callback is not one for one in registered.values()):
                same = [name for name in registered if name.startswith(callback.state_key)]
                name = callback.state_key if not same else f"{callback.state_key}-{len(same) + 1}"
                self._run.register(name, callback)

    def _fix_directories(self, name: str) -> None:
        """Set the directory of each `ModelCheckpoint` to the directory from the run's first launch.

        By default the directory belongs to the logger, which makes a new one in each launch. `name`: name,
        without `.json`, of the file in the run's directory that keeps the directories.
        """
        callbacks = [c for c in self._trainer.callbacks if isinstance(c, ModelCheckpoint)]
        own = [None if c.dirpath is None else str(c.dirpath) for c in callbacks]
        first = process.first_value(self._run, name, own)
        for callback, directory in zip(callbacks, first, strict=False):
            callback.dirpath = directory
            # Files that were written after the saved state are written again, under the same names.
            callback._enable_version_counter = False

    # --- saving ----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state of loops, callbacks and datamodule, and the logged values."""
        if self._frozen is not None:
            return self._frozen
        trainer = self._trainer
        connector = trainer._logger_connector
        return {
            "loops": trainer.fit_loop.state_dict(),
            "should_stop": trainer.should_stop,
            "callbacks": [self._of(callback) for callback in trainer.callbacks],
            "logged": {name: copy.copy(getattr(connector, name)) for name in _CONNECTOR},
            "metrics": self._metrics.state_dict(),
            "results": {key: self._of_result(own) for key, own in self._results.items()},
            "hooks": self._hooks("on_save_checkpoint", {}),
            "datamodule": {} if trainer.datamodule is None else trainer.datamodule.state_dict(),
        }

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Context manager: inside it, `state_dict` returns the state from the start of the `with` block.

        The block surrounds the training on one batch, during which only some replicas have logged their
        values.
        """
        self._frozen = self.state_dict()
        yield
        self._frozen = None

    @property
    def _results(self) -> Any:
        return self._trainer.fit_loop.epoch_loop._results

    def _of(self, callback: Any) -> dict[str, Any]:
        state = {} if _is_of_script(callback) else callback.state_dict()
        if isinstance(callback, ModelCheckpoint):
            more = {"dirpath": None, "last_step": callback._last_global_step_saved}
            state = _renamed({**state, **more}, lambda path: Path(path).name)
        return dict(state)

    def _hooks(self, name: str, extra: dict[str, Any]) -> dict[str, Any]:
        """Call the hook `name` of all callbacks and the module; return the entries that they add.

        `name`: "on_save_checkpoint" or "on_load_checkpoint". `extra`: entries of the checkpoint besides the
        epoch, the step and the weights.
        """
        trainer = self._trainer
        module = trainer.lightning_module
        owners = [*trainer.callbacks, module]
        if all(getattr(type(one), name).__module__.startswith("lightning.") for one in owners):
            return {}
        own = {
            "epoch": trainer.current_epoch,
            "global_step": trainer.global_step,
            "state_dict": module.state_dict(),
        }
        checkpoint = {**own, **extra}
        for callback in trainer.callbacks:
            getattr(callback, name)(trainer, module, checkpoint)
        getattr(module, name)(checkpoint)
        return {key: value for key, value in checkpoint.items() if key not in own}

    # --- restoring -------------------------------------------------------------------------------------

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set loops, callbacks, datamodule and logged values to the state that `state_dict` returned."""
        trainer = self._trainer
        self._loops = state["loops"]
        self.restore_loops()
        trainer.should_stop = state["should_stop"]
        for callback, own in zip(trainer.callbacks, state["callbacks"], strict=False):
            if isinstance(callback, ModelCheckpoint):
                directory = Path(callback.dirpath or "")
                renamed = _renamed(own, lambda name, parent=directory: str(parent / name))
                callback.load_state_dict({**renamed, "dirpath": callback.dirpath})
                callback.current_score = own["current_score"]  # which it leaves out
                callback._last_global_step_saved = own["last_step"]
            elif own:
                callback.load_state_dict(own)
        for name, value in state["logged"].items():
            setattr(trainer._logger_connector, name, value)
        self._metrics.load_state_dict(state["metrics"])
        self._results.clear()
        for key, own in state["results"].items():
            self._restore_result(key, own)
        if trainer.datamodule is not None:
            trainer.datamodule.load_state_dict(state["datamodule"])
        self._hooks("on_load_checkpoint", state["hooks"])

    @staticmethod
    def _of_result(result: Any) -> dict[str, Any]:
        meta = result.meta
        sums = {name: getattr(result, name) for name in _SUMS if hasattr(result, name)}
        if not result.is_tensor:
            del sums["value"]  # the metric itself
        return {
            "fx": meta.fx,
            "name": meta.name,
            "reduce": meta.reduce_fx.__name__,
            "log": {name: getattr(meta, name) for name in _LOG},
            "sums": sums,
        }

    def _restore_result(self, key: str, own: dict[str, Any]) -> None:
        results = self._results
        name = own["log"]["metric_attribute"]
        metric = self._metrics.named().get(name)
        results.log(
            own["fx"],
            own["name"],
            torch.zeros((), device=own["sums"]["value"].device) if metric is None else metric,
            reduce_fx=getattr(torch, own["reduce"]),
            sync_dist_fn=self._trainer.strategy.reduce,
            batch_size=1,
            **own["log"],
        )
        for name, value in own["sums"].items():
            setattr(results[key], name, value)

    def restore_loops(self) -> None:
        """Set the counters of Lightning's loops to their values in the state that was loaded last."""
        assert self._loops is not None
        _load(self._trainer.fit_loop, self._loops)

    def restore_if_resumed(self, batches: Any) -> None:
        """If the run resumes, restore its state and continue after the last batch before the stop.

        `batches`: the `GlobalBatches` object that yields the global batches of `fit`.
        """
        if not self._run.is_replaying:
            return
        batches.resume()
        fit = self._trainer.fit_loop
        _Loop.restarting.fset(fit, False)  # type: ignore[attr-defined] # set by a checkpoint that the script loads
        if not fit.done:
            self._loops = fit.state_dict()
            fit._restart_stage = RestartStage.RESTARTED_MID_EPOCH
            batches.restore = self.restore_loops


def _is_of_script(callback: Any) -> bool:
    """Whether the script, and not Lightning, defines the `state_dict` method of a callback."""
    kind = type(callback)
    own = kind.state_dict.__module__
    return not own.startswith("lightning.")


def _load(loop: Any, state: dict[str, Any], prefix: str = "") -> None:
    """Load the counters of a Lightning loop, and of the loops in its attributes, from `state`.

    `prefix`: beginning of the keys of `loop` in `state`. Lightning's `load_state_dict` is not used, since
    it would also mark the loops as restarting.
    """
    loop._load_from_state_dict(state, prefix)
    for name, part in vars(loop).items():
        if isinstance(part, _Loop):
            _load(part, state, f"{prefix}{name}.")


def _renamed(state: Any, rename: Any) -> dict[str, Any]:
    """Return the state of a `ModelCheckpoint` with `rename(path)` in place of each path."""
    new = {k: rename(v) if k.endswith("_path") and v else v for k, v in state.items()}
    new["best_k_models"] = {rename(path): v for path, v in state["best_k_models"].items()}
    return new
