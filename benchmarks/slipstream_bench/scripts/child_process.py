import torch
import torch.multiprocessing as mp
from torch import nn


def train(rank, epochs):
    torch.manual_seed(rank)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(512, 64), torch.randint(0, 8, (512,))
    for _ in range(epochs):
        for xb, yb in zip(x.split(64), y.split(64)):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(xb), yb).backward()
            optimizer.step()


if __name__ == "__main__":
    mp.spawn(train, args=(50,), nprocs=1)
