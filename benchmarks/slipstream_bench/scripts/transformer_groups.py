"""A tiny character-level transformer."""
import math

import torch
import torch.nn as nn
from torch.nn import functional as F

# hyperparameters
batch_size = 16
block_size = 64
n_embd = 128
n_head = 4
n_layer = 3
max_iters = 100
learning_rate = 1e-3
weight_decay = 0.1
grad_clip = 1.0

text = "the quick brown fox jumps over the lazy dog while five boxing wizards watch " * 400
chars = sorted(set(text))
stoi = {c: i for i, c in enumerate(chars)}
data = torch.tensor([stoi[c] for c in text])


def get_batch():
    ix = torch.randint(len(data) - block_size - 1, (batch_size,))
    x = torch.stack([data[i : i + block_size] for i in ix])
    y = torch.stack([data[i + 1 : i + 1 + block_size] for i in ix])
    return x, y


class CharTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(len(chars), n_embd)
        self.pos = nn.Embedding(block_size, n_embd)
        layer = nn.TransformerEncoderLayer(
            n_embd, n_head, 4 * n_embd, dropout=0.1, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, n_layer, enable_nested_tensor=False)
        self.head = nn.Linear(n_embd, len(chars))
        mask = nn.Transformer.generate_square_subsequent_mask(block_size)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, idx, targets=None):
        x = self.tok(idx) + self.pos(torch.arange(idx.size(1)))
        x = self.encoder(x, mask=self.mask, is_causal=True)
        logits = self.head(x)
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
        return logits, loss


def get_lr(it, warmup=10):
    if it < warmup:
        return learning_rate * (it + 1) / warmup
    return 0.5 * learning_rate * (1 + math.cos(math.pi * (it - warmup) / (max_iters - warmup)))


model = CharTransformer()
print(sum(p.numel() for p in model.parameters()) / 1e6, "M parameters")
params = {name: p for name, p in model.named_parameters() if p.requires_grad}
optimizer = torch.optim.AdamW(
    [
        {"params": [p for n, p in params.items() if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for n, p in params.items() if p.dim() < 2], "weight_decay": 0.0},
    ],
    lr=learning_rate,
    betas=(0.9, 0.95),
)

for it in range(max_iters):
    for group in optimizer.param_groups:
        group["lr"] = get_lr(it)
    xb, yb = get_batch()
    logits, loss = model(xb, yb)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    if it % 20 == 0:
        print(f"iter {it}: loss {loss.item():.4f}")
