#!/usr/bin/env python3
"""Train an autoencoder on synthetic sensor readings."""
import argparse
import logging
import random
import time

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

logger = logging.getLogger(__name__)


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--hidden", type=int, required=True)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def set_seed(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class AutoEncoder(nn.Module):
    def __init__(self, n_features, hidden, code=16, dropout=0.1):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(n_features, hidden), nn.GELU(), nn.Dropout(dropout), nn.Linear(hidden, code)
        )
        self.decoder = nn.Sequential(
            nn.Linear(code, hidden), nn.GELU(), nn.Dropout(dropout), nn.Linear(hidden, n_features)
        )

    def forward(self, x):
        return self.decoder(self.encoder(x))


def make_loader(args, n=3072, n_features=192):
    t = np.linspace(0, 8 * np.pi, n_features, dtype=np.float32)
    phase = np.random.rand(n, 1).astype(np.float32) * 2 * np.pi
    readings = np.sin(t[None] + phase) + 0.1 * np.random.randn(n, n_features).astype(np.float32)
    return DataLoader(
        TensorDataset(torch.from_numpy(readings)),
        batch_size=args.batch_size, shuffle=True, drop_last=True,
    )


def train_one_epoch(model, loader, optimizer, device):
    model.train()
    total = 0.0
    for (x,) in loader:
        x = x.to(device, non_blocking=True)
        optimizer.zero_grad(set_to_none=True)
        loss = F.mse_loss(model(x), x)
        loss.backward()
        optimizer.step()
        total += loss.item()
    return total / len(loader)


def main():
    args = parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    set_seed(args.seed)
    loader = make_loader(args)
    model = AutoEncoder(192, args.hidden).to(args.device)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=args.lr)
    for epoch in range(args.epochs):
        start = time.time()
        loss = train_one_epoch(model, loader, optimizer, args.device)
        logger.info("epoch %d loss %.4f (%.1fs)", epoch, loss, time.time() - start)


if __name__ == "__main__":
    main()
