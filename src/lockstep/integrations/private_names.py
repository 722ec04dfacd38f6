"""Private names of transformers and accelerate that the adapters override or use.

A test checks that the installed versions still have them.
"""

from __future__ import annotations

#: Names by module and class.
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
}
#: Attributes that objects set when they are made, by the method whose source sets them.
PRIVATE_ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "accelerate:Accelerator.__init__": ("_models", "_optimizers", "_schedulers", "_custom_objects"),
    "transformers:Trainer.__init__": ("_created_lr_scheduler", "current_flos", "_train_batch_size"),
    "transformers:Trainer._inner_training_loop": (
        "_tr_loss",
        "_total_loss_scalar",
        "_globalstep_last_logged",
        "_initial_global_step",
        "_initial_num_input_tokens_seen",
    ),
    "transformers:TrainingArguments._setup_devices.func": ("_n_gpu",),
}
