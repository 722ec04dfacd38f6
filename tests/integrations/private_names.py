"""Private names of transformers, accelerate and Lightning that the adapters override or use.

`test_private_names.py` checks that the installed versions still have them.
"""

from __future__ import annotations

#: Names of attributes and methods; the keys are module and class.
PRIVATE_NAMES: dict[str, tuple[str, ...]] = {
    "accelerate.state:PartialState": ("_shared_state", "use_distributed"),
    "accelerate:Accelerator": ("_prepare_one",),
    "transformers:Trainer": (
        "_evaluate",
        "_finalize_training",
        "_clip_grad_norm",
        "_get_grad_norm",
        "_get_learning_rate",
        "_get_num_items_in_batch",
        "_init_training_state",
        "_inner_training_loop",
        "_load_optimizer_and_scheduler",
        "_load_rng_state",
        "_maybe_log_save_evaluate",
        "_prepare_input",
        "_save_rng_state",
        "_track_num_input_tokens",
        "create_accelerator_and_postprocess",
        "set_initial_training_values",
        "training_step",
    ),
    "transformers:TrainingArguments": ("_setup_devices",),
    "lightning.pytorch.loops.fit_loop:_FitLoop": ("_should_accumulate", "done", "state_dict"),
    "lightning.pytorch.loops.fit_loop:RestartStage": ("RESTARTED_MID_EPOCH",),
    "lightning.pytorch.loops:_Loop": ("_load_from_state_dict", "restarting"),
    "lightning.pytorch.loops.optimization.automatic:_AutomaticOptimization": (
        "_make_closure",
        "_make_zero_grad_fn",
        "_training_step",
    ),
    "lightning.pytorch.loops.optimization.manual:_ManualOptimization": (
        "_on_after_step",
        "_on_before_step",
        "on_run_start",
    ),
    "lightning.pytorch.plugins.precision:Precision": ("_after_closure", "post_backward"),
    "lightning.pytorch.strategies:Strategy": ("_configure_launcher", "_setup_model"),
    "lightning.pytorch.trainer.connectors.logger_connector.result:_ResultCollection": ("log",),
    "lightning.pytorch.trainer.connectors.signal_connector:_SignalConnector": (
        "register_signal_handlers",
    ),
}
#: Attributes of objects; the keys are the methods that set them, as `__init__`.
PRIVATE_ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "accelerate:Accelerator.__init__": ("_models", "_optimizers", "_schedulers", "_custom_objects"),
    "transformers:Trainer.__init__": ("_created_lr_scheduler", "current_flos", "_train_batch_size"),
    "transformers:Trainer._inner_training_loop": (
        "_tr_loss",
        "_total_loss_scalar",
        "_globalstep_last_logged",
        "_initial_num_input_tokens_seen",
    ),
    "transformers:TrainingArguments._setup_devices.func": ("_n_gpu",),
    "lightning.pytorch:Trainer.__init__": ("_signal_connector", "_logger_connector"),
    "lightning.pytorch.strategies:Strategy.__init__": ("_forward_redirection",),
    "lightning.pytorch.strategies:SingleDeviceStrategy.__init__": ("_root_device",),
    "lightning.pytorch.loops.fit_loop:_FitLoop.__init__": (
        "_data_fetcher",
        "_data_source",
        "_restart_stage",
    ),
    "lightning.pytorch.loops.training_epoch_loop:_TrainingEpochLoop.__init__": ("_results",),
    "lightning.pytorch.callbacks:ModelCheckpoint.__init__": (
        "_enable_version_counter",
        "_last_global_step_saved",
    ),
    "lightning.pytorch.trainer.connectors.logger_connector.logger_connector:_LoggerConnector.__init__": (
        "_callback_metrics",
        "_current_fx",
        "_first_loop_iter",
        "_logged_metrics",
        "_progress_bar_metrics",
    ),
    "torchmetrics:Metric.__init__": (
        "_computed",
        "_defaults",
        "_forward_cache",
        "_reductions",
        "_update_count",
        "distributed_available_fn",
    ),
    "torchmetrics:MetricCollection.__init__": (
        "_enable_compute_groups",
        "_groups",
        "_groups_checked",
    ),
}
#: Attributes that a package reads only from some version on, with this version; adapters always set them.
NEWER_ATTRIBUTES: dict[str, str] = {"_initial_global_step": "transformers 5.20"}
