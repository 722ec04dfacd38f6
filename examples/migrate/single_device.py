"""The loop for one device."""

import torch
import torch.nn.functional as F
from task import Net, load
from torch.utils.data import DataLoader

train_set, test_set = load()
torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
train = DataLoader(train_set, batch_size=64, shuffle=True)
test = DataLoader(test_set, batch_size=256)
model = Net().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

for epoch in range(10):
    model.train()
    for images, labels in train:
        images, labels = images.to(device), labels.to(device)
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    model.eval()
    with torch.no_grad():
        right = [model(x.to(device)).argmax(1).cpu() == y for x, y in test]
    print(f"epoch {epoch}: test accuracy {torch.cat(right).float().mean():.2%}")
