"""Trainers that stand on `transformers.Trainer`: one digest and equal logs on one rank and on two."""

from __future__ import annotations

import importlib.util
import json

import pytest

from tests.conftest import Lockstep
from tests.integrations.scripts import TEXT, verified

IMAGES = (
    TEXT
    + """
from sklearn.datasets import load_digits
from transformers import ViTConfig, ViTForImageClassification
from lockstep.integrations.transformers import Trainer

pixels, digits = load_digits(return_X_y=True)

class Digits(Dataset):
    def __init__(self, first, last):
        self.rows = range(first, last)
    def __len__(self):
        return len(self.rows)
    def __getitem__(self, index):
        noise = torch.rand(1, 8, 8) / 4  # augmentation
        image = torch.tensor(pixels[self.rows[index]], dtype=torch.float32).view(1, 8, 8) / 16
        return {"pixel_values": image + noise, "labels": int(digits[self.rows[index]])}

def accuracy(predicted):
    return {"accuracy": float((predicted.predictions.argmax(-1) == predicted.label_ids).mean())}

model = ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, num_channels=1, hidden_size=16, intermediate_size=32,
    num_hidden_layers=1, num_attention_heads=2, num_labels=10, hidden_dropout_prob=0.1))
trainer = Trainer(model=model, args=arguments(num_train_epochs=1, eval_strategy="epoch", remove_unused_columns=False),
    train_dataset=Digits(0, 90), eval_dataset=Digits(90, 121), compute_metrics=accuracy, replicas=4)
trainer.train()
results(trainer)
"""
)
WORDS = """
import datasets
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

datasets.disable_progress_bars()
words = [f"w{number}" for number in range(60)]
tokens = Tokenizer(models.WordLevel({w: n for n, w in enumerate(["<pad>", "<eos>", "<unk>", *words])}, unk_token="<unk>"))
tokens.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")

def sentence(number, length):
    return " ".join(words[(number * 7 + place * place) % 60] for place in range(length))

def table(size, **columns):
    return datasets.Dataset.from_list([{name: column(n) for name, column in columns.items()} for n in range(size)])

def small(config, **settings):
    return config(**{"output_dir": "out", "use_cpu": True, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 3,
        "learning_rate": 1e-3, "report_to": [], "disable_tqdm": True, "logging_steps": 2, "save_strategy": "no",
        "bf16": False, "num_train_epochs": 1, "eval_strategy": "epoch", **settings})
"""
SFT = (
    TEXT
    + WORDS
    + """
from trl import SFTConfig, SFTTrainer
from lockstep.integrations.transformers import LockstepTrainer

class Tuner(LockstepTrainer, SFTTrainer):
    pass

rows = {"text": lambda n: sentence(n, 4 + n % 9)}
trainer = Tuner(model=gpt2(), args=small(SFTConfig, max_length=24), train_dataset=table(45, **rows),
    eval_dataset=table(10, **rows), processing_class=tokenizer, replicas=4)
trainer.train()
results(trainer)
"""
)
DPO = (
    TEXT
    + WORDS
    + """
from trl import DPOConfig, DPOTrainer
from lockstep.integrations.transformers import LockstepTrainer

class Aligner(LockstepTrainer, DPOTrainer):
    pass

rows = {"prompt": lambda n: sentence(n, 3 + n % 4) + " ", "chosen": lambda n: sentence(n + 1, 2 + n % 5),
    "rejected": lambda n: sentence(n + 2, 3 + n % 3)}
trainer = Aligner(model=gpt2(), ref_model=gpt2(), args=small(DPOConfig, max_length=24), train_dataset=table(45, **rows),
    eval_dataset=table(10, **rows), processing_class=tokenizer, replicas=4)
trainer.train()
results(trainer)
"""
)
SENTENCES = (
    TEXT
    + WORDS
    + """
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.losses import MultipleNegativesRankingLoss
from sentence_transformers.models import StaticEmbedding
from lockstep.integrations.transformers import LockstepTrainer

class Embedder(LockstepTrainer, SentenceTransformerTrainer):
    pass

model = SentenceTransformer(modules=[StaticEmbedding(tokens, embedding_dim=16)], device="cpu")
rows = {"anchor": lambda n: sentence(n, 4 + n % 9), "positive": lambda n: sentence(n + 1, 5)}
trainer = Embedder(model=model, args=small(SentenceTransformerTrainingArguments), train_dataset=table(45, **rows),
    eval_dataset=table(11, **rows), loss=MultipleNegativesRankingLoss(model), replicas=4)
trainer.train()
results(trainer)
"""
)
LORA = (
    TEXT
    + WORDS
    + """
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
from lockstep.integrations.transformers import LockstepTrainer

class Tuner(LockstepTrainer, SFTTrainer):
    pass

rows = {"text": lambda n: sentence(n, 4 + n % 9)}
lora = LoraConfig(r=4, task_type="CAUSAL_LM", lora_dropout=0.1, target_modules=["c_attn"], fan_in_fan_out=True)
trainer = Tuner(model=gpt2(), args=small(SFTConfig, max_length=24), train_dataset=table(45, **rows),
    eval_dataset=table(10, **rows), processing_class=tokenizer, peft_config=lora, replicas=4)
trainer.train()
results(trainer)
"""
)
FAMILIES = {
    "image": (IMAGES, "sklearn"),
    "sft": (SFT, "trl"),
    "dpo": (DPO, "trl"),
    "sentences": (SENTENCES, "sentence_transformers"),
    "lora": (LORA, "trl"),
}


@pytest.mark.parametrize(
    "family",
    ["image", *(pytest.param(name, marks=pytest.mark.wide) for name in list(FAMILIES)[1:])],
)
def test_a_family_has_one_digest_and_equal_logs(lockstep: Lockstep, family: str) -> None:
    script, package = FAMILIES[family]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}, of the extra `adversary`")
    results = verified(lockstep, script, "1", "2")
    assert results[0] == results[1]
    log = json.loads(results[0])["log"]
    assert [entry["step"] for entry in log if "loss" in entry] == [2, 4, 6]
    assert [entry["step"] for entry in log if "eval_loss" in entry] == [6]
