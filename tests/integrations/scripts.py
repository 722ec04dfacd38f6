"""Pieces of scripts as users of the frameworks write them, on a GPT-2 of two layers and made sequences."""

from __future__ import annotations

import json
from pathlib import Path

from tests.conftest import Lockstep

ROOT = Path(__file__).parents[2]
ENV = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
#: Three numbers of ranks, a kill in the middle of an epoch, and a run that continues on fewer ranks.
LAYOUTS = ("1", "2", "3", "2,kill@5", "2>1@6")

TEXT = """
from tests import vision
import json, sys
import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments

class Text(Dataset):
    def __init__(self, size, first=0):
        self.size, self.first = size, first
    def __len__(self):
        return self.size
    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index + self.first)
        length = 8 + int(torch.randint(0, 9, (1,), generator=generator))
        return {"input_ids": torch.randint(1, 64, (length,), generator=generator)}

def collate(rows):
    shape = len(rows), max(len(row["input_ids"]) for row in rows)
    ids, labels = torch.zeros(shape, dtype=torch.long), torch.full(shape, -100)
    for row, own, label in zip(rows, ids, labels):
        length = len(row["input_ids"])
        own[:length] = label[:length] = row["input_ids"]
    return {"input_ids": ids, "labels": labels, "attention_mask": (labels != -100).long()}

def gpt2(**settings):
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=2, n_head=2, **settings))

def arguments(**settings):
    return TrainingArguments("out", **{"use_cpu": True, "per_device_train_batch_size": 4, "learning_rate": 1e-3,
        "per_device_eval_batch_size": 3, "report_to": [], "disable_tqdm": True, "logging_steps": 2,
        "save_strategy": "no", **settings})

def results(trainer, **more):
    times = "_runtime", "_per_second"
    kept = [{k: v for k, v in e.items() if not k.endswith(times)} for e in trainer.state.log_history]
    if trainer.is_world_process_zero():
        print("RESULT", json.dumps({"log": kept, **more}))
"""


def verified(lockstep: Lockstep, script: str, *layouts: str, timeout: float = 240) -> list[str]:
    """Verify a script with four replicas; return what each layout printed as its result, the last time."""
    words = ("--replicas", "4", "--json", "--keep-runs", "kept", "--layouts", *(layouts or LAYOUTS))
    done = lockstep("verify", lockstep.script(script), *words, env=ENV, timeout=timeout)
    verdict = json.loads(done.out.splitlines()[-1]) if done.out else {}
    assert done.code == 0, done.err + done.out
    assert verdict["same"]
    outputs = sorted((lockstep.directory / "kept").glob("*/output.txt"))
    return [result_of(output.read_text()) for output in outputs]


def result_of(text: str) -> str:
    """Return the last result in what a script has printed."""
    return [line.partition("RESULT ")[2] for line in text.splitlines() if "RESULT " in line][-1]
