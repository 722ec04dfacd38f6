"""timm: a ResNet from its registry, Mixup, SoftTargetCrossEntropy, ModelEmaV2, its cosine scheduler."""

import torch
from tests import vision  # noqa: F401 (lets a CPU build of torch import torchvision)
from timm import create_model
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV2
from torch.utils.data import TensorDataset

import lockstep

EPOCHS = 3

with lockstep.Run("timm", seed=0, replicas=3) as run:
    data = TensorDataset(torch.randn(48, 3, 32, 32), torch.randint(0, 4, (48,)))
    train = run.loader(data, batch_size=12, shuffle=True)
    net = create_model(
        "resnet10t", num_classes=4, channels=(4, 4, 8, 8), stem_width=4, drop_path_rate=0.1
    )
    ema = ModelEmaV2(net, decay=0.9)
    model = run.model(net)
    run.register("ema", ema.module)
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    scheduler = run.scheduler(CosineLRScheduler(optimizer, t_initial=EPOCHS, warmup_t=1))
    mixup = Mixup(mixup_alpha=0.2, cutmix_alpha=0.5, num_classes=4)
    criterion = SoftTargetCrossEntropy()
    for epoch in run.epochs(EPOCHS):
        for batch in run.batches(train):
            for images, labels in batch:
                images, targets = mixup(images, labels)
                loss = criterion(model(images), targets)
                run.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            ema.update(model)
        scheduler.step(epoch + 1)
