import random
from itertools import islice

import torch
from torch.utils.data import DataLoader, IterableDataset

USERS, ITEMS, DIM = 5_000, 20_000, 16


class Clicks(IterableDataset):
    """An endless log of (user, item, clicked)."""

    def __init__(self, seed):
        self.seed = seed

    def __iter__(self):
        rng = random.Random(self.seed)
        while True:
            user = int(rng.paretovariate(1.2)) % USERS
            item = int(rng.paretovariate(1.1)) % ITEMS
            yield user, item, float((user * 31 + item) % 7 == 0)


class Factorization(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.users = torch.nn.Embedding(USERS, DIM, sparse=True)
        self.items = torch.nn.Embedding(ITEMS, DIM, sparse=True)
        self.bias = torch.nn.Embedding(ITEMS, 1, sparse=True)

    def forward(self, user, item):
        return (self.users(user) * self.items(item)).sum(-1) + self.bias(item).squeeze(-1)


model = Factorization()
opt = torch.optim.SparseAdam(model.parameters(), lr=0.01)
criterion = torch.nn.BCEWithLogitsLoss()
steps_per_epoch = 1000

for epoch in range(2):
    stream = DataLoader(Clicks(seed=epoch), batch_size=64)
    avg = None
    for user, item, clicked in islice(stream, steps_per_epoch):
        opt.zero_grad()
        loss = criterion(model(user, item), clicked.float())
        loss.backward()
        opt.step()
        avg = loss.item() if avg is None else 0.99 * avg + 0.01 * loss.item()
    print(f"epoch {epoch} | running loss {avg:.4f}")
