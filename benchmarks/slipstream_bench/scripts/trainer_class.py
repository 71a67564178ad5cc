from dataclasses import dataclass, field

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


@dataclass
class Config:
    epochs: int = 60
    batch_size: int = 200
    lr: float = 0.05
    widths: list = field(default_factory=lambda: [64, 256, 256])


class Spirals(Dataset):
    def __init__(self, n=600, classes=3, dim=64):
        g = torch.Generator().manual_seed(1)
        self.labels = torch.arange(n) % classes
        r = torch.rand(n, generator=g)
        angle = 4 * r + 2 * torch.pi * self.labels / classes
        points = torch.stack([r * angle.cos(), r * angle.sin()], dim=1)
        self.points = points @ torch.randn(2, dim, generator=g)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return self.points[i], self.labels[i]


class MLP(nn.Module):
    def __init__(self, widths, classes):
        super().__init__()
        layers = []
        for n_in, n_out in zip(widths[:-1], widths[1:]):
            layers += [nn.Linear(n_in, n_out), nn.BatchNorm1d(n_out), nn.LeakyReLU(0.1)]
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, x):
        return self.head(self.body(x))


class Trainer:
    def __init__(self, model, dataset, config):
        self.model = model
        self.config = config
        self.loader = DataLoader(dataset, batch_size=config.batch_size, shuffle=True)
        self.criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
        self.optimizer = self.configure_optimizer()
        self.history = []

    def configure_optimizer(self):
        return torch.optim.SGD(
            self.model.parameters(), lr=self.config.lr, momentum=0.9, weight_decay=5e-4
        )

    def training_step(self, batch):
        inputs, targets = batch
        self.optimizer.zero_grad()
        outputs = self.model(inputs)
        loss = self.criterion(outputs, targets)
        loss.backward()
        self.optimizer.step()
        accuracy = (outputs.argmax(1) == targets).float().mean()
        return loss.item(), accuracy.item()

    def fit(self):
        for epoch in range(self.config.epochs):
            self.model.train()
            stats = [self.training_step(batch) for batch in self.loader]
            losses, accuracies = zip(*stats)
            self.history.append((sum(losses) / len(losses), sum(accuracies) / len(accuracies)))
        return self


if __name__ == "__main__":
    torch.manual_seed(0)
    config = Config()
    trainer = Trainer(MLP(config.widths, classes=3), Spirals(), config).fit()
    print(f"final loss {trainer.history[-1][0]:.3f}, accuracy {trainer.history[-1][1]:.3f}")
