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
]
