"""DeepLabV3 of torchvision with its auxiliary head, an ignored class, a polynomial schedule."""

import torch
import torch.nn.functional as F
from tests import vision  # noqa: F401 (lets a CPU build of torch import torchvision)
from torch.utils.data import Dataset
from torchvision.models.mobilenetv3 import MobileNetV3, _mobilenet_v3_conf
from torchvision.models.segmentation.deeplabv3 import _deeplabv3_mobilenetv3

import lockstep


class Scenes(Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, index):
        image = torch.rand(3, 33, 33)
        mask = (image[0] * 4).long()
        mask[0] = 255
        return image, mask


with lockstep.Run("deeplab", seed=1, replicas=3) as run:
    settings, last = _mobilenet_v3_conf("mobilenet_v3_large", width_mult=0.1, dilated=True)
    model = run.model(_deeplabv3_mobilenetv3(MobileNetV3(settings, last), num_classes=4, aux=True))
    train = run.loader(Scenes(), batch_size=6, shuffle=True, drop_last=True)
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
    poly = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=9, power=0.9)
    scheduler = run.scheduler(poly)
    for _epoch in run.epochs(3):
        model.train()
        for images, masks in train:
            output = model(images)
            loss = F.cross_entropy(output["out"], masks, ignore_index=255)
            loss = loss + 0.5 * F.cross_entropy(output["aux"], masks, ignore_index=255)
            optimizer.zero_grad()
            run.backward(loss)
            optimizer.step()
            scheduler.step()
