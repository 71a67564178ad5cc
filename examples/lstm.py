"""An LSTM that forecasts the next values of noisy, slowly changing waves.

    python examples/lstm.py --steps 100
    slipstream advise examples/lstm.py:make_workload

The series are made from a seed, so nothing is downloaded. A custom step clips gradients;
`make_workload` returns it instead of (model, batch, loss, optimizer), and slipstream runs exactly
this step.
"""

import argparse

import torch
from torch import nn
from torch.nn.functional import mse_loss


class Forecaster(nn.Module):
    """Reads a series and says, at every time, what comes next."""

    def __init__(self, width, layers):
        super().__init__()
        self.lstm = nn.LSTM(1, width, layers, batch_first=True)
        self.head = nn.Linear(width, 1)

    def forward(self, series):  # [batch, time] -> [batch, time]
        hidden, _ = self.lstm(series.unsqueeze(-1))
        return self.head(hidden).squeeze(-1)


def draw(batch_size, length):
    """Sums of two waves with noise: all values but the last, and all but the first."""
    time = torch.arange(length + 1)
    slow, fast = torch.rand(2, batch_size, 1) * torch.tensor([0.1, 0.4])[:, None, None] + 0.05
    phase = 6.28 * torch.rand(batch_size, 1)
    series = torch.sin(slow * time + phase) + 0.5 * torch.sin(fast * time)
    series = series + 0.05 * torch.randn_like(series)
    return series[:, :-1], series[:, 1:]


def train_step(model, optimizer, series, following):
    """Forward, backward, clipped gradients, update; returns the loss."""
    optimizer.zero_grad()
    loss = mse_loss(model(series), following)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


def make_workload(batch_size=16, length=48, width=64, layers=2):
    """The model, the optimizer, and one training step."""
    model = Forecaster(width, layers)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    series, following = draw(batch_size, length)
    return {
        "model": model,
        "optimizer": optimizer,
        "step": lambda: train_step(model, optimizer, series, following),
        "samples": batch_size,
    }


def main():
    parser = argparse.ArgumentParser(description="Train an LSTM to forecast waves.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--length", type=int, default=48)
    options = parser.parse_args()
    torch.manual_seed(0)
    workload = make_workload(options.batch_size, options.length)
    for step in range(1, options.steps + 1):
        batch = draw(options.batch_size, options.length)
        loss = train_step(workload["model"], workload["optimizer"], *batch)
        if step == 1 or step % 20 == 0:
            print(f"step {step:4d}  squared error {loss.item():.4f}")


if __name__ == "__main__":
    main()
