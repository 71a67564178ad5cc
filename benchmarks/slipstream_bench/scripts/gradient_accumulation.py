import math

import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

MICRO_BATCH = 32
ACCUMULATE = 4
EPOCHS = 15


class ConvMixerish(nn.Module):
    def __init__(self, channels=24, depth=2, classes=5):
        super().__init__()
        self.stem = nn.Conv1d(1, channels, kernel_size=8, stride=4)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv1d(channels, channels, 5, padding=2, groups=channels), nn.GELU(),
                nn.BatchNorm1d(channels), nn.Conv1d(channels, channels, 1), nn.GELU(),
            )
            for _ in range(depth)
        )
        self.head = nn.Linear(channels, classes)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean(dim=-1))


def main():
    torch.manual_seed(3)
    signals, labels = torch.randn(1280, 1, 160), torch.randint(0, 5, (1280,))
    loader = DataLoader(TensorDataset(signals, labels), batch_size=MICRO_BATCH, shuffle=True)
    updates = EPOCHS * math.ceil(len(loader) / ACCUMULATE)
    model = ConvMixerish()
    optimizer = optim.NAdam(model.parameters(), lr=2e-3)
    schedule = optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=updates)
    criterion = nn.CrossEntropyLoss()
    optimizer.zero_grad()
    for epoch in range(EPOCHS):
        for step, (signal, label) in enumerate(loader, start=1):
            loss = criterion(model(signal), label) / ACCUMULATE
            loss.backward()
            if step % ACCUMULATE == 0 or step == len(loader):
                nn.utils.clip_grad_value_(model.parameters(), 0.5)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        print(f"{epoch=} loss={loss.item() * ACCUMULATE:.3f} lr={schedule.get_last_lr()[0]:.2e}")


main()
