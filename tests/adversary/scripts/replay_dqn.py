"""DQN: steps on a toy chain are collected between epochs into a registered replay memory."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep


class Memory(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.register_buffer("rows", torch.zeros(size, 4))
        self.register_buffer("used", torch.tensor(0))

    def extend(self, rows):
        rows = torch.cat([rows, self.rows[: self.used]])[: len(self.rows)]
        self.rows[: len(rows)] = rows
        self.used.fill_(len(rows))


@torch.no_grad()
def explore(model, count):
    state, rows = torch.zeros(1), []
    for _ in range(count):
        greedy = model(state[None]).argmax(1)
        action = torch.randint(0, 2, (1,)) if torch.rand(1) < 0.3 else greedy
        following = (state + action * 2 - 1).clamp(-3, 3)
        rows.append(torch.cat([state, action, (following == 3).float(), following]))
        state = following
    return torch.stack(rows)


with lockstep.Run("dqn", seed=22, replicas=3) as run:
    net = nn.Sequential(nn.Linear(1, 16), nn.ReLU(), nn.Linear(16, 2))
    model, target = run.model(net), run.register("target", nn.Linear(1, 2))
    memory = run.register("memory", Memory(72))
    optimizer = run.optimizer(torch.optim.RMSprop(model.parameters(), lr=5e-3))
    for _epoch in run.epochs(4):
        memory.extend(explore(model, 24))
        data = TensorDataset(memory.rows[: memory.used].clone())
        for (rows,) in run.loader(data, batch_size=12, shuffle=True):
            state, action, reward, following = rows.split(1, 1)
            with torch.no_grad():
                wanted = reward + 0.9 * target(following).amax(1, keepdim=True)
            loss = F.huber_loss(model(state).gather(1, action.long()), wanted)
            optimizer.zero_grad()
            run.backward(loss)
            optimizer.step()
        with torch.no_grad():
            target.weight.copy_(net[2].weight[:, :1])
