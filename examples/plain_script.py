"""A training script as people write them: arguments, data, a loop, a checkpoint at the end.

    python examples/plain_script.py --epochs 2
    slipstream advise examples/plain_script.py -- --epochs 2

It returns nothing and has no function for slipstream to call. slipstream runs it as it is until
it has seen enough optimizer steps, and ends it there: no checkpoint is written in that run.
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def make_data(rows, seed):
    """Points on two noisy spirals, with two coordinates and 14 columns that say nothing."""
    torch.manual_seed(seed)
    arm = torch.randint(2, (rows,))
    angle = 1 + 9 * torch.rand(rows)
    turn = angle + 3.14159 * arm
    spiral = torch.stack([angle * turn.cos(), angle * turn.sin()], dim=1) / 5
    features = torch.cat([spiral + 0.02 * torch.randn(rows, 2), torch.randn(rows, 14)], dim=1)
    return TensorDataset(features, arm)


def main():
    parser = argparse.ArgumentParser(description="Tell two spirals apart.")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--checkpoint", default="spirals.pt")
    args = parser.parse_args()

    train = DataLoader(make_data(4096, seed=0), batch_size=args.batch_size, shuffle=True)
    held_out = DataLoader(make_data(1024, seed=1), batch_size=256)
    model = nn.Sequential(
        nn.Linear(16, 128), nn.ReLU(),
        nn.Linear(128, 128), nn.ReLU(),
        nn.Linear(128, 128), nn.ReLU(),
        nn.Linear(128, 2),
    )  # fmt: skip
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

    for epoch in range(1, args.epochs + 1):
        model.train()
        total = 0.0
        for features, labels in train:
            optimizer.zero_grad()
            loss = criterion(model(features), labels)
            loss.backward()
            optimizer.step()
            total += loss.item()
        model.eval()
        with torch.no_grad():
            right = sum(int((model(x).argmax(1) == y).sum()) for x, y in held_out)
        print(f"epoch {epoch}  loss {total / len(train):.3f}  right {right / 10.24:.1f} %")

    torch.save({"model": model.state_dict(), "epochs": args.epochs}, args.checkpoint)
    print(f"saved {args.checkpoint}")


if __name__ == "__main__":
    main()
