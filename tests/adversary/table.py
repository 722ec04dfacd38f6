"""Which scripts there are, what is to happen to each, and what is to come of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """One script.

    Attributes:
        name: of its file in `scripts/`.
        kill: step in which a rank of 3 is killed, in the middle of an epoch.
        term: last step of an epoch, after which 2 ranks are preempted.
        refused: what the message says, where the script is refused; then there is neither.
        ranks: from how many ranks on it is refused.
        needs: distributions that are not among those of every test.
        quick: whether it is one of those that every run of the tests has.
        fault: why its layouts differ as long as they do.
    """

    name: str
    kill: int = 0
    term: int = 0
    refused: str = ""
    ranks: int = 1
    needs: tuple[str, ...] = ()
    quick: bool = False
    fault: str = ""

    @property
    def layouts(self) -> list[str]:
        """Three numbers of ranks, a kill and a preemption, in the fewest launches."""
        return ["1", f"3,kill@{self.kill}", f"2,term@{self.term}"]


TWICE = "what an epoch does before its loop is done again where the run goes on in the loop"

CASES = [
    # Optimizers and schedulers
    Case("mlp_step_lr", kill=13, term=10),
    Case("adamw_cosine_clip", kill=9, term=12),
    Case("cnn_onecycle", kill=9, term=12),
    Case("plateau_on_training_loss", kill=13, term=15, quick=True),
    Case("plateau_on_validation", kill=13, term=15),
    Case("adagrad_lambda_lr", kill=10, term=14),
    Case("rmsprop_sequential_lr", kill=14, term=6),
    Case("nadam_exponential", kill=13, term=10),
    Case("adafactor", kill=8, term=10),
    Case("lbfgs", refused="LBFGS.step was given a closure", quick=True),
    Case("asgd_weight_decay", kill=8, term=15),
    Case("lion_by_hand", kill=9, term=12),
    Case("two_optimizers", kill=9, term=12),
    Case("parameter_groups", kill=8, term=10),
    Case("tensor_learning_rate", kill=8, term=10),
    Case(
        "scheduler_not_given",
        refused="lr of group 0 of Adam changed within one global batch",
        quick=True,
    ),
    Case(
        "accumulation_by_hand", refused="SGD.step was called in some microbatches only", quick=True
    ),
    Case("scheduler_of_each_epoch", refused="run.scheduler was called again at", quick=True),
    Case("learning_rate_by_hand", kill=9, term=12),
    Case("scheduler_first", kill=8, term=10),
    Case("adamax_cyclic", kill=9, term=12),
    Case("warm_restarts", kill=8, term=10),
    Case("schedules_by_iteration", kill=9, term=17, quick=True),
    Case("langevin_noise", kill=9, term=14, quick=True),
    # Losses and data
    Case("bce_imbalanced", kill=8, term=10),
    Case("ctc_speech", kill=6, term=8),
    Case("infonce_two_views", kill=7, term=10),
    Case("triplet_margin", kill=8, term=10),
    Case("focal_detection", kill=9, term=12),
    Case("distillation", kill=8, term=15),
    Case("siamese_pairs", kill=8, term=10),
    Case("augmented_images", kill=8, term=10),
    Case("iterable_stream", kill=8, term=12),
    Case("subset_split", kill=8, term=12),
    Case("split_before_the_run", kill=8, term=10),
    Case("variable_lengths", kill=8, term=10),
    Case("length_buckets", kill=18, term=29, quick=True),
    Case("dataset_with_an_epoch", kill=8, term=10, quick=True),
    Case("hf_datasets_memory", kill=8, term=10, needs=("datasets",)),
    Case("image_folder", kill=8, term=12, needs=("torchvision",)),
    Case("growing_dataset", kill=8, term=6),
    Case("mixup_in_the_loop", kill=8, term=10),
    Case("digits_svm", kill=8, term=12),
    # Models
    Case("gpt2_transformers", kill=10, term=14, needs=("transformers",)),
    Case("timm_ema_mixup", kill=6, term=8, needs=("timm",)),
    Case("deeplab_segmentation", kill=5, term=6, needs=("torchvision",)),
    Case("dcgan", kill=11, term=16, quick=True),
    Case("vae", kill=9, term=12),
    Case("lstm_carried_state", kill=7, term=12, quick=True),
    Case("transformer_encoder", kill=8, term=12),
    Case("tied_weights", kill=8, term=10),
    Case("frozen_backbone", kill=8, term=12),
    Case("head_only_in_the_optimizer", kill=8, term=12),
    Case("gradient_checkpointing", kill=8, term=10),
    Case("embedding_max_norm", refused="has max_norm=1.0"),
    Case("denoising_autoencoder", kill=10, term=12),
    Case("reinforce_toy", kill=6, term=12),
    Case("actor_critic", kill=8, term=10),
    Case("early_stopping", kill=8, term=15),
    Case("spectral_norm_gan_penalty", kill=17, term=24),
    Case("learned_loss_weights", kill=9, term=12),
    Case("moco_queue", kill=6, term=8),
    Case("word2vec_negatives", kill=8, term=10),
    Case("physics_informed", kill=6, term=8),
    Case("normalizing_flow", kill=9, term=12),
    Case("diffusion", kill=9, term=12),
    Case("mixture_of_experts", kill=8, term=10),
    Case("ppo_old_policy", kill=8, term=10),
    Case("lora", kill=9, term=12),
    Case("bf16_autocast", kill=8, term=10),
    Case("replay_dqn", kill=7, term=6),
    Case("replay_dqn_counted", kill=7, term=6),
    Case("straight_through", kill=9, term=12),
    Case("graph_convolution", kill=8, term=10),
    Case("unet_dice", kill=8, term=10),
    Case("layer_drop", kill=8, term=10),
    Case("fourier_operator", kill=6, term=8),
    Case(
        "unfreezing_by_param_group",
        kill=8,
        term=10,
    ),
    Case("freezing_by_removed_group", kill=13, term=10, quick=True),
    Case("unfreezing_later", refused="trainable parameters; it had 2"),
    Case("lazy_layers", refused="a LazyLinear, has parameters without a shape yet"),
    Case("pruning_mid_run", kill=6, term=8),
    Case("clip_by_value", refused="clip_grad_value_ found no gradients"),
    Case("clip_by_value_of_the_run", kill=8, term=10),
    Case("grad_scaler", refused="torch.amp.GradScaler.step was called"),
    # Loops
    Case("name_after_the_loop", kill=8, term=10),
    Case("first_evaluation_is_used", kill=8, term=10),
    Case("evaluation_between_phases", kill=14, term=18),
    Case("evaluation_in_the_middle", kill=10, term=16),
    Case("monte_carlo_dropout", kill=8, term=10),
    Case("break_at_a_step", kill=8, term=12, quick=True),
    Case("while_steps_remain", kill=8, term=10),
    Case("next_on_an_iterator", kill=8, term=10),
    Case("two_loaders_zipped", refused="iterating over a loader was called inside a microbatch"),
    Case("learning_rate_finder", kill=8, term=15),
    Case("sampler_with_an_epoch", kill=8, term=10),
    Case(
        "cross_validation",
        kill=8,
        term=10,
        fault="verify takes the steps of all runs of a script for those of one",
    ),
    Case("pretrain_then_classify", kill=14, term=12),
    Case("retrieval_by_gather", kill=8, term=10),
    Case("drawn_on_one_rank", refused="on rank 1 are not those on rank 0", ranks=2),
    Case("pseudo_labels_in_a_variable", kill=8, term=10, fault=TWICE),
    # State
    Case("loss_window", kill=9, term=12, quick=True),
    Case("swa_update_bn", kill=9, term=24),
    Case("ema_between_batches", kill=9, term=12),
    Case("observer_in_eval", refused="in evaluation mode changed"),
    Case("numpy_state", kill=9, term=12),
    Case("save_best_and_export", kill=8, term=10),
]
