# Digits by a small network, all in one file.
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import lockstep

with lockstep.Run("straight", seed=7, replicas=4) as run:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    # Data
    images = torch.rand(240, 1, 8, 8)
    labels = images.mean(dim=(2, 3)).flatten().mul(1000).long() % 10
    train_loader = run.loader(DataLoader(TensorDataset(images[:192], labels[:192]), batch_size=32, shuffle=True))
    test_loader = DataLoader(TensorDataset(images[192:], labels[192:]), batch_size=48)


    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(1, 8, 3)
            self.fc = nn.Linear(8 * 6 * 6, 10)

        def forward(self, x):
            x = F.relu(self.conv(x))
            return self.fc(torch.flatten(x, 1))


    # Model
    model = run.model(Net().to(device))
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))

    for epoch in run.epochs(3):
        model.train()
        for data, target in train_loader:
            data, target = data.to(device), target.to(device)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data), target)
            run.backward(loss)  # gradients of the mean
            optimizer.step()

        model.eval()
        correct = 0
        with torch.no_grad():
            for data, target in test_loader:
                data, target = data.to(device), target.to(device)
                correct += (model(data).argmax(1) == target).sum().item()
        print(f"epoch {epoch}: loss {loss.item():.4f}, accuracy {correct / len(test_loader.dataset):.2%}")

    run.export("digits.pt", model)
