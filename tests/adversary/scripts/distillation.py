"""A teacher is trained first, in the same run; then a student learns from its softened outputs."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep

T = 4.0

with lockstep.Run("distil", seed=3, replicas=3) as run:
    x = torch.randn(90, 8)
    data = TensorDataset(x, x.argmax(1) % 3)
    loader = run.loader(data, batch_size=18, shuffle=True)
    teacher = run.model(nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Dropout(), nn.Linear(64, 3)))
    student = run.model(nn.Linear(8, 3))
    teacher_opt = run.optimizer(torch.optim.Adam(teacher.parameters(), lr=0.01))
    student_opt = run.optimizer(torch.optim.SGD(student.parameters(), lr=0.1))

    for _epoch in run.epochs(2):
        for inputs, labels in loader:
            teacher_opt.zero_grad()
            run.backward(F.cross_entropy(teacher(inputs), labels))
            teacher_opt.step()

    teacher.eval()
    for _epoch in run.epochs(3):
        for inputs, labels in loader:
            with torch.no_grad():
                soft = F.softmax(teacher(inputs) / T, dim=1)
            logits = student(inputs)
            kl = F.kl_div(F.log_softmax(logits / T, dim=1), soft, reduction="batchmean") * T * T
            loss = 0.7 * kl + 0.3 * F.cross_entropy(logits, labels)
            student_opt.zero_grad()
            run.backward(loss)
            student_opt.step()
