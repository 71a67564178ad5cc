import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, TensorDataset


class Autoencoder(torch.nn.Module):
    def __init__(self, dim=200, hidden=384, code=24):
        super().__init__()
        self.encoder = torch.nn.Sequential(torch.nn.Linear(dim, hidden), torch.nn.SiLU(), torch.nn.Linear(hidden, code))
        self.decoder = torch.nn.Sequential(torch.nn.Linear(code, hidden), torch.nn.SiLU(), torch.nn.Linear(hidden, dim))

    def forward(self, x):
        return self.decoder(self.encoder(x))


def main():
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.seed_everything(7)
    fabric.launch()
    signals = torch.randn(1920, 24) @ torch.randn(24, 200)
    loader = DataLoader(TensorDataset(signals), batch_size=48, shuffle=True)
    model = Autoencoder()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=3e-4)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(loader)

    for epoch in range(8):
        for (x,) in loader:
            optimizer.zero_grad()
            noisy = x + 0.1 * torch.randn_like(x)
            fabric.backward(F.mse_loss(model(noisy), x))
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
        error = F.mse_loss(model(signals), signals).item()
        fabric.print(f"epoch {epoch}: error {error:.4f}")


if __name__ == "__main__":
    main()
