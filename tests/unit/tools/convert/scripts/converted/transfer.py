"""Fine-tuning: a frozen body, a new head, a dictionary of loaders, two phases in each epoch."""

import copy

import torch
import torch.nn as nn
import torch.optim as optim
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset
import lockstep

with lockstep.Run("transfer", seed=5, replicas=4) as run:
    # Data
    points = {x: torch.randn(count, 10) for x, count in (("train", 120), ("val", 40))}
    datasets = {x: TensorDataset(points[x], (points[x][:, 0] > 0).long()) for x in ("train", "val")}
    dataloaders = {x: DataLoader(datasets[x], batch_size=20, shuffle=True) for x in ("train", "val")}
    dataset_sizes = {x: len(datasets[x]) for x in ("train", "val")}


    class Pretrained(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(10, 20), nn.ReLU())
            self.fc = nn.Linear(20, 1000)

        def forward(self, x):
            return self.fc(self.body(x))


    def train_model(model, criterion, optimizer, scheduler, num_epochs=25):
        best_weights, best_acc = copy.deepcopy(model.state_dict()), 0.0
        for epoch in run.epochs(num_epochs):
            # Each epoch has a training and validation phase
            for phase in ["train", "val"]:
                model.train(phase == "train")
                running_loss, running_corrects = 0.0, 0
                # lockstep: question: the batches of this loop come from dataloaders[phase], not from a DataLoader that was found; every rank would train on all of them: go over run.loader(dataset, batch_size=...)
                for inputs, labels in dataloaders[phase]:
                    optimizer.zero_grad()
                    # track history if only in train
                    with torch.set_grad_enabled(phase == "train"):
                        outputs = model(inputs)
                        loss = criterion(outputs, labels)
                        if phase == "train":
                            run.backward(loss)
                            optimizer.step()
                    running_loss += loss.item() * inputs.size(0)
                    running_corrects += torch.sum(outputs.argmax(1) == labels)
                if phase == "train":
                    scheduler.step()
                epoch_acc = running_corrects.double() / dataset_sizes[phase]
                print(f"{phase} Loss: {running_loss / dataset_sizes[phase]:.4f} Acc: {epoch_acc:.4f}")
                if phase == "val" and epoch_acc > best_acc:
                    best_acc = epoch_acc
                    best_weights = copy.deepcopy(model.state_dict())
        model.load_state_dict(best_weights)
        return model


    model_conv = Pretrained()
    for param in model_conv.parameters():
        param.requires_grad = False

    # Parameters of newly constructed modules have requires_grad=True by default
    num_ftrs = model_conv.fc.in_features
    model_conv.fc = nn.Linear(num_ftrs, 2)
    model_conv = run.model(model_conv)

    criterion = nn.CrossEntropyLoss()

    # Observe that only parameters of final layer are being optimized
    optimizer_conv = run.optimizer(optim.SGD(model_conv.fc.parameters(), lr=0.1, momentum=0.9))
    exp_lr_scheduler = run.scheduler(lr_scheduler.StepLR(optimizer_conv, step_size=7, gamma=0.1))

    model_conv = train_model(model_conv, criterion, optimizer_conv, exp_lr_scheduler, num_epochs=3)
