"""A small workload to edit, and time limits."""

TRAIN = """\
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first = nn.Linear(8, width)
        self.second = nn.Linear(width, 1)

    def forward(self, x):
        hidden = torch.relu(self.first(x))
        return self.second(hidden)


def make_workload(batch_size=16, width=32):  # samples
    model = Net(width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(batch_size, 8), torch.randn(batch_size, 1)
    return model, batch, nn.functional.mse_loss, optimizer
"""
# Only a limit for hanging tests.
LIMIT_S = 300.0
