"""CTC on sequences of unequal length, a bidirectional GRU, clipping."""

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import Dataset

import lockstep


class Utterances(Dataset):
    def __init__(self, count=48):
        generator = torch.Generator().manual_seed(0)
        self.items = []
        for _ in range(count):
            length = int(torch.randint(12, 20, (1,), generator=generator))
            target = torch.randint(1, 6, (length // 4,), generator=generator)
            self.items.append((torch.randn(length, 5, generator=generator), target))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


def collate(samples):
    sounds, targets = zip(*samples, strict=True)
    return (
        pad_sequence(sounds, batch_first=True),
        torch.tensor([len(sound) for sound in sounds]),
        torch.cat(targets),
        torch.tensor([len(target) for target in targets]),
    )


class Recogniser(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(5, 12, batch_first=True, bidirectional=True)
        self.out = nn.Linear(24, 6)

    def forward(self, sounds, lengths):
        packed = pack_padded_sequence(sounds, lengths, batch_first=True, enforce_sorted=False)
        hidden, _ = pad_packed_sequence(self.gru(packed)[0], batch_first=True)
        return self.out(hidden).log_softmax(2).transpose(0, 1)


with lockstep.Run("ctc", seed=0, replicas=3) as run:
    model = run.model(Recogniser())
    optimizer = run.optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
    train = run.loader(Utterances(), batch_size=12, shuffle=True, collate_fn=collate)
    ctc = nn.CTCLoss(zero_infinity=True)
    for _epoch in run.epochs(4):
        for sounds, lengths, targets, target_lengths in train:
            loss = ctc(model(sounds, lengths), targets, lengths, target_lengths)
            optimizer.zero_grad()
            run.backward(loss)
            run.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
