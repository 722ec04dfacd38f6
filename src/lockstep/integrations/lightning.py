"""`LockstepStrategy`: Lightning's `Trainer` and `Fabric` on a `lockstep.Run`.

`L.Trainer(strategy=LockstepStrategy(replicas=8))`: one batch of the DataLoader is one global batch, split
over the replicas. `training_step` runs once for each replica, on its share; callbacks, loggers and
optimizers see the global batch. `Fabric(strategy=LockstepStrategy(replicas=8))` is in `fabric.py`.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.fabric.strategies.strategy import Strategy as StrategyOfFabric
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch.core import LightningModule
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero
from torchmetrics import Metric

from lockstep.engine.training.session import show_plainly
from lockstep.errors import StepError
from lockstep.integrations import lightning_refusals as refusals
from lockstep.integrations.fabric import FabricStrategy
from lockstep.integrations.global_batches import GlobalBatches
from lockstep.integrations.lightning_loops import AutomaticOptimization, ManualOptimization
from lockstep.integrations.lightning_metrics import StepMetrics
from lockstep.integrations.lightning_results import GlobalResults, numbers_of
from lockstep.integrations.lightning_run import OnRun
from lockstep.integrations.lightning_state import FitState
from lockstep.integrations.replica_threads import ReplicaThreads
from lockstep.world import detect


class LockstepStrategy(OnRun, SingleDeviceStrategy):
    """Strategy of Lightning's `Trainer` and `Fabric` that trains through a run.

    Args:
        replicas: number of logical data-parallel workers, which share each batch of a loader; by
            default the number of processes of the first launch.
        seed: seed of the run: order of the data, dropout, augmentation; by default that of
            `L.seed_everything`, or 0.

    Raises:
        UsageError: for an option that would make the result depend on the layout.
    """

    strategy_name = "lockstep"
    lightning_module: Any
    model: Any

    def __init__(self, *, replicas: int | None = None, seed: int | None = None) -> None:
        super().__init__()
        show_plainly()
        self._world = world = detect()
        self.global_rank, self.local_rank = world.rank, world.local_rank
        rank_zero.rank_zero_only.rank = world.rank  # type: ignore[attr-defined]
        self._replicas, self._seed = replicas, seed
        self._precision: Any = None  # Fabric's name of the precision plugin
        self._layer_sync: Any = None
        self.parallel_devices: list[torch.device] = []
        self.num_nodes = 1
        self._kept: list[torch.Tensor | None] = []  # gradients of batches before, to be accumulated

    @property
    def precision(self) -> Any:
        """Precision plugin of Fabric; `None` in a Trainer.

        Only Fabric sets this property. Setting it changes the class of this object to `FabricStrategy`.
        """
        return self._precision

    @precision.setter
    def precision(self, precision: Any) -> None:
        # A strategy of Fabric is another class, with methods of equal names and other arguments. Only here
        # does Lightning tell whether a Trainer or a Fabric has been given this object.
        self.__class__ = FabricStrategy  # type: ignore[assignment]
        self.precision = precision

    # --- processes -----------------------------------------------------------------------------------

    def _configure_launcher(self) -> None:
        refusals.check_processes(self, self._world)

    def setup_environment(self) -> None:
        """Check the Trainer's precision setting, and open the `lockstep.Run` that trains."""
        refusals.check_precision(self.precision_plugin)
        self._open_run(self.accelerator)
        super().setup_environment()

    # --- what is trained -----------------------------------------------------------------------------

    def setup(self, trainer: Any) -> None:
        """Pass model and optimizers to the run; replace Lightning's optimization loops.

        For evaluation and prediction, do only what Lightning's strategy for one device does.
        """
        for module in self.lightning_module.modules():
            if isinstance(module, Metric):  # every rank evaluates all of the data
                module.distributed_available_fn = _no_ranks
        if trainer.state.fn != TrainerFn.FITTING:
            super().setup(trainer)
            return
        refusals.check_trainer(trainer, self)
        # Values are reduced over all replicas already, and evaluations see all data on each rank.
        warnings.filterwarnings(
            "ignore", message=r"It is recommended to use `self\.log\(.*sync_dist"
        )
        super().setup(trainer)
        run, loop = self.run, trainer.fit_loop.epoch_loop
        self.lightning_module._kept_by_run = frozenset(vars(LightningModule()))
        trainer._signal_connector.register_signal_handlers = lambda: None  # the run has its own
        plugin: Any = self.precision_plugin
        # That of bf16-mixed looks for a GradScaler first.
        plugin.clip_gradients = functools.partial(Precision.clip_gradients, plugin)
        plugin.clip_grad_by_norm = lambda own, value: run.clip_grad_norm_(_of(own), value)
        plugin.clip_grad_by_value = lambda own, value: run.clip_grad_value_(_of(own), value)
        metrics = StepMetrics(self.lightning_module)
        loop._results = self._results = GlobalResults(run, metrics)
        loop.automatic_optimization = AutomaticOptimization(trainer)
        loop.manual_optimization = ManualOptimization(trainer)
        self._threads = ReplicaThreads(self)
        earlier = sum(isinstance(v, FitState) for v in run._session.state.registered.values())
        self._state = FitState(trainer, self, metrics, earlier + 1)
        run.register(f"fit-{earlier + 1}" if earlier else "fit", self._state)

    def _setup_model(self, model: Any) -> Any:
        if self.lightning_module.trainer.state.fn != TrainerFn.FITTING:
            return model
        return self._model_of(model)

    def setup_optimizers(self, trainer: Any) -> None:
        """Call the module's `configure_optimizers`; pass its optimizers and schedulers to the run."""
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            refusals.check_optimizer(optimizer)
            self.run.optimizer(optimizer)
        for config in self.lr_scheduler_configs:
            self.run.scheduler(config.scheduler)

    def process_dataloader(self, dataloader: Any) -> Any:
        """Return a loader of global batches to train on, or the DataLoader itself for evaluation loops."""
        trainer = self.lightning_module.trainer
        if not trainer.training:
            return _seeded_equally(dataloader)
        refusals.check_data(dataloader, trainer)
        self._batches = GlobalBatches(trainer, self.run, dataloader)
        return self._batches

    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        """Return `batch` on the device; a global batch is returned as it is.

        The microbatches of a global batch are moved when they are computed.
        """
        if getattr(self, "_batches", None) is not None and self._batches.is_current(batch):
            return batch
        return super().batch_to_device(batch, device, dataloader_idx)

    def on_train_start(self) -> None:
        """Begin the loop over epochs; if the run resumes, restore its state and skip the batches done."""
        self._batches.begin()
        self._state.restore_if_resumed(self._batches)

    def on_train_end(self) -> None:
        """End the run's loop over epochs; wait until the main rank has written its checkpoints."""
        self._batches.end()
        self.checkpoint_io.teardown()
        self.run.barrier()

    # --- a step --------------------------------------------------------------------------------------

    def training_step(self, batch: Any, *rest: Any) -> Any:
        """Train on this rank's microbatches of a global batch; return the mean loss and other outputs.

        The means are over the whole global batch. `rest`: further arguments of the module's
        `training_step`.
        """
        module, run = self.lightning_module, self.run
        if not module.automatic_optimization:
            with self._state.frozen():
                return self._threads.train(batch, rest, self._results)
        with self._state.frozen():
            sums = run.sum(self._microbatches(batch, rest), per_sample=False)
        self._accumulate(module)
        self._results.apply(sums, self.root_device)
        outputs = self._results.outputs(sums, self.root_device)
        plugin = self.precision_plugin
        plugin.post_backward(plugin.pre_backward(outputs["loss"], module), module)
        return outputs

    def _microbatches(self, batch: Any, rest: Any) -> Iterator[dict[str, Any]]:
        """Compute the loss and gradients of each of this rank's microbatches of `batch`.

        Yields for each one a dictionary of the values that it has logged and returned, for `run.sum`.
        `rest`: further arguments of the module's `training_step`.
        """
        parts = self.lightning_module.trainer.accumulate_grad_batches
        for data in batch:
            output = self.compute(data, rest, self._forward)
            loss = output.get("loss") if isinstance(output, dict) else output
            if not isinstance(loss, torch.Tensor):
                raise StepError(
                    f"training_step returned {type(loss).__name__} for a microbatch; expected a loss",
                    hint="to leave out samples, return their loss times 0",
                )
            self.run.backward(loss / parts if parts > 1 else loss)
            yield self._results.taken() | numbers_of(output, self.run)

    def compute(self, data: Any, rest: Any, call: Callable[..., Any]) -> Any:
        """Move the microbatch `data` to the device; return the result of `call(data, *rest)`.

        `call`: the module's `training_step`. Values that it logs are collected in the strategy's
        `GlobalResults`.
        """
        data = super().batch_to_device(self.precision_plugin.convert_input(data))
        with (
            self._results.collecting(),
            self.precision_plugin.train_step_context(),
        ):
            return call(data, *rest)

    def _forward(self, *inputs: Any) -> Any:
        """Call `training_step` with `inputs` as a forward pass, which calls the model's hooks.

        Among them are the hooks that `run.model` has set.
        """
        module = self.lightning_module
        return self._forward_redirection(self.model, module, "training_step", *inputs)

    def _accumulate(self, module: Any) -> None:
        """Accumulate gradients over several global batches (`accumulate_grad_batches`).

        Gradients kept from earlier batches are added to this batch's gradients. If no optimizer step
        follows, the sums are kept for the next batch, and each parameter's `grad` is set to `None`.
        """
        trainer = module.trainer
        is_kept = trainer.fit_loop._should_accumulate()
        if not (self._kept or is_kept):
            return
        parameters = [p for p in module.parameters() if p.requires_grad]
        for parameter, old in zip(parameters, self._kept, strict=bool(self._kept)):
            if old is not None:
                parameter.grad = old if parameter.grad is None else old.add_(parameter.grad)
        self._kept = [p.grad for p in parameters] if is_kept else []
        if is_kept:
            for parameter in parameters:
                parameter.grad = None

    def backward(
        self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Compute the gradients of `closure_loss`, this microbatch's mean loss; return `closure_loss`.

        Lightning calls this method in `manual_backward`.
        """
        refusals.check_backward(args, kwargs)
        self.run.backward(closure_loss)
        return closure_loss

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """Call `closure`, which computes the gradients of a global batch, and then step the optimizer.

        In manual optimization, wait until all replicas have called `step()`; then the optimizer steps once.
        """
        result = closure()
        if self._threads.is_inside:
            self._threads.wait_for_step(optimizer)
            return result
        self.precision_plugin._after_closure(self.lightning_module, optimizer)
        optimizer.step(**kwargs)
        return result

    def teardown(self) -> None:
        """Release Lightning's plugins; leave the model on its device, since the run goes on."""
        self.precision_plugin.teardown()
        if self.accelerator is not None:
            self.accelerator.teardown()
        self.checkpoint_io.teardown()


StrategyOfFabric.register(LockstepStrategy)


def _of(optimizer: Any) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _seeded_equally(data: Any) -> Any:
    """Make the seeds of a DataLoader's workers the same on all ranks; return the DataLoader.

    This has an effect after `L.seed_everything(workers=True)`, unless the DataLoader has a
    `worker_init_fn`.
    """
    if os.environ.get("PL_SEED_WORKERS") == "1" and getattr(data, "worker_init_fn", 1) is None:
        data.worker_init_fn = functools.partial(pl_worker_init_function, rank=0)
    return data


def _no_ranks() -> bool:
    return False
