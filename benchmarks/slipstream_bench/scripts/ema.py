"""Denoise small images; evaluate with an exponential moving average of the weights."""
import copy

import torch
from torch import nn


class EMA:
    def __init__(self, model, decay=0.995):
        self.module = copy.deepcopy(model).eval().requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        for averaged, current in zip(self.module.parameters(), model.parameters()):
            averaged.lerp_(current, 1 - self.decay)
        for averaged, current in zip(self.module.buffers(), model.buffers()):
            averaged.copy_(current)


def conv(n_in, n_out):
    return nn.Sequential(nn.Conv2d(n_in, n_out, 3, padding=1), nn.GroupNorm(4, n_out), nn.SiLU())


class Denoiser(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.down = conv(1, width)
        self.middle = nn.Sequential(nn.AvgPool2d(2), conv(width, 2 * width), nn.Upsample(scale_factor=2))
        self.out = nn.Conv2d(3 * width, 1, 3, padding=1)

    def forward(self, x):
        skip = self.down(x)
        return self.out(torch.cat([skip, self.middle(skip)], dim=1))


def batches(images, size):
    for chunk in images[torch.randperm(len(images))].split(size):
        yield chunk


images = torch.rand(384, 1, 16, 16).round()
model = Denoiser()
ema = EMA(model)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

for epoch in range(6):
    model.train()
    for clean in batches(images, 16):
        sigma = torch.rand(len(clean), 1, 1, 1)
        noisy = clean + sigma * torch.randn_like(clean)
        loss = ((model(noisy) - clean) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.update(model)
    with torch.no_grad():
        sample = images[:64]
        mse = ((ema.module(sample + 0.5 * torch.randn_like(sample)) - sample) ** 2).mean()
    print(f"epoch {epoch}: loss {loss:.4f}, averaged weights {mse:.4f}")
