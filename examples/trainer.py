"""`transformers.Trainer` through a run: a small GPT-2 with LoRA or without learns made sentences.

lockstep run -n 2 trainer.py            lockstep verify trainer.py --layouts 1 2 3 "2,kill@9"
"""

import argparse
import json

import cpu_torchvision  # noqa: F401 (transformers imports torchvision where it is installed)
import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments, set_seed

from lockstep.integrations.transformers import Trainer


class Sentences(Dataset[dict[str, torch.Tensor]]):
    """Arithmetic progressions of 6 to 20 tokens."""

    def __init__(self, size: int, first: int = 0) -> None:
        self.size, self.first = size, first

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        number = index + self.first
        start, step, length = number % 61, 1 + number % 7, 6 + number % 15
        return {"input_ids": (start + step * torch.arange(length)) % 61 + 1}


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    sentences = [row["input_ids"] for row in rows]
    padded = torch.nn.utils.rnn.pad_sequence(sentences, batch_first=True)
    labels = padded.masked_fill(padded == 0, -100)
    return {"input_ids": padded, "labels": labels, "attention_mask": (padded != 0).long()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=2)
    options = parser.parse_args()
    set_seed(42)  # of the first weights, which are drawn before the trainer is made
    config = GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2)
    config.bos_token_id = config.eos_token_id = None
    arguments = TrainingArguments(
        "trainer-out",
        per_device_train_batch_size=8,
        num_train_epochs=options.epochs,
        learning_rate=3e-3,
        logging_steps=5,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=GPT2LMHeadModel(config),
        args=arguments,
        train_dataset=Sentences(320),
        eval_dataset=Sentences(40, first=1000),
        data_collator=collate,
        replicas=4,
    )
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]
    if trainer.is_world_process_zero():
        print("loss", json.dumps(round(loss, 4)))


if __name__ == "__main__":
    main()
