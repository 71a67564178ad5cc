import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset


class TwoTower(torch.nn.Module):
    def __init__(self, dim=96, out=64):
        super().__init__()
        self.query = torch.nn.Sequential(torch.nn.Linear(dim, 384), torch.nn.ReLU(), torch.nn.Linear(384, out))
        self.doc = torch.nn.Sequential(torch.nn.Linear(dim, 384), torch.nn.ReLU(), torch.nn.Linear(384, out))
        self.scale = torch.nn.Parameter(torch.tensor(10.0))

    def forward(self, q, d):
        q = torch.nn.functional.normalize(self.query(q), dim=-1)
        d = torch.nn.functional.normalize(self.doc(d), dim=-1)
        return self.scale * q @ d.t()


def main():
    set_seed(0)
    accelerator = Accelerator(cpu=True)
    queries = torch.randn(1440, 96)
    docs = queries + 0.3 * torch.randn_like(queries)
    loader = DataLoader(TensorDataset(queries, docs), batch_size=60, shuffle=True)
    model = TwoTower()
    optimizer = torch.optim.AdamW(params=model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=150)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    for epoch in range(6):
        model.train()
        for q, d in loader:
            scores = model(q, d)
            labels = torch.arange(len(q), device=accelerator.device)
            loss = torch.nn.functional.cross_entropy(scores, labels)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        accelerator.print(f"epoch {epoch}: {loss.item():.3f}")
    accelerator.wait_for_everyone()


if __name__ == "__main__":
    main()
