"""`Trainer` of transformers on a `lockstep.Run`: the same weights, logs and evaluations on every layout.

`Trainer(…, replicas=8)` trains on global batches of `per_device_train_batch_size` x 8 samples, times
`gradient_accumulation_steps`, on any number of processes. `LockstepTrainer` is a mixin for subclasses:
`class MyTrainer(LockstepTrainer, SFTTrainer)`.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
import transformers
from torch.optim import lr_scheduler
from transformers.trainer_utils import (
    EvalLoopOutput,
    EvalPrediction,
    denumpify_detensorize,
    get_last_checkpoint,
    has_length,
)

from lockstep.engine.training.columns import of_all
from lockstep.integrations import alone, process, refusals
from lockstep.integrations.loaders import global_loader
from lockstep.integrations.process import refuse
from lockstep.integrations.rows import pack, unpack
from lockstep.integrations.trainer_state import KEPT, TrainingProgress
from lockstep.integrations.trl_metrics import ListedMetrics
from lockstep.run import Run

alone.see_alone()


class LockstepTrainer:
    """Mixin that lets a `transformers.Trainer`, or a subclass of it, train through a run.

    Args:
        replicas: number of logical data-parallel workers, each with batches of
            `per_device_train_batch_size`; by default the number of processes of the first launch.

    Raises:
        UsageError: for an option that would make the result depend on the layout.
    """

    _kept_by_run = KEPT  # attributes of which no warning says that a crash loses them
    _run: Run
    _progress: TrainingProgress

    def __init__(self, *args: Any, replicas: int | None = None, **kwargs: Any) -> None:
        self._asked_replicas = replicas
        self._prepared: list[Any] = []  # models and optimizers of the run
        self._shared_entries = 0  # entries of the log that all ranks have
        refusals.check_trainer(type(self))
        super().__init__(*args, **kwargs)

    @property
    def _me(self) -> Any:
        return self  # as the Trainer that it is mixed into

    # --- what the Trainer is made of -----------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        """Open a `lockstep.Run`; make the trainer's accelerator, whose methods then call the run."""
        args = self._me.args
        refusals.check_arguments(args)
        replicas = process.replicas_of(self._asked_replicas, args.gradient_accumulation_steps)
        precision = "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32"
        devices = "cpu" if args.use_cpu else "auto"
        self._run = process.current.open(
            seed=args.seed, replicas=replicas, precision=precision, devices=devices
        )
        process.current.before_end.append(self._share_log)
        vars(args)["_setup_devices"], args._n_gpu = self._run.device, 1  # as cached_property does
        transformers.set_seed(args.seed)
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        accelerator = self._me.accelerator
        accelerator.backward = self._backward
        accelerator.clip_grad_norm_ = self._run.clip_grad_norm_
        # Training and evaluation make different loaders of the run from a DataLoader.
        accelerator.prepare_data_loader = lambda data, *_, **__: data
        # It is called for models that do not train, such as a reference model.
        accelerator.prepare_model = lambda model, *_, **__: model.to(self._run.device)

    def _is_new(self, value: Any) -> bool:
        """Return whether `value`, a model or optimizer, is new to the run; record it as known."""
        is_new = all(value is not known for known in self._prepared)
        self._prepared += [value] if is_new else []
        return is_new

    def _prepare_model(self) -> Any:
        if self._is_new(self._me.model):
            self._me.model_wrapped = self._run.model(self._me.model)
        return self._me.model_wrapped

    def _prepare(self, max_steps: int, checkpoint: str | None) -> Any:
        """Make optimizer and scheduler; pass them and the model to the run; return the wrapped model.

        `max_steps`: number of optimizer steps of the training, for the scheduler. `checkpoint`: directory
        of a checkpoint from which optimizer and scheduler are loaded, or `None`.
        """
        me, run = self._me, self._run
        me.create_optimizer()
        me.lr_scheduler = None if me._created_lr_scheduler else me.lr_scheduler
        me.create_scheduler(num_training_steps=max_steps)
        if checkpoint is not None:
            me._load_optimizer_and_scheduler(checkpoint)
        model = self._prepare_model()
        if self._is_new(me.optimizer):
            run.optimizer(me.optimizer)
        run.scheduler(me.lr_scheduler)
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(me.callback_handler, name, getattr(me, name))
        return model

    def get_total_train_batch_size(self, args: Any) -> int:
        """Return the number of samples in a global batch, which makes one optimizer step."""
        return int(args.per_device_train_batch_size * self._run.replicas)

    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        """Return the numbers of epochs, steps and samples that transformers computes for a training.

        One batch of `dataloader`, a global batch, makes one step, also if gradients are accumulated.
        """
        at_once = copy.copy(args)
        at_once.gradient_accumulation_steps = 1
        return super().set_initial_training_values(at_once, dataloader)  # type: ignore[misc]

    def end(self) -> None:
        """End the run now; otherwise it ends when the script ends."""
        process.current.end()

    # --- training ------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, **rest: Any) -> Any:
        """Train as transformers does; a restarted run loads the same checkpoint as its first launch did.

        So `resume_from_checkpoint=True` never loads a checkpoint that the run itself has written.
        """
        run = self._run
        self._share_log()
        if resume_from_checkpoint is True and run.is_main_process:
            newest = get_last_checkpoint(self._me.args.output_dir)  # type: ignore[no-untyped-call]
            resume_from_checkpoint = newest or True
        self._trainings = getattr(run, "trainings", 0) + 1
        run.trainings = self._trainings  # type: ignore[attr-defined]
        name = f"trainer-{self._trainings}"
        first = process.first_value(run, name, resume_from_checkpoint or None)
        # The state that a run restores replaces all of what a checkpoint has.
        result = super().train(None if run.is_replaying else first, **rest)  # type: ignore[misc]
        run.barrier()  # the main rank may still write a checkpoint
        return result

    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: Any = None,
        resume_from_checkpoint: str | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        me, run = self._me, self._run
        loader = global_loader(run, me.get_train_dataloader())
        if resume_from_checkpoint is not None and not has_length(loader):
            refuse(
                "resume_from_checkpoint with an IterableDataset", "--run-dir, which continues a run"
            )
        epochs, per_epoch, _, samples, _, _, max_steps = me.set_initial_training_values(
            me.args, loader
        )
        me._init_training_state(max_steps, per_epoch, epochs, resume_from_checkpoint, trial)
        model = self._prepare(max_steps, resume_from_checkpoint)
        me.callback_handler.train_dataloader = loader
        started = time.time()
        me._initial_num_input_tokens_seen = me.state.num_input_tokens_seen
        me._initial_global_step = me._globalstep_last_logged = me.state.global_step
        me._tr_loss = torch.zeros((), dtype=torch.float64)
        me._total_loss_scalar = 0.0
        self._register(per_epoch)
        me.control = me.callback_handler.on_train_begin(me.args, me.state, me.control)
        if me.args.eval_on_start and not run.is_replaying:
            me._evaluate(trial, ignore_keys_for_eval, skip_scheduler=True)

        def report(epoch: int) -> None:
            norm, rate = self._progress.latest
            asked = (me._tr_loss, norm, model, trial, epoch, ignore_keys_for_eval, started)
            me._maybe_log_save_evaluate(*asked, learning_rate=rate)

        for epoch in run.epochs(epochs):
            self._run_global_batches(epoch, per_epoch, model, loader, report)
            if me.control.should_training_stop:
                break
        return me._finalize_training(trial, samples, started)

    def _register(self, per_epoch: int) -> None:
        """Pass the trainer's state to `run.register`; record the number of steps in the loaded checkpoint.

        `per_epoch`: number of global batches of an epoch. With `ignore_data_skip` only whole epochs count.
        """
        me, run = self._me, self._run
        self._progress = TrainingProgress(self)
        done = me.state.global_step
        if me.args.ignore_data_skip:
            done -= done % per_epoch
        self._progress.first_step = done
        run.register(
            "trainer" if self._trainings == 1 else f"trainer-{self._trainings}", self._progress
        )

    def _run_global_batches(
        self, epoch: int, per_epoch: int, model: Any, loader: Any, report: Any
    ) -> None:
        """Train on an epoch's global batches, except those that came before the loaded checkpoint.

        `per_epoch`: number of global batches of an epoch. `report`: called with `epoch` after each update
        and at the end of the epoch; logs, evaluates and saves if due.
        """
        me, run, progress = self._me, self._run, self._progress
        # Whether the checkpoint that was loaded has all of this epoch.
        is_done = (epoch + 1) * per_epoch <= progress.first_step
        if not (run.is_replaying or is_done):
            me.control = me.callback_handler.on_epoch_begin(me.args, me.state, me.control)
        model.train()
        for batch in run.batches(loader):
            if is_done:
                break
            if run.is_replaying or epoch * per_epoch + batch.index < progress.first_step:
                continue
            me.control = me.callback_handler.on_step_begin(me.args, me.state, me.control)
            self._update(model, batch)
            me.state.global_step += 1
            me.state.epoch = epoch + (run.batch_index + 1) / per_epoch
            me.control = me.callback_handler.on_step_end(me.args, me.state, me.control)
            report(epoch)
            if me.control.should_epoch_stop or me.control.should_training_stop:
                break
        if not (run.is_replaying or is_done):
            me.control = me.callback_handler.on_epoch_end(me.args, me.state, me.control)
            report(epoch)

    def _update(self, model: Any, batch: Iterable[Any]) -> None:
        """Train on one global batch, and add its loss to the sum for the trainer's next log entry."""
        me = self._me
        sums = self._run.sum(self._train_microbatches(model, batch), per_sample=False)
        loss = sums["loss"] / sums["weight"]
        if me.args.logging_nan_inf_filter and not np.isfinite(loss):
            loss = float(me._tr_loss) / (1 + me.state.global_step - me._globalstep_last_logged)
        me._tr_loss += loss
        me.current_flos += sums["flos"]
        me.state.num_input_tokens_seen += sums["tokens"]
        ListedMetrics(me, "train").add(sums)

    def _train_microbatches(self, model: Any, batch: Iterable[Any]) -> Iterator[dict[str, Any]]:
        """Train on this rank's microbatches; yield a dictionary for each microbatch, for `run.sum`.

        The dictionary has the loss, its weight, metrics, and numbers of tokens and floating-point
        operations.
        """
        me, run = self._me, self._run
        for inputs in batch:
            metrics, seen = ListedMetrics(me, "train"), me.state.num_input_tokens_seen
            me._track_num_input_tokens(inputs)
            tokens, me.state.num_input_tokens_seen = me.state.num_input_tokens_seen - seen, seen
            flos = float(me.floating_point_ops(inputs))
            self._weight = me._get_num_items_in_batch([inputs], me.args.device)
            me.current_gradient_accumulation_steps = 1
            loss = me.training_step(model, inputs, self._weight)
            if run.sync_gradients:
                self._before_step(model)
            me.optimizer.step()
            if run.sync_gradients:
                self._after_step()
            me.optimizer.zero_grad()
            rows = run.batch_rows.stop - run.batch_rows.start
            weight = 0.0 if not rows else float(rows if self._weight is None else self._weight)
            summed = float(loss) * weight if weight else 0.0
            yield {
                **metrics.taken(weight),
                "loss": summed,
                "weight": weight,
                "tokens": tokens,
                "flos": flos,
            }

    def _backward(self, loss: torch.Tensor, **_: Any) -> None:
        self._run.backward(loss, weight=self._weight)

    def _before_step(self, model: Any) -> None:
        me = self._me
        norm = me._clip_grad_norm(model) if me.args.max_grad_norm > 0 else None
        self._progress.latest[0] = float(me._get_grad_norm(model, grad_norm=norm))
        me.control = me.callback_handler.on_pre_optimizer_step(me.args, me.state, me.control)

    def _after_step(self) -> None:
        me = self._me
        me.control = me.callback_handler.on_optimizer_step(me.args, me.state, me.control)
        self._progress.latest[1] = me._get_learning_rate()
        plateau = lr_scheduler.ReduceLROnPlateau
        newer = getattr(transformers.optimization, "GreedyLR", plateau)  # not in transformers 5.3
        if not isinstance(me.lr_scheduler, (plateau, newer)):  # those step after an evaluation
            me.lr_scheduler.step()

    # --- evaluation ------------------------------------------------------------------------------------

    def _evaluate(self, *args: Any, **kwargs: Any) -> Any:
        metrics = super()._evaluate(*args, **kwargs)  # type: ignore[misc]
        self._share_log()
        return metrics

    def _share_log(self) -> None:
        """Copy the main rank's new log entries to all ranks; a subclass may log on the main rank alone."""
        history, known = self._me.state.log_history, self._shared_entries
        texts = of_all(json.dumps(history[known:]), self._run._session.context.group)
        history[known:] = json.loads(texts[0])
        self._shared_entries = len(history)

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Evaluate each sample once; on every rank, return all predictions in the order of the dataset."""
        me, args = self._me, self._me.args
        only_loss = (
            args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        )
        model, loader = self._prepare_model(), global_loader(self._run, dataloader, complete=True)
        me.callback_handler.eval_dataloader = dataloader
        model.eval()
        if callable(getattr(me.optimizer, "eval", None)):
            me.optimizer.eval()
        seen = _Seen()
        rows = self._run.gather(
            self._predictions(model, loader, seen, only_loss, ignore_keys), pad=0
        )
        loader.close()
        floats, (logits, labels, inputs) = unpack(rows, len(seen.names), seen.like)
        losses = floats[:, 0] if seen.has_loss else None
        means = dict(zip(seen.names, floats.mean(axis=0).tolist(), strict=True))
        ListedMetrics(me, "eval").add({**means, "weight": 1.0})
        metrics = self._metrics_of(logits, labels, inputs, losses)
        if losses is not None:
            finite = np.isfinite(losses)
            if args.logging_nan_inf_filter and finite.any():
                losses = losses[finite]
            metrics["loss"] = losses.mean().item()
        prefix = f"{metric_key_prefix}_"
        named = {k if k.startswith(prefix) else prefix + k: v for k, v in metrics.items()}
        return EvalLoopOutput(logits, labels, named, len(rows))

    def _predictions(
        self, model: Any, loader: Any, seen: _Seen, only_loss: bool, ignore_keys: list[str] | None
    ) -> Iterator[torch.Tensor]:
        """Yield, for each microbatch, its losses, metrics and predictions as one row of bytes per sample.

        Fills `seen` with the names of loss and metrics and the predictions' structure, to decode the rows.
        """
        me, included = self._me, self._me.args.include_for_metrics
        for inputs in loader:
            metrics = ListedMetrics(me, "eval")
            shown = None
            if "inputs" in included:
                shown = me._prepare_input(inputs[getattr(me.model, "main_input_name", "input_ids")])
            own = self._run.batch_rows
            rows = max(1, own.stop - own.start)  # a stand-in repeats one sample
            loss, logits, labels = me.prediction_step(
                model, inputs, only_loss, ignore_keys=ignore_keys
            )
            if logits is not None and me.preprocess_logits_for_metrics is not None:
                logits = me.preprocess_logits_for_metrics(logits, labels)
            values = metrics.taken(1.0)
            seen.names, seen.has_loss = ["loss", *values], loss is not None
            seen.like = (logits, labels, shown)
            mean = float("nan") if loss is None else float(loss)
            me.control = me.callback_handler.on_prediction_step(me.args, me.state, me.control)
            yield pack([mean, *values.values()], seen.like, rows)

    def _metrics_of(self, logits: Any, labels: Any, inputs: Any, losses: Any) -> dict[str, Any]:
        me, included = self._me, self._me.args.include_for_metrics
        if me.compute_metrics is None or logits is None or labels is None:
            return {}
        extra = {
            "losses": losses if "loss" in included else None,
            "inputs": inputs if "inputs" in included else None,
        }
        predicted = EvalPrediction(predictions=logits, label_ids=labels, **extra)
        metrics: dict[str, Any] = denumpify_detensorize(me.compute_metrics(predicted))  # type: ignore[no-untyped-call]
        return metrics

    # --- files -----------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model to `output_dir`, on the main rank only."""
        super().save_model(output_dir, _internal_call=_internal_call)  # type: ignore[misc]
        if _internal_call:  # all ranks look for the directory next
            self._run.barrier()

    def _save_rng_state(self, output_dir: str) -> None:
        if self._me.args.should_save:
            super()._save_rng_state(output_dir)  # type: ignore[misc]

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Do nothing: the run derives random numbers from seed, epoch and batch, not from a checkpoint."""

    def hyperparameter_search(self, *_: Any, **__: Any) -> None:
        """Raise a `UsageError`: each trial of a search would need a run of its own."""
        refuse("hyperparameter_search", "one script per trial, each with its own --run-dir")


class Trainer(LockstepTrainer, transformers.Trainer):  # type: ignore[misc]
    """`transformers.Trainer` that trains through a `lockstep.Run`; `replicas` is an additional argument."""


class _Seen:
    """Data to decode an evaluation's gathered rows: names of metrics, and structure of predictions."""

    def __init__(self) -> None:
        self.names: list[str] = ["loss"]
        self.like: Any = (None, None, None)
        self.has_loss = False
