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
        needs: distributions that are not among those of every test.
        quick: whether it is one of those that every run of the tests has.
        fault: why its layouts differ as long as they do.
    """

    name: str
    kill: int = 0
    term: int = 0
    refused: str = ""
    needs: tuple[str, ...] = ()
    quick: bool = False
    fault: str = ""

    @property
    def layouts(self) -> list[str]:
        """Three numbers of ranks, a kill and a preemption, in the fewest launches."""
        return ["1", f"3,kill@{self.kill}", f"2,term@{self.term}"]


PASSED_OVER = "run.mean on the way back covers only what is computed again"
LEARNING_RATE = "a learning rate that is a tensor is compared with itself"

WORKERS = "persistent workers keep the dataset that they were forked with"
LAST_NAME = "a name assigned in the loop's body is missing after a resume at its end"

CASES = [
    # Optimizers and schedulers
    Case("mlp_step_lr", kill=13, term=10, quick=True),
    Case("adamw_cosine_clip", kill=9, term=12, quick=True),
    Case("cnn_onecycle", kill=9, term=12, quick=True),
    Case("plateau_on_training_loss", kill=13, term=15, fault=PASSED_OVER),
    Case("plateau_on_validation", kill=13, term=15, quick=True),
    Case("adagrad_lambda_lr", kill=10, term=14, quick=True),
    Case("rmsprop_sequential_lr", kill=14, term=6, quick=True),
    Case("nadam_exponential", kill=13, term=10, quick=True),
    Case("adafactor", kill=8, term=10, quick=True),
    Case("lbfgs", refused="LBFGS.step was given a closure", quick=True),
    Case("asgd_weight_decay", kill=8, term=15, quick=True),
    Case("lion_by_hand", kill=9, term=12, quick=True),
    Case("two_optimizers", kill=9, term=12, quick=True),
    Case("parameter_groups", kill=8, term=10, quick=True),
    Case("tensor_learning_rate", kill=8, term=10, quick=True),
    Case(
        "scheduler_not_given",
        refused="the learning rates of Adam changed within one global batch",
        fault=LEARNING_RATE,
    ),
    Case("accumulation_by_hand", refused="replicas", quick=True),
    Case("learning_rate_by_hand", kill=9, term=12, quick=True),
    Case("adamax_cyclic", kill=9, term=12, quick=True),
    Case("warm_restarts", kill=8, term=10, quick=True),
    # Losses and data
    Case("bce_imbalanced", kill=8, term=10),
    Case("ctc_speech", kill=6, term=8),
    Case("infonce_two_views", kill=7, term=10, quick=True),
    Case("triplet_margin", kill=8, term=10, quick=True),
    Case("focal_detection", kill=9, term=12, quick=True),
    Case("distillation", kill=8, term=15, quick=True),
    Case("siamese_pairs", kill=8, term=10, quick=True),
    Case("augmented_images", kill=8, term=10, quick=True),
    Case("iterable_stream", kill=8, term=12, quick=True),
    Case("subset_split", kill=8, term=12, quick=True),
    Case("split_before_the_run", kill=8, term=10, quick=True),
    Case("variable_lengths", kill=8, term=10, quick=True),
    Case("dataset_with_an_epoch", kill=8, term=10, fault=WORKERS),
    Case("hf_datasets_memory", kill=8, term=10, needs=("datasets",)),
    Case("image_folder", kill=8, term=12, needs=("torchvision",)),
    Case("growing_dataset", kill=8, term=6, quick=True),
    Case("mixup_in_the_loop", kill=8, term=10),
    Case("digits_svm", kill=8, term=12),
    # Models
    Case(
        "gpt2_transformers", kill=10, term=14, quick=True, needs=("transformers",), fault=LAST_NAME
    ),
    Case("timm_ema_mixup", kill=6, term=8, needs=("timm",)),
    Case("deeplab_segmentation", kill=5, term=6, needs=("torchvision",)),
    Case("dcgan", kill=11, term=16, quick=True),
    Case("vae", kill=9, term=12, quick=True),
    Case("lstm_carried_state", kill=7, term=12, quick=True),
    Case("transformer_encoder", kill=8, term=12),
    Case("tied_weights", kill=8, term=10, quick=True),
    Case("frozen_backbone", kill=8, term=12),
    Case("head_only_in_the_optimizer", kill=8, term=12, fault="other gradients are not cleared"),
    Case("gradient_checkpointing", kill=8, term=10, quick=True),
    Case("embedding_max_norm", refused="max_norm", fault="weights that forward changes"),
    Case("denoising_autoencoder", kill=10, term=12),
    Case("reinforce_toy", kill=6, term=12, fault=PASSED_OVER),
    Case("actor_critic", kill=8, term=10),
    Case("early_stopping", kill=8, term=15, quick=True),
]
