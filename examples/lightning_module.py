"""A classifier as a LightningModule, trained by Lightning's Trainer.

    python examples/lightning_module.py
    slipstream apply examples/lightning_module.py -t accumulation:4+amp:bf16

Needs lightning.
"""

import torch
from lightning import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(LightningModule):
    """Two hidden layers; prints the mean loss of every epoch."""

    def __init__(self, width=256):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4)
        )
        self.losses = []

    def training_step(self, batch, batch_index):
        inputs, labels = batch
        loss = nn.functional.cross_entropy(self.net(inputs), labels)
        self.losses.append(loss.detach())
        return loss

    def on_train_epoch_end(self):
        print(f"epoch {self.current_epoch}  loss {torch.stack(self.losses).mean():.3f}")
        self.losses.clear()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main():
    torch.manual_seed(0)
    inputs = torch.randn(2048, 64)
    labels = (inputs @ torch.randn(64, 4)).argmax(1)
    loader = DataLoader(TensorDataset(inputs, labels), batch_size=64, shuffle=True)
    trainer = Trainer(
        max_epochs=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Classifier(), loader)


if __name__ == "__main__":
    main()
