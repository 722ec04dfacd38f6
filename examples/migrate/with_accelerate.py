"""The loop with Accelerate; torchrun and `accelerate launch` start it."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from task import Net, load
from torch.utils.data import DataLoader

train_set, test_set = load()
accelerator = Accelerator()
set_seed(0)
size = accelerator.num_processes
train = DataLoader(train_set, batch_size=64 // size, shuffle=True)
test = DataLoader(test_set, batch_size=256 // size)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)

for epoch in range(10):
    model.train()
    for images, labels in train:
        loss = F.cross_entropy(model(images), labels)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    model.eval()
    right = []
    with torch.no_grad():
        for x, y in test:
            guesses, answers = accelerator.gather_for_metrics((model(x).argmax(1), y))
            right.append(guesses == answers)
    accelerator.print(f"epoch {epoch}: test accuracy {torch.cat(right).float().mean():.2%}")

accelerator.end_training()
