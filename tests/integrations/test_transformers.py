"""`Trainer` of transformers through a run: one digest and one log on every layout."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

from lockstep.integrations.refusals import GENERATING
from tests.conftest import Lockstep
from tests.integrations.scripts import ENV, LAYOUTS, TEXT, result_of, verified

EVERYTHING = (
    TEXT
    + """
import numpy as np
from lockstep.integrations.transformers import Trainer
from transformers import EarlyStoppingCallback

class Count(TrainerCallback):
    steps = 0
    def on_step_end(self, args, state, control, **rest):
        self.steps += 1

def metrics(predicted):
    counts = predicted.label_ids != -100
    right = predicted.predictions.argmax(-1) == predicted.label_ids
    return {"accuracy": right[counts].mean(), "sum": np.float64(predicted.predictions[:, :8].sum())}

args = arguments(num_train_epochs=2, eval_strategy="steps", eval_steps=3, save_strategy="steps", save_steps=3,
    lr_scheduler_type="cosine", max_grad_norm=0.5, load_best_model_at_end=True, metric_for_best_model="accuracy",
    gradient_accumulation_steps=2, include_num_input_tokens_seen="all", save_total_limit=2)
count = Count()
trainer = Trainer(model=gpt2(), args=args, train_dataset=Text(107), eval_dataset=Text(31, 1000),
    data_collator=collate, compute_metrics=metrics, callbacks=[count, EarlyStoppingCallback(9)], replicas=2)
trainer.train()
evaluated = trainer.evaluate()
predictions = trainer.predict(Text(9, 2000)).predictions
results(trainer, steps=count.steps, loss=evaluated["eval_loss"], predicted=[*predictions.shape, float(predictions.sum())],
    best=trainer.state.best_model_checkpoint)
"""
)


def test_everything_that_a_trainer_does_is_the_same_on_every_layout(lockstep: Lockstep) -> None:
    """Accumulation, logs, evaluation, callbacks, early stopping, saves, the best model, predictions."""
    results = verified(lockstep, EVERYTHING)
    assert results == [results[0]] * len(LAYOUTS)
    result = json.loads(results[0])
    assert result["steps"] == 14
    assert result["predicted"][0] == 9
    assert [entry["step"] for entry in result["log"] if "loss" in entry] == [2, 4, 6, 8, 10, 12, 14]


def test_a_checkpoint_is_one_of_transformers_and_training_resumes_from_it(
    lockstep: Lockstep,
) -> None:
    """On two ranks to a checkpoint in the middle of epoch 1, and from there on three: as without a stop."""
    script = lockstep.script(
        TEXT
        + """
from lockstep.integrations.transformers import Trainer
args = arguments(num_train_epochs=2, save_strategy="steps", save_steps=5, logging_steps=1)
trainer = Trainer(model=gpt2(), args=args, train_dataset=Text(60), data_collator=collate, replicas=4)
trainer.train(resume_from_checkpoint=sys.argv[1] if len(sys.argv) > 1 else None)
results(trainer)
"""
    )
    whole = lockstep("run", "-n", "2", script, env=ENV)
    assert whole.code == 0, whole.err
    files = {file.name for file in (lockstep.directory / "out/checkpoint-5").iterdir()}
    assert files >= {"config.json", "model.safetensors", "optimizer.pt", "scheduler.pt"}
    assert files >= {"trainer_state.json", "training_args.bin", "rng_state.pth"}
    assert not any(name.startswith("rng_state_") for name in files)
    resumed = lockstep("run", "-n", "3", script, "out/checkpoint-5", env=ENV)
    assert resumed.code == 0, resumed.err
    logs = [json.loads(result_of(done.out))["log"][:-1] for done in (whole, resumed)]
    assert logs[0] == logs[1]
    assert len(logs[0]) == 8


def test_the_losses_are_those_of_a_plain_trainer(lockstep: Lockstep) -> None:
    """In one order and without dropout: a batch of 16 in one process, and four replicas of 4."""
    script = lockstep.script(
        TEXT
        + """
if sys.argv[1] == "plain":
    from transformers import Trainer
else:
    from functools import partial
    from lockstep.integrations.transformers import Trainer
    Trainer = partial(Trainer, replicas=4)
size = 16 if sys.argv[1] == "plain" else 4
args = arguments(num_train_epochs=2, per_device_train_batch_size=size, per_device_eval_batch_size=4,
    train_sampling_strategy="sequential", logging_steps=1, eval_strategy="epoch")
