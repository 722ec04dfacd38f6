"""Raise errors for options of transformers and accelerate with which results depend on the layout."""

from __future__ import annotations

from typing import Any

from lockstep.integrations.process import refuse

#: Arguments of TrainingArguments: what makes them refused, and what to use instead.
_ARGUMENTS: dict[str, str] = {
    "deepspeed": "strategy fsdp of Lockstep shards a model: lockstep run --strategy fsdp",
    "fsdp": "strategy fsdp of Lockstep shards a model: lockstep run --strategy fsdp",
    "parallelism_config": "strategies tensor and pipeline of Lockstep spread a model over ranks",
    "torch_compile": "the model without torch_compile: compiled kernels differ with the shapes of batches",
    "auto_find_batch_size": "per_device_train_batch_size=: a size that is found depends on the device",
    "batch_eval_metrics": "compute_metrics over all samples; preprocess_logits_for_metrics saves memory",
    "eval_use_gather_object": "predictions that are tensors",
    "enable_jit_checkpoint": "lockstep run, which saves the run when it is preempted",
    "use_legacy_prediction_loop": "the loop of evaluate() and predict()",
    "data_seed": "seed=, which the order of the data follows from",
}
#: Fields of `accelerator_config`.
_CONFIG: dict[str, str] = {
    "dispatch_batches": "dispatch_batches=None: every rank reads the samples of its replicas",
    "split_batches": "per_device_train_batch_size=, the batch of one replica",
}
#: Arguments of Accelerator.
_ACCELERATOR: dict[str, str] = {
    **dict.fromkeys(
        ("deepspeed_plugin", "deepspeed_plugins", "fsdp_plugin", "megatron_lm_plugin"),
        "strategy fsdp of Lockstep shards a model: lockstep run --strategy fsdp",
    ),
    **dict.fromkeys(
        ("torch_tp_plugin", "parallelism_config"),
        "strategies tensor and pipeline of Lockstep spread a model over ranks",
    ),
    **dict.fromkeys(
        ("dynamo_backend", "dynamo_plugin"),
        "the model without torch.compile: compiled kernels differ with the shapes of batches",
    ),
}
#: Trainers of TRL that generate while they train.
GENERATING = (
    *("A2POTrainer", "AsyncDistillationTrainer", "AsyncGRPOTrainer", "DistillationTrainer"),
    *("GKDTrainer", "GOLDTrainer", "GRPOTrainer", "IWOPDTrainer", "NashMDTrainer"),
    *("OnlineDPOTrainer", "PPOTrainer", "RLOOTrainer", "SDFTTrainer", "SDPOTrainer", "XPOTrainer"),
)


def check_trainer(kind: type) -> None:
    """Raise an error if `kind` is a trainer of TRL, or a subclass, that generates samples in training.

    Raises:
        UsageError: if `kind` is such a class.
    """
    for base in kind.__mro__:
        if base.__name__ in GENERATING:
            refuse(
                base.__name__,
                "a loop with lockstep.Run: what a rank generates follows from how many prompts it has, and "
                "this trainer shares them out over processes",
            )


def check_arguments(args: Any) -> None:
    """Raise an error for `TrainingArguments` that make the result depend on the number of ranks.

    Raises:
        UsageError: for the first such argument; the hint says what to use instead.
    """
    for name, instead in _ARGUMENTS.items():
        if getattr(args, name, None):
            refuse(f"TrainingArguments({name}=…)", instead)
    for name, instead in _CONFIG.items():
        if getattr(args.accelerator_config, name, None):
            refuse(f"TrainingArguments(accelerator_config={{'{name}': …}})", instead)
    if not args.eval_do_concat_batches:
        refuse("TrainingArguments(eval_do_concat_batches=False)", "predictions of all samples")
    if getattr(args, "train_sampling_strategy", "") == "batch_rebalance":
        refuse(
            "TrainingArguments(train_sampling_strategy='batch_rebalance')",
            "train_sampling_strategy='group_by_length': it does not split the data over ranks by itself",
        )
    if "lomo" in str(args.optim).lower() or "layerwise" in str(args.optim).lower():
        refuse(
            f"TrainingArguments(optim={str(args.optim)!r})",
            "an optimizer that steps after backward",
        )
    if getattr(args, "precompute_ref_log_probs", False):
        refuse("DPOConfig(precompute_ref_log_probs=True)", "reference probabilities in each step")


def check_accelerator(settings: dict[str, Any]) -> None:
    """Raise an error for arguments of `Accelerator` that make the result depend on the number of ranks.

    Raises:
        UsageError: for the first such argument; the hint says what to use instead.
    """
    for name, instead in _ACCELERATOR.items():
        if settings.get(name):
            refuse(f"Accelerator({name}=…)", instead)
    if getattr(settings.get("dataloader_config"), "dispatch_batches", None):
        refuse("DataLoaderConfiguration(dispatch_batches=True)", _CONFIG["dispatch_batches"])
