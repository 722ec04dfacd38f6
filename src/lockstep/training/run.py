"""The run: the one object that a training script talks to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from lockstep.checkpoint import weights_only
from lockstep.data.fetch import Collate
from lockstep.data.loader import GlobalBatch, Loader
from lockstep.errors import UsageError
from lockstep.settings import OF_SCRIPTS, Settings, from_environment
from lockstep.training import optimizers
from lockstep.training.batchnorm import synchronise
from lockstep.training.metrics import Item, Value
from lockstep.training.run_properties import RunProperties
from lockstep.training.session import Session, explained, show_plainly
from lockstep.world.detect import given

OptimizerT = TypeVar("OptimizerT", bound=Optimizer)
SchedulerT = TypeVar("SchedulerT")
ModelT = TypeVar("ModelT", bound=nn.Module)


class Run(RunProperties):
    """A training run whose result does not depend on its layout.

    Use it as a context manager; inside, models, optimizers and loaders are made through it.

    Args:
        name: what the run is called; names its directory.
        seed: everything random follows from it.
        replicas: number of logical workers, at least as many as ranks; by default the number of ranks.
        exact: refuse what would make the result depend on the layout.
        strategy: how models are held: `single`, `ddp`, `dp`, `ps`, `fsdp`, `pipeline`, `tensor`, or `auto`.
        exchange: how gradients are summed: `shared-memory`, `tree`, `native`, `mpi`, or `auto`, the fastest
            exact one of the first three; `server`, which is that of `ps`. With `exact=False` also `bf16`,
            `fp16` and `powersgd`, which ship less of them, and `local-sgd` and `diloco`, which ship
            weights now and then.
        sync_every: steps between two exchanges of `local-sgd` (default 16) and `diloco` (default 50).
        mesh: `DATAxMODEL`, such as `2x2`: how many models, and over how many ranks each is spread.
        staleness: how many of the latest updates the parameters lack that gradients are computed with, on
            every layout; with strategy `ps` servers update, and workers wait that much less.
        precision: `fp32`; `bf16` or `fp16` for forward passes under autocast, fp16 with a loss scale.
        devices: `cpu`, `gpu`, `auto`, or a list of indices such as `2,3`, one for each rank of a node.
        threads: intra-op threads per process; by default the cores divided by the replicas.
        run_dir: directory of the run; by default `runs/NAME/TIME`.
        progress: show a bar or lines on the main rank.
        stop_on_nan: check every loss, and stop at one that is not finite.
        checkpoint_every: seconds between checkpoints that the script doesn't ask for; 0 for none.
        keep: how many of the latest checkpoints stay, besides the best.
        loggers: `tensorboard`, `wandb`, `mlflow` or objects with `log(values, step)`, for `run.log`.
        init_method: rendezvous of the ranks, in place of what the environment says:
            `tcp://host:port`, `file:///shared/path` or `env://`.
        rank: number of this process, given with `world_size` or not at all.
        world_size: number of processes.
        store: a store that all ranks have, of the script's own.

    The environment variable `LOCKSTEP_` plus the name of an argument wins over the argument; `name`,
    `rank`, `world_size` and `store` have none.

    Raises:
        UsageError: for a setting that makes no sense, or more ranks than replicas.
        WorldError: if the environment contradicts itself, or the other ranks cannot be met.
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
        checkpoint_every: float = 600.0,
        keep: int = 3,
        loggers: Sequence[Any] = (),
        init_method: str | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        store: dist.Store | None = None,
    ) -> None:
        place = None if run_dir is None else Path(run_dir)
        asked = {**locals(), "run_dir": place, "loggers": tuple(loggers)}
        show_plainly()
        # An argument for each setting, under its name; the others say where the ranks meet.
        settings = Settings(name=name, **{one: asked[one] for one in OF_SCRIPTS})
        world = given(init_method, rank, world_size, has_store=store is not None)
        self._session = Session(from_environment(settings), world, store)
        self._optimizers = 0
        self._end: str | None = None

    def __enter__(self) -> Self:
        self._begin_once()
        self._session.open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            told = explained(error, self._session.state.models)
            self._session.close(told or error)
            if told is not None:
                raise told.with_traceback(traceback) from error
            return
        try:
            self._end = self._session.finish()
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
        """Place `module` on the device, make it identical on all ranks, and hold it.

        Args:
            module: the model, changed in place; or a list of modules that are called one after the other.
            settings: keyword arguments for DistributedDataParallel, or DataParallel with `dp`; checked on
                every layout, used where the model is held so. Those of another strategy have no effect:
                for `fsdp`, `wrap`, which modules are gathered by themselves, `gather`, for how long
                (`unit` or `batch`), and those of torch's `fully_shard` (`reshard_after_forward`,
                `shard_placement_fn`, `mp_policy`, `offload_policy`); for `pipeline`, `chunks`,
                `chunk_inputs` and `split`: parts of a batch, arguments with one row per sample, where
                stages begin; for `tensor`, `plan`, how torch's `parallelize_module` is to cut the model;
                for the exchange `powersgd`, those of torch's `PowerSGDState`. See the manual, "Strategies".

        Returns:
            What the script is to call: the module itself; with `dp` on GPUs a wrapper that looks like it.

        Raises:
            ModelError: if ranks built different models, or gradients are sparse.
            UsageError: if a model cannot be spread over the ranks that are to hold it.
            ExactnessError: for a setting that breaks the promise.
        """
        self._require_open("run.model")
        return self._session.models.add(module, settings)

    def sync_batchnorm(self, module: ModelT) -> ModelT:
        """Return `module` with BatchNorm over the global batch, on any device; call it before `model`.

        Like `torch.nn.SyncBatchNorm.convert_sync_batchnorm`, whose layers it takes, too: every BatchNorm
        is replaced by one with the same parameters and buffers. On one rank with one replica nothing
        else changes. All ranks call it.

        Raises:
            ExactnessError: with more replicas than ranks: their statistics cannot be summed.
            ModelError: if it is held already, or has a layer that cannot be converted.
        """
        session = self._session
        return synchronise(session.context, session.state, self._loop, module)  # type: ignore[return-value]

    def optimizer(self, optimizer: OptimizerT) -> OptimizerT:
        """Let `optimizer.step()` act once per global batch.

        Raises:
            ModelError: if it holds parameters of no model of the run.
        """
        state = self._session.state
        self._optimizers += 1
        gated = optimizers.gate_optimizer(
            optimizer, self._loop, state.models, self._optimizers, state.scaler
        )
        state.add_optimizer(gated)
        return gated

    def scheduler(self, scheduler: SchedulerT) -> SchedulerT:
        """Let `scheduler.step()` act once per global batch inside a loop, and always outside.

        From here on it is part of the run's state, as optimizers and models are.
        """
        gated = optimizers.gate_scheduler(scheduler, self._loop)
        self._session.state.schedulers.append(gated)
        return gated

    def register(self, name: str, value: Any) -> Any:
        """Count `value` as state of the run: anything with `state_dict` and `load_state_dict`.

        Raises:
            ModelError: if it lacks one of them, or the name is taken.
        """
        self._session.register(name, value)
        return value

    def save(self, *, best: float | None = None) -> None:
        """Save the state of the run to disk, beside the training.

        Inside a loop, the state is saved when the script is done with this batch. The run resumes from
        there. All ranks call it.

        Args:
            best: how good this state is, larger is better; the best one is kept besides the latest.

        Raises:
            CheckpointError: if an earlier one could not be written.
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
            sampler: an order of the user's; its length must be known.
            drop_last: leave out a last batch that is short; otherwise it weighs what it holds.
            collate_fn: makes a batch of a list of samples.
            num_workers: processes per rank that fetch in advance.
            workers: other settings for the DataLoader, such as `prefetch_factor`.

        Raises:
            LoaderError: if the data cannot be split as asked.
        """
        asked = {"batch_size": batch_size, "sampler": sampler, "collate_fn": collate_fn, **workers}
        asked |= {"shuffle": shuffle, "drop_last": drop_last, "num_workers": num_workers}
        self._require_open("run.loader")
        return self._session.loaders.make(data, asked)

    def batches(self, loader: Loader) -> Iterator[GlobalBatch]:
        """Yield global batches, each to be iterated over once per update."""
        return loader.batches()

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the epochs of the run, `0` to `count - 1`."""
        if count < 0:
            raise UsageError(f"{count} epochs; expected 0 or more")
        self._require_open("run.epochs")
        return self._loop.run_epochs(count, self._session.context.record.epoch_ends)

    # --- a step ----------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, weight: torch.Tensor | float | None = None) -> None:
        """Compute gradients of `loss`, the mean over this microbatch's samples, summed over the replicas.

        Args:
            loss: a scalar.
            weight: how many things the loss is the mean of, such as tokens: gradients are those of the
                mean over all of the global batch. By default the samples count.

        Raises:
            StepError: outside of a loop over a loader, or twice for a model in one microbatch.
            ModelError: if the loss is no scalar, or comes from no model of the run.
            NonFiniteLossError: with `stop_on_nan`, for a loss that is NaN or infinite.
            PeerError: if another rank is gone.
        """
        self._require_open("run.backward")
        self._session.backward(loss, weight)

    def clip_grad_norm_(
        self, parameters: Any, max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Scale gradients to a total norm of at most `max_norm`, once per global batch.

        Args:
            parameters: a model, or what `torch.nn.utils.clip_grad_norm_` takes.
            max_norm: the largest norm that is left as it is.
            norm_type: which norm.

        Returns:
            The norm before, a scalar; NaN on microbatches that are not the last of a global batch,
            where it is not known yet.
        """
        if not self._loop.acts_now():
            return torch.tensor(float("nan"))
        own = optimizers.listed(parameters)
        return optimizers.clip(own, max_norm, norm_type, self._session.state.models)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clamp each element of the gradients to `-clip_value` to `clip_value`, once per global batch.

        Args:
            parameters: a model, or what `torch.nn.utils.clip_grad_value_` takes.
            clip_value: the largest magnitude that is left.
        """
        if self._loop.acts_now():
            own = optimizers.listed(parameters)
            optimizers.clip_values(own, float(clip_value), self._session.state.models)

    def log(self, **values: Any) -> None:
        """Record values of this step and show the newest; never waits for other ranks or the device."""
        if not self._loop.is_on_the_way:
            self._session.context.record.log(values)

    # --- metrics ---------------------------------------------------------------------------------

    def mean(self, items: Iterable[Item | Mapping[str, Item]]) -> Any:
        """Return the mean over all samples of all ranks.

        Args:
            items: one per microbatch, computed while it iterates over a loader: the microbatch's
                mean, or one value per sample (shape `(samples, …)`), or the mean over something else and
                how many that were, as `(loss, tokens)`; or a mapping of such.

        Returns:
            A number, the same on every rank and layout; or one for each entry of the mappings.

        Raises:
            StepError: inside a microbatch, with several replicas; or where there are no samples.
        """
        return self._session.metrics.mean(items)

    def sum(self, items: Iterable[Value | Mapping[str, Value]], *, per_sample: bool = True) -> Any:
        """Return the sum over all samples of all ranks, exact for integers.

        Args:
            items: as in `mean`, without weights.
            per_sample: whether the first dimension of a tensor is that of the samples, which is summed
                over with all others. If not, an item is the microbatch's own sum, of any shape, such as a
                confusion matrix; the result has that shape.
        """
        return self._session.metrics.sum(items, per_sample=per_sample)

    def gather(self, items: Iterable[torch.Tensor]) -> torch.Tensor:
        """Return one row per sample of the data, in dataset order, on every rank.

        Args:
            items: one tensor of shape `(samples, …)` per microbatch, computed while it iterates.
        """
        return self._session.metrics.gather(items)

    # --- together --------------------------------------------------------------------------------

    def main_process_first(self) -> AbstractContextManager[None]:
        """Let the main rank go through the body first, then one rank per node, then all others."""
        self._loop.require_meeting_point("run.main_process_first", of_models=False)
        return self._session.rank_order.first()

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        self._loop.require_meeting_point("run.barrier", of_models=False)
        self._session.barrier()

    def print(self, *values: object, sep: str = " ") -> None:
        """Print on the main rank, above the progress bar."""
        if not self._loop.is_entered_again:  # else it was printed before
            self._session.context.record.print(sep.join(map(str, values)))

    def digest(self) -> str:
        """Return the SHA-256 of all models and registered objects, as `sha256:…`.

        Raises:
            StepError: inside a microbatch, with several replicas and a model that is cut over ranks.
        """
        if self._end is not None and self._session.state.is_split:
            return self._end  # the other ranks, which hold the rest of the models, have left
        if self._session.state.is_split:
            self._loop.require_meeting_point("run.digest")
        # On the way back models hold the state that is restored, and not the one that is asked for.
        return self._session.metrics.once("run.digest", self._session.digest)

    def export(self, path: str | Path, model: nn.Module | None = None) -> None:
        """Write a model's plain `state_dict`, without wrappers' prefixes, on the main rank.

        Args:
            path: where to: `.pt`, for `torch.load(path, weights_only=True)`, or `.safetensors`.
            model: which of the run's models; may be left out where there is one.

        Raises:
            ModelError: if it is not clear which one.
            CheckpointError: if the file cannot be written.
            UsageError: if its suffix is another.
            StepError: inside a microbatch, with several replicas and a model that is cut over ranks.
        """
        held = self._session.models.find(model)
        if held.is_split or self._loop.microbatch is None:
            self._loop.require_meeting_point("run.export")
        held.check_gathering()
        # On the way back the file has been written, with the weights of then.
        writes = self.is_main_process and not self._loop.is_on_the_way
        weights_only.write_weights(Path(path), held.state(), here=writes)

    def load(self, path: str | Path, model: nn.Module | None = None) -> None:
        """Start a model from plain weights, such as another program's `state_dict`; each rank reads them.

        Where the run continues from a state of its own, that state wins.

        Args:
            path: a file that ends in `.pt`, `.pth`, `.bin` or `.safetensors`; names may begin with
                `module.`, as DataParallel and DistributedDataParallel leave them.
            model: which of the run's models; may be left out where there is one.

        Raises:
            ModelError: if it is not clear which one, or the weights don't fit it.
            CheckpointError: if the file cannot be read.
            UsageError: if its suffix is another.
        """
        self._loop.require_meeting_point("run.load")
        self._session.models.load(model, weights_only.read_weights(Path(path)))


__all__: Sequence[str] = ["Run"]