torch.manual_seed(1)
model = gpt2(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
trainer = Trainer(model=model, args=args, train_dataset=Text(60), eval_dataset=Text(16, 500), data_collator=collate)
trainer.train()
results(trainer)
"""
    )
    plain = lockstep.python(script, "plain", env=ENV)
    assert plain.code == 0, plain.err
    ours = lockstep("run", "-n", "2", script, "lockstep", env=ENV)
    assert ours.code == 0, ours.err
    logs = [json.loads(result_of(done.out))["log"] for done in (plain, ours)]
    assert len(logs[0]) == len(logs[1])
    for theirs, own in zip(*logs, strict=True):
        theirs.pop("total_flos", None)  # of another padding: batches of 16 and of 4
        own.pop("total_flos", None)
        assert own == pytest.approx(theirs, rel=2e-4)


LOGGED_BY_ONE = (
    TEXT
    + """
from lockstep.integrations.transformers import Trainer

class Own(Trainer):
    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
        output = self.evaluation_loop(self.get_eval_dataloader(), "Evaluation", True)
        if self.args.should_log:
            self.log(output.metrics)
        return output.metrics

args = arguments(num_train_epochs=2, eval_strategy="steps", eval_steps=3, save_strategy="steps", save_steps=4)
trainer = Own(model=gpt2(), args=args, train_dataset=Text(60), eval_dataset=Text(16, 500), data_collator=collate)
trainer.train()
trainer.evaluate()
results(trainer)
"""
)


def test_entries_that_a_subclass_logs_on_the_main_rank_alone(lockstep: Lockstep) -> None:
    """As the trainers of transformers' own examples for question answering do in `evaluate`."""
    found = verified(lockstep, LOGGED_BY_ONE, "1", "2", "2,kill@5")
    assert found == [found[0]] * 3
    log = json.loads(found[0])["log"]
    assert [entry["step"] for entry in log if "eval_loss" in entry][:3] == [3, 6, 8]


OWN_LOADERS = (
    TEXT
    + """
from torch.utils.data import DataLoader, IterableDataset
from lockstep.integrations.transformers import Trainer

is_initialized = []

class Augmented(Text):
    def __getitem__(self, index):
        assert is_initialized, "worker_init_fn was not called"
        return {"input_ids": (super().__getitem__(index)["input_ids"] + torch.randint(0, 5, ())) % 64}

class Own(Trainer):
    def get_train_dataloader(self):
        return DataLoader(self.train_dataset, self.args.train_batch_size, shuffle=True, collate_fn=collate,
            num_workers=2, worker_init_fn=is_initialized.append)
    def get_eval_dataloader(self, eval_dataset=None):
        return DataLoader(self.eval_dataset, 5, collate_fn=collate)

class Stream(IterableDataset):
    def __iter__(self):
        yield from map(Text(45).__getitem__, range(45))

made = {"args": arguments(max_steps=3, dataloader_drop_last=True), "data_collator": collate, "replicas": 4}
trainer = Own(model=gpt2(), train_dataset=Augmented(61), eval_dataset=Text(13, 500), **made)
trainer.train()
trainer.train()  # again, with the optimizer of the first time
losses = [trainer.evaluate()["eval_loss"]]
trainer = Trainer(model=gpt2(), train_dataset=Stream(), eval_dataset=Stream(), **made)
trainer.train()
predicted = [len(trainer.predict(Text(size, 900)).predictions) for size in (2, 31)]
results(trainer, losses=[*losses, trainer.evaluate()["eval_loss"]], predicted=predicted)
"""
)


def test_own_loaders_streams_and_a_second_training_are_the_same_on_every_layout(
    lockstep: Lockstep,
) -> None:
    results = verified(lockstep, OWN_LOADERS, "1", "3", "2,kill@5")
    assert results == [results[0]] * 3
    result = json.loads(results[0])
    assert len(result["losses"]) == 2
    assert result["predicted"] == [2, 31]  # dataloader_drop_last is for training


def test_a_run_that_dies_before_its_first_snapshot_begins_again_as_it_began(
    lockstep: Lockstep,
) -> None:
    """With `resume_from_checkpoint` if there is a checkpoint, as scripts do that are started again by hand."""
    script = lockstep.script(
        TEXT
        + """
import os, pathlib, signal
from lockstep.integrations.transformers import Trainer

class Kill(TrainerCallback):
    def on_save(self, args, state, control, **rest):
        if len(sys.argv) > 1 and trainer._run.is_main_process and not pathlib.Path("killed").exists():
            pathlib.Path("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)

args = arguments(num_train_epochs=2, save_strategy="steps", save_steps=1, logging_steps=1)
args.output_dir = "out" + str(len(sys.argv))
has_checkpoint = any(pathlib.Path(args.output_dir).glob("checkpoint-*"))
trainer = Trainer(model=gpt2(), args=args, train_dataset=Text(45), data_collator=collate, replicas=4, callbacks=[Kill()])
trainer.train(resume_from_checkpoint=has_checkpoint)
files = {file.name for file in pathlib.Path(args.output_dir, "checkpoint-6").iterdir()}
assert "trainer_state.json" in files  # what the main rank writes last, seen by each rank
results(trainer)
"""
    )
    results = []
    for words in ((), ("kill",)):
        done = lockstep("run", "-n", "2", script, *words, env=ENV)
        assert done.code == 0, done.err
        assert ("restart 1" in done.err) == bool(words)
        assert "lockstep: warning" not in done.err
        digest = next(line.split()[-1] for line in done.out.splitlines() if "finished" in line)
        results.append((digest, result_of(done.out)))
    assert results[0] == results[1]


def test_lora_is_the_same_on_every_layout(lockstep: Lockstep) -> None:
    if importlib.util.find_spec("peft") is None:
        pytest.skip("needs peft, of the extra `test`")
    results = verified(
        lockstep,
        TEXT
        + """
from lockstep.integrations.transformers import Trainer
from peft import LoraConfig, get_peft_model
lora = LoraConfig(r=4, task_type="CAUSAL_LM", lora_dropout=0.1, target_modules=["c_attn"], fan_in_fan_out=True)
args = arguments(num_train_epochs=2, eval_strategy="epoch", save_strategy="epoch", load_best_model_at_end=True)
trainer = Trainer(model=get_peft_model(gpt2(), lora), args=args, train_dataset=Text(60), eval_dataset=Text(10, 500),
    data_collator=collate, replicas=4)
trainer.train()
results(trainer)
""",
    )
    assert results == [results[0]] * len(LAYOUTS)


REFUSED = {
    "torch_compile": 'arguments(torch_compile=True, torch_compile_backend="eager")',
    "batch_rebalance": 'arguments(train_sampling_strategy="batch_rebalance")',
    "dispatch_batches": 'arguments(accelerator_config={"dispatch_batches": True})',
    "auto_find_batch_size": "arguments(auto_find_batch_size=True)",
    "data_seed": "arguments(data_seed=3)",
    "eval_do_concat_batches": "arguments(eval_do_concat_batches=False)",
}


def test_the_trainers_of_trl_that_generate_are_known_by_name() -> None:
    """Those of the installed version: a new one must be refused, too, or tried."""
    spec = importlib.util.find_spec("trl")
    if spec is None:
        pytest.skip("needs trl, of the extra `adversary`")
    generating = set()
    for file in Path(str(spec.origin)).parent.rglob("*_trainer.py"):
        text = file.read_text()
        if re.search(r"def _generate|unwrap_model_for_generation|vllm", text):
            generating |= set(re.findall(r"^class (\w+Trainer)\(", text, re.MULTILINE))
    assert generating <= {*GENERATING, "ServerDistillationTrainer"}  # a DistillationTrainer
    assert "GRPOTrainer" in generating


def test_options_that_cannot_be_exact_are_refused_by_name(lockstep: Lockstep) -> None:
    script = lockstep.script(
        TEXT
        + f"""
from lockstep.errors import UsageError
from lockstep.integrations.transformers import LockstepTrainer, Trainer
import transformers
for option, made in {REFUSED!r}.items():
    try:
        Trainer(model=gpt2(), args=eval(made), train_dataset=Text(8), data_collator=collate, replicas=4)
    except UsageError as error:
        assert option in error.message and error.hint, (option, error)
        print("refused", option)
for name in {GENERATING!r}:
    trainer = type(name, (transformers.Trainer,), {{}})
    try:
        type("Own", (LockstepTrainer, trainer), {{}})(model=gpt2(), args=arguments(), replicas=4)
    except UsageError as error:
        print("refused", error.message.split()[0])
Trainer(model=gpt2(), args=arguments(gradient_accumulation_steps=2), train_dataset=Text(8))
"""
    )
    done = lockstep.python(script, env=ENV)
    refused = [line.split()[1] for line in done.out.splitlines() if line.startswith("refused")]
    assert refused == [*REFUSED, *GENERATING], done.err
    assert done.code == 1
    assert "gradient_accumulation_steps=2 without replicas" in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    "failure", ['raise ValueError("of the script")', 'print("of the script"); sys.exit(1)']
)
def test_a_script_that_fails_fails_its_run(lockstep: Lockstep, failure: str) -> None:
    """One that fails after training: the run has no `with` block that would see the error."""
    script = lockstep.script(
        TEXT
        + """
from lockstep.integrations.transformers import Trainer
trainer = Trainer(model=gpt2(), args=arguments(max_steps=2), train_dataset=Text(60), data_collator=collate, replicas=4)
trainer.train()
"""
        + failure
    )
    for words in (("run", "-n", "2", script), None):
        done = lockstep(*words, env=ENV) if words else lockstep.python(script, env=ENV)
        assert done.code == 1
        assert "of the script" in done.err + done.out
        assert "lockstep: finished" not in done.out + done.err
