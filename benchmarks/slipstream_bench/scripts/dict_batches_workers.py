import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset


class HousePrices(Dataset):
    """Tabular rows with numeric and categorical columns."""

    def __init__(self, n_rows=1536):
        g = torch.Generator().manual_seed(7)
        self.numeric = torch.randn(n_rows, 24, generator=g)
        self.district = torch.randint(0, 50, (n_rows,), generator=g)
        self.kind = torch.randint(0, 6, (n_rows,), generator=g)
        self.price = self.numeric[:, :3].sum(1) + 0.1 * self.district

    def __len__(self):
        return len(self.price)

    def __getitem__(self, index):
        return {
            "numeric": self.numeric[index],
            "district": self.district[index],
            "kind": self.kind[index],
            "price": self.price[index],
        }


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.district = nn.Embedding(50, 16)
        self.kind = nn.Embedding(6, 4)
        self.layers = nn.Sequential(
            nn.Linear(24 + 16 + 4, 512), nn.SiLU(), nn.LayerNorm(512),
            nn.Linear(512, 512), nn.SiLU(), nn.Linear(512, 1),
        )

    def forward(self, numeric, district, kind):
        features = torch.cat([numeric, self.district(district), self.kind(kind)], dim=-1)
        return self.layers(features).squeeze(-1)


def run_epoch(model, loader, optimizer, loss_fn):
    running = 0
    for i, batch in enumerate(loader):
        target = batch.pop("price")
        prediction = model(**batch)
        loss = loss_fn(prediction, target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        running += loss.detach()
    return running.item() / (i + 1)


if __name__ == "__main__":
    loader = DataLoader(HousePrices(), batch_size=32, shuffle=True, num_workers=2)
    model = Regressor()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(5):
        print(epoch, run_epoch(model, loader, optimizer, nn.HuberLoss()))
