"""`lockstep.Run`: the object through which a script makes its models, optimizers and loaders."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from lockstep.engine.data.fetch import Collate
from lockstep.engine.data.loader import GlobalBatch, Loader
from lockstep.engine.training import optimizers
from lockstep.engine.training.batchnorm import synchronise
from lockstep.engine.training.epochs import epochs_left
from lockstep.engine.training.run_metrics import RunMetrics
from lockstep.engine.training.session import Session, explained, show_plainly
from lockstep.engine.training.step_values import StepValues
from lockstep.errors import UsageError
from lockstep.settings import OF_SCRIPTS, Settings, from_environment
from lockstep.state.checkpoint import weights_only
from lockstep.world.environments import given

OptimizerT = TypeVar("OptimizerT", bound=Optimizer)
SchedulerT = TypeVar("SchedulerT")
ModelT = TypeVar("ModelT", bound=nn.Module)


class Run(RunMetrics):
    """A training run whose result does not depend on its layout.

    Use it as a context manager, and make models, optimizers and loaders through it.

    Args:
        name: name of the run, and of its directory in `runs/`; without `/`.
        seed: seed of all random numbers: initial weights, order of samples, dropout, augmentation.
        replicas: number of logical data-parallel workers, at least one per rank; by default one per rank.
        exact: refuse settings and calls that make the result depend on the layout.
        strategy: distribution of models: `auto`, `single`, `ddp`, `dp`, `ps`, `fsdp`, `pipeline`, `tensor`.
            With `exact=False` also `local-sgd` and `diloco`, which average parameters every `sync_every`
            steps.
        exchange: algorithm that sums gradients over ranks: `shared-memory`, `tree`, `native`, `mpi`, or
            `auto`, the fastest exact one of the first three; `server` belongs to strategy `ps`. With
            `exact=False` also `bf16`, `fp16` and `powersgd`, which compress gradients.
        sync_every: steps between two averages of the parameters, with `local-sgd` (default 16) and
            `diloco` (default 50).
        mesh: `DATAxMODEL`, such as `2x2`: number of copies of the model, and of ranks that hold one copy.
        staleness: number of updates by which the parameters lag when gradients are computed, the same on
            every layout; with strategy `ps`, the servers then run the optimizer.
        precision: `fp32`; `bf16` or `fp16` run forward passes under autocast; `fp16` scales the loss.
        devices: `cpu`, `gpu`, `auto`, or a list of indices such as `2,3`, one for each rank of a node.
        threads: intra-op threads per process; by default the cores divided by the replicas.
        run_dir: directory of the run; by default `runs/NAME/TIME`.
        progress: show a progress bar, or lines, on the main rank.
        stop_on_nan: check every loss, and stop at the first that is not finite.
        audit: steps between two audits, which compute a microbatch twice and compare the bits; `first`
            audits only the first batch of loops, `off` none. No effect with one replica, or exact=False.
        checkpoint_every: seconds between periodic checkpoints, beside those of `save`; 0 for none.
        keep: number of latest checkpoints to keep, beside the best.
        anchors: steps between two anchors, checkpoints that are kept for `lockstep replay`; 0 for none.
        anchors_gb: gigabytes of anchors; beyond that every second one is removed.
        hash_every: record each loss, and hashes of gradients and parameters every `hash_every` steps, for
            `lockstep replay`; 0 records neither. By default it takes less than 1 % of steps of 100 ms.
        loggers: `tensorboard`, `wandb`, `mlflow` or objects with `log(values, step)`, for `run.log`.
        init_method: rendezvous of the ranks, in place of that of the environment:
            `tcp://host:port`, `file:///shared/path` or `env://`.
        rank: rank of this process; given with `world_size`, or not at all.
        world_size: number of processes.
        store: a `torch.distributed` store of the script, the same on all ranks.

    The environment variable `LOCKSTEP_` plus the name of an argument wins over the argument; `name`,
    `rank`, `world_size` and `store` have no such variable.

    Raises:
        UsageError: if a setting is invalid, or there are more ranks than replicas.
        WorldError: if variables of the environment contradict each other, or the rendezvous fails.
        DeviceError: if there are not enough devices.
        RunDirectoryError: if the directory cannot be used.
    """

    def __init__(
        self,
        name: str,
        *,
        seed: int = 0,
        replicas: int | None = None,
        exact: bool = True,
        strategy: str = "auto",
        exchange: str = "auto",
        precision: str = "fp32",
        mesh: str | None = None,
        sync_every: int | None = None,
        staleness: int | None = None,
        devices: str = "auto",
        threads: int | None = None,
        run_dir: str | Path | None = None,
        progress: bool = True,
        stop_on_nan: bool = False,
        audit: str = "1024",
        checkpoint_every: float = 600.0,
        keep: int = 3,
        anchors: int = 0,
        anchors_gb: float = 10.0,
        hash_every: int | None = None,
        loggers: Sequence[Any] = (),
        init_method: str | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        store: dist.Store | None = None,
    ) -> None:
        # OF_SCRIPTS names the arguments that are settings; the remaining ones are for the rendezvous.
        run_dir = None if run_dir is None else Path(run_dir)
        values = {**locals(), "loggers": tuple(loggers)}
        show_plainly()
        settings = Settings(name=name, **{setting: values[setting] for setting in OF_SCRIPTS})
        world = given(init_method, rank, world_size, has_store=store is not None)
        self._session = Session(from_environment(settings), world, store)
        self._digest: str | None = None
        self._step_values = StepValues(
            self._session.loop, self._session.state.optimizers, self._session.context.record.warn
        )

    def __enter__(self) -> Self:
        self._begin_once()
        self._session.open()
        return self

    def __exit__(
        self, kind: object, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # sys.exit(0) ends the run as the end of the block does.
        if error is not None and not (isinstance(error, SystemExit) and not error.code):
            explanation = explained(error, self._session.state.models)
            self._session.close(explanation or error)
            if explanation is not None:
                raise explanation.with_traceback(traceback) from error
            return
        try:
            self._digest = self._session.finish()
        except BaseException as late:
            self._session.close(late)
            raise
        self._session.close(None)

    # --- what is trained -------------------------------------------------------------------------

    @overload
    def model(self, module: ModelT, **settings: Any) -> ModelT: ...

    @overload
    def model(self, module: Sequence[nn.Module], **settings: Any) -> nn.Sequential: ...

    def model(self, module: nn.Module | Sequence[nn.Module], **settings: Any) -> nn.Module:
        """Move `module` to the device, give it the same weights on all ranks, and wrap it for the strategy.

        Args:
            module: the model, changed in place; or a list of modules that are called one after the other.
            settings: keyword arguments of the strategy, checked on every layout; those of another
                strategy have no effect. `ddp`: those of DistributedDataParallel; `dp`: those of
                DataParallel. `fsdp`: `wrap` (modules to shard as units), `gather` (`unit` or `batch`), and
                those of `fully_shard` (`reshard_after_forward`, `shard_placement_fn`, `mp_policy`,
                `offload_policy`). `pipeline`: `chunks` (microbatches of the schedule), `chunk_inputs`
                (arguments with one row per sample), `split` (first modules of stages). `tensor`: `plan`,
                the plan of `parallelize_module`. Exchange `powersgd`: those of `PowerSGDState`.

        Returns:
            The module itself; with `dp` on GPUs, a wrapper with the same attributes.

        Raises:
            ModelError: if ranks built different models, or gradients are sparse.
            UsageError: if the model cannot be divided over the ranks of the mesh.
            ExactnessError: if a setting makes the result depend on the layout.
        """
        self._count("run.model")
        return self._session.models.add(module, settings)

    def sync_batchnorm(self, module: ModelT) -> ModelT:
        """Make BatchNorm layers of `module` use statistics of the global batch; return `module`.

        Like `torch.nn.SyncBatchNorm.convert_sync_batchnorm`, it replaces every BatchNorm, and every
        SyncBatchNorm, by a layer with the same parameters and buffers. It works on any device. All ranks
        call it, before `run.model`.

        Raises:
            ExactnessError: with `exact` and more replicas than ranks, since a rank computes its
                replicas one after the other. With `exact=False`, statistics are then those of the
                replicas that compute at the same time.
            ModelError: if `run.model` has taken the module, a layer cannot be converted, or ranks
                have different numbers of replicas.
        """
        session = self._session
        return synchronise(session.context, session.state, self._loop, module)  # type: ignore[return-value]

    def optimizer(self, optimizer: OptimizerT) -> OptimizerT:
        """Make `optimizer.step()` update the parameters once per global batch; return `optimizer`.

        Raises:
            ModelError: if a parameter of the optimizer belongs to no model of the run, or its state cannot
                be saved.
        """
        state = self._session.state
        number = self._count("run.optimizer")
        gated = optimizers.gate_optimizer(optimizer, self._loop, state.models, number, state.scaler)
        state.add_optimizer(gated)
        return gated

    def scheduler(self, scheduler: SchedulerT) -> SchedulerT:
        """Make `scheduler.step()` act once per global batch in a loop over a loader; return `scheduler`.

        Outside of such a loop every call acts. The state of the scheduler is saved with the run.
        """
        self._count("run.scheduler")
        schedulers = self._session.state.schedulers
        gated = optimizers.gate_scheduler(scheduler, self._loop, len(schedulers) + 1)
        schedulers.append(gated)
        return gated

    def register(self, name: str, value: Any) -> Any:
        """Save and restore `value` with the run, by its `state_dict` and `load_state_dict`; return `value`.

        Raises:
            ModelError: if a method is missing, or the name is taken.
        """
        self._session.register(name, value)
        return value

    def save(self, *, best: float | None = None) -> None:
        """Write a checkpoint of the run, in the background.

        Inside a loop over a loader, the checkpoint has the state at the end of the batch. All ranks
        call it.

        Args:
            best: score of this state, larger is better; the checkpoint with the highest score is kept.

        Raises:
            CheckpointError: if an earlier checkpoint could not be written.
        """
        self._require_open("run.save")
        self._session.save(None if best is None else float(best))

    # --- data ------------------------------------------------------------------------------------

    def loader(
        self,
        data: Any,
        *,
        batch_size: int | None = None,
        shuffle: bool = False,
        sampler: Any = None,
        batch_sampler: Any = None,
        drop_last: bool = False,
        collate_fn: Collate | None = None,
        num_workers: int = 0,
        **workers: Any,
    ) -> Loader:
        """Return a loader whose global batches are split over the replicas, each sample once.

        Args:
            data: a dataset, or a DataLoader whose settings are adopted.
            batch_size: samples per *global* batch.
            shuffle: a new keyed order in every epoch.
            sampler: a sampler of the script, with a length: the order of each epoch.
            batch_sampler: a sampler that yields the indices of each *global* batch; it replaces
                `batch_size`, `shuffle`, `sampler` and `drop_last`.
            drop_last: drop a last batch that is short; otherwise it is trained on as a smaller batch.
            collate_fn: makes a microbatch of a list of samples, as for a DataLoader.
            num_workers: DataLoader worker processes per rank.
            workers: other arguments of the DataLoader, such as `prefetch_factor`.

        Raises:
            LoaderError: if the data cannot be split over the replicas.
        """
        settings = {"batch_size": batch_size, "sampler": sampler, "collate_fn": collate_fn}
        settings |= {"shuffle": shuffle, "drop_last": drop_last, "num_workers": num_workers}
        settings |= {"batch_sampler": batch_sampler, **workers}
        self._require_open("run.loader")
        return self._session.loaders.make(data, settings)

    def batches(self, loader: Loader) -> Iterator[GlobalBatch]:
        """Yield the global batches of `loader`; iterate over a batch once per update, for a GAN twice."""
        return loader.batches()

    def epochs(self, count: int) -> Iterator[int]:
        """Yield epoch numbers from `0` to `count - 1`; a resumed run begins at the epoch where it stopped.

        Raises:
            UsageError: if `count` is negative.
            StepError: after the end of the run.
        """
        if count < 0:
            raise UsageError(f"{count} epochs; expected 0 or more")
        self._require_open("run.epochs")
        return epochs_left(self._loop, count, self._session.context.record.epoch_ends)

    # --- a step ----------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, weight: torch.Tensor | float | None = None) -> None:
        """Compute the gradients of the mean loss over the global batch; it replaces `loss.backward()`.

        Args:
            loss: the mean over this microbatch, a tensor of one element.
            weight: number of elements that the loss is the mean of, such as tokens; by default the
                number of samples; with 0 the microbatch is left out, also where its loss is not finite.

        Raises:
            StepError: outside of a loop over a loader, or twice for a model in one microbatch.
            ModelError: if the loss has several elements, or no model of the run computed it.
            NonFiniteLossError: with `stop_on_nan`, if the loss is NaN or infinite.
            PeerError: if another rank has ended.
        """
        self._require_open("run.backward")
        self._session.backward(loss, weight)

    def clip_grad_norm_(
        self, parameters: Any, max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Scale gradients to a total norm of at most `max_norm`, once per global batch.

        Args:
            parameters: a model, or an argument of `torch.nn.utils.clip_grad_norm_`.
            max_norm: upper limit of the norm.
            norm_type: order p of the norm; `inf` for the largest element.

        Returns:
            The norm before clipping, of shape `()`; NaN on microbatches that are not the last of a global
            batch, where gradients are incomplete.

        Raises:
            ModelError: if `parameters` are those of several models, of which one is sharded.
        """
        if not self._loop.acts_now():
            return torch.tensor(float("nan"))
        models = self._session.state.models
        return optimizers.clip(optimizers.listed(parameters), max_norm, norm_type, models)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clamp each element of the gradients to `-clip_value` to `clip_value`, once per global batch.

        `parameters` is a model, or an argument of `torch.nn.utils.clip_grad_value_`.
        """
        if self._loop.acts_now():
            models = self._session.state.models
            optimizers.clip_values(optimizers.listed(parameters), float(clip_value), models)

    def log(self, **values: Any) -> None:
        """Record values for this step, without waiting for other ranks or the device.

        `values`: by name, numbers or tensors of one element.
        """
        loop = self._loop
        if not (loop.progress.is_replaying or loop.is_audited):
            self._step_values.logged(self._session.context.record.log(values))

    def print(self, *values: object, sep: str = " ") -> None:
        """Print `values`, separated by `sep`, on the main rank, above the progress bar."""
        repeats = self._loop.is_replaying and self._loop.progress.depth > 0
        if not (repeats or self._loop.is_audited):  # else the same text would be printed twice
            self._session.context.record.print(sep.join(map(str, values)))

    def digest(self) -> str:
        """Return the SHA-256 of all models and of objects given to `run.register`, as `sha256:…`.

        Raises:
            StepError: inside a microbatch, with several replicas and a sharded model.
        """
        if self._session.state.is_split:
            if self._digest is not None:
                return self._digest  # the run is over: ranks with other parts of models have left
            self._loop.require_common_point("run.digest")
        # During replay models have the restored state, and not that of the script's current line.
        return self._session.metrics.once("run.digest", self._session.digest)

    def export(self, path: str | Path, model: nn.Module | None = None) -> None:
        """Write a model's plain `state_dict`, without wrappers' prefixes, on the main rank.

        Args:
            path: a file `.pt`, for `torch.load(path, weights_only=True)`, or `.safetensors`.
            model: one of the run's models; the only one by default.

        Raises:
            ModelError: if `model` is left out and there are several.
            CheckpointError: if the file cannot be written.
            UsageError: if the file's name has another suffix.
            StepError: inside a microbatch, with several replicas and a sharded model.
        """
        wrapped = self._session.models.find(model)
        if wrapped.is_split or self._loop.microbatch is None:
            self._loop.require_common_point("run.export")
        wrapped.check_gathering()
        # A call that is replayed wrote the file before the restart, with the weights of that time.
        writes = self.is_main_process and not self._loop.is_replaying
        weights_only.write_weights(Path(path), wrapped.state(), here=writes)

    def load(self, path: str | Path, model: nn.Module | None = None) -> None:
        """Load a `state_dict` from a file into a model; every rank reads the file.

        The ranks wait for each other first, so that the file may be one that `run.export` has just written.
        A run that resumes from a snapshot or checkpoint keeps that state.

        Args:
            path: a file `.pt`, `.pth`, `.bin` or `.safetensors`; keys may begin with
                `module.`, the prefix of DataParallel and DistributedDataParallel.
            model: one of the run's models; the only one by default.

        Raises:
            ModelError: if `model` is left out and there are several, or names or shapes don't fit.
            CheckpointError: if the file cannot be read.
            UsageError: if the file's name has another suffix.
        """
        self._loop.require_common_point("run.load")
        self._session.barrier("run.load")
        self._session.models.load(model, weights_only.read_weights(Path(path)))
