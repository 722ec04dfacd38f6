"""GPT-2 of transformers, built from its config, on blocks of one long text; warmup and cosine."""

import torch
from tests import vision  # noqa: F401 (transformers imports torchvision; this lets it, beside a CPU build)
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, get_cosine_schedule_with_warmup

import lockstep

BLOCK = 16


class Text(Dataset):
    def __init__(self):
        text = "the quick brown fox jumps over the lazy dog and " * 24
        self.tokens = torch.tensor([ord(letter) % 64 for letter in text])

    def __len__(self):
        return (len(self.tokens) - 1) // BLOCK

    def __getitem__(self, index):
        return self.tokens[index * BLOCK : (index + 1) * BLOCK]


def main():
    with lockstep.Run("gpt2", seed=0, replicas=3) as run:
        config = GPT2Config(vocab_size=64, n_positions=BLOCK, n_embd=24, n_layer=2, n_head=2)
        model = run.model(GPT2LMHeadModel(config))
        optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=3e-3))
        train = run.loader(Text(), batch_size=12, shuffle=True)
        scheduler = run.scheduler(get_cosine_schedule_with_warmup(optimizer, 4, 3 * len(train)))
        for epoch in run.epochs(3):
            model.train()
            for batch in train:
                loss = model(input_ids=batch, labels=batch).loss
                run.backward(loss)
                run.clip_grad_norm_(model, 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            run.print(f"epoch {epoch}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
