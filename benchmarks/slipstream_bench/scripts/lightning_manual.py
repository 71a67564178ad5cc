import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class LitClassifier(L.LightningModule):
    def __init__(self, hidden=512, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.model = nn.Sequential(
            nn.Linear(256, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 10)
        )

    def forward(self, x):
        return self.model(x)

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        x, y = batch
        optimizer.zero_grad()
        loss = F.cross_entropy(self(x), y)
        self.manual_backward(loss)
        optimizer.step()
        self.log("train_loss", loss)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


def main():
    L.seed_everything(1)
    train = TensorDataset(torch.randn(1536, 256), torch.randint(0, 10, (1536,)))
    trainer = L.Trainer(
        max_epochs=8, accelerator="cpu", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(LitClassifier(), DataLoader(train, batch_size=64))


if __name__ == "__main__":
    main()
