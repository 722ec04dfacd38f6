"""A datasets.Dataset made in memory, tokenised by map, in torch's format, with a collate function."""

import torch
import torch.nn.functional as F
from datasets import Dataset
from torch import nn

import lockstep


def tokenize(example):
    return {"ids": [ord(letter) % 40 for letter in example["text"][:12].ljust(12)]}


def collate(rows):
    return torch.stack([row["ids"] for row in rows]), torch.stack([row["label"] for row in rows])


texts = [f"example number {i * 7919 % 1000} of many" for i in range(60)]
raw = Dataset.from_dict({"text": texts, "label": [i % 2 for i in range(60)]})

with lockstep.Run("hf", seed=2, replicas=3) as run:
    train_set = raw.map(tokenize).with_format("torch", columns=["ids", "label"])
    train = run.loader(train_set, batch_size=12, shuffle=True, collate_fn=collate)
    model = run.model(nn.Sequential(nn.Embedding(40, 8), nn.Flatten(), nn.Linear(96, 2)))
    optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    for _epoch in run.epochs(4):
        for ids, labels in train:
            loss = F.cross_entropy(model(ids), labels)
            run.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
