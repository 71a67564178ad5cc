"""A small GPT on English text: the topics of Python's own help.

    python examples/language_model.py --steps 100
    slipstream advise examples/language_model.py:make_workload

The text is in the standard library, so nothing is downloaded. Nothing here is slipstream's:
`make_workload` returns what a training step needs, and `main` trains with it.
"""

import argparse
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention


class Block(nn.Module):
    """Attention and a feed-forward network, each after a norm and with a residual."""

    def __init__(self, width, heads, dropout):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        # GPT-2 computes GELU with a tanh, and so do its descendants.
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )
        self.drop = nn.Dropout(dropout)

    def forward(self, x):  # [batch, time, width]
        parts = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        attended = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(attended.transpose(1, 2).flatten(2)))
        return x + self.drop(self.mlp(self.norm2(x)))


class LanguageModel(nn.Module):
    """Predicts the next byte of a text."""

    def __init__(self, width, layers, heads, context, dropout=0.0):
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.positions = nn.Parameter(torch.zeros(context, width))
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens):  # [batch, time] -> [batch, time, 256]
        x = self.bytes(tokens) + self.positions
        return self.head(self.norm(self.blocks(x)))


def next_byte_loss(logits, targets):
    """Mean cross-entropy in nats per byte."""
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def read_corpus():
    """The text as one tensor of bytes."""
    text = "\n\n".join(topics[title] for title in sorted(topics))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()


def draw(corpus, batch_size, context):
    """A batch of windows of the text, and the same windows one byte later."""
    starts = torch.randint(len(corpus) - context, (batch_size,))
    windows = corpus[starts[:, None] + torch.arange(context + 1)]
    return windows[:, :-1], windows[:, 1:]


def make_workload(batch_size=8, width=128, layers=4, context=64, dropout=0.0):
    """The model, one batch, the loss and the optimizer."""
    model = LanguageModel(width, layers, heads=4, context=context, dropout=dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, draw(read_corpus(), batch_size, context), next_byte_loss, optimizer


def main():
    parser = argparse.ArgumentParser(description="Train a small GPT on Python's help texts.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--context", type=int, default=64)
    options = parser.parse_args()
    torch.manual_seed(0)
    model, _, loss_of, optimizer = make_workload(options.batch_size, context=options.context)
    corpus = read_corpus()
    for step in range(1, options.steps + 1):
        inputs, targets = draw(corpus, options.batch_size, options.context)
        loss = loss_of(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 1 or step % 20 == 0:
            print(f"step {step:4d}  loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
