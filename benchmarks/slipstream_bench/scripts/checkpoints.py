import json
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset, random_split

OUT = Path("runs/latest")


class SmallVGG(nn.Module):
    cfg = [16, "M", 32, "M", 64, 64, "M"]

    def __init__(self, num_classes=10):
        super().__init__()
        layers, channels = [], 3
        for v in self.cfg:
            if v == "M":
                layers.append(nn.MaxPool2d(2))
            else:
                layers += [nn.Conv2d(channels, v, 3, padding=1, bias=False), nn.BatchNorm2d(v), nn.ReLU(inplace=True)]
                channels = v
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(channels, num_classes)

    def forward(self, x):
        x = self.features(x)
        x = F.adaptive_avg_pool2d(x, 1).flatten(1)
        return self.classifier(x)


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    loss, correct, total = 0.0, 0, 0
    for x, y in loader:
        logits = model(x)
        loss += F.cross_entropy(logits, y, reduction="sum").item()
        correct += (logits.argmax(-1) == y).sum().item()
        total += y.numel()
    model.train()
    return loss / total, correct / total


def main():
    torch.manual_seed(0)
    OUT.mkdir(parents=True, exist_ok=True)
    full = TensorDataset(torch.randn(800, 3, 32, 32), torch.randint(0, 10, (800,)))
    train_set, val_set = random_split(full, [640, 160])
    train_loader = DataLoader(train_set, batch_size=64, shuffle=True)
    val_loader = DataLoader(val_set, batch_size=160)
    epochs = 8

    model = SmallVGG()
    decay = [p for p in model.parameters() if p.ndim > 1]
    no_decay = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.SGD(
        [{"params": decay, "weight_decay": 5e-4}, {"params": no_decay, "weight_decay": 0.0}],
        lr=0.1, momentum=0.9, nesterov=True,
    )
    scheduler = OneCycleLR(optimizer, max_lr=0.1, epochs=epochs, steps_per_epoch=len(train_loader))
    best, log = float("inf"), []

    for epoch in range(1, epochs + 1):
        for images, labels in train_loader:
            optimizer.zero_grad(set_to_none=True)
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            scheduler.step()
        val_loss, val_acc = evaluate(model, val_loader)
        log.append({"epoch": epoch, "train": loss.item(), "val": val_loss, "acc": val_acc})
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
        torch.save(state, OUT / "last.pt")
        if val_loss < best:
            best = val_loss
            torch.save(state, OUT / "best.pt")
        (OUT / "log.json").write_text(json.dumps(log, indent=1))


if __name__ == "__main__":
    main()
