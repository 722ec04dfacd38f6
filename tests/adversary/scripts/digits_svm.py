"""Real scans from scikit-learn, a train/test split by scikit-learn, a hinge loss, top-2 accuracy."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import TensorDataset

import lockstep


def load():
    data, target = load_digits(return_X_y=True)
    parts = train_test_split(data / 16, target, train_size=300, test_size=90, random_state=0)
    x_train, x_test, y_train, y_test = parts
    return (
        TensorDataset(torch.tensor(x_train, dtype=torch.float32), torch.tensor(y_train)),
        TensorDataset(torch.tensor(x_test, dtype=torch.float32), torch.tensor(y_test)),
    )


with lockstep.Run("svm", seed=0, replicas=3) as run:
    train_set, test_set = load()
    train = run.loader(train_set, batch_size=50, shuffle=True)
    test = run.loader(test_set, batch_size=40)
    model = run.model(nn.Linear(64, 10))
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.5, weight_decay=1e-3))
    for epoch in run.epochs(4):
        for x, y in train:
            loss = F.multi_margin_loss(model(x), y)
            optimizer.zero_grad()
            run.backward(loss)
            optimizer.step()
        with torch.no_grad():
            top2 = run.mean((model(x).topk(2).indices == y[:, None]).any(1) for x, y in test)
        run.print(f"epoch {epoch}: {top2:.2%}")
