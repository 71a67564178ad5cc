"""Sentiment of sentences as parse trees: a Tree-LSTM that is written as a recursive ``forward``.

slipstream advise examples/tree_lstm.py:make_workload --threads 1
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch
from torch import nn

WORDS = 5000


@dataclass
class Node:
    """A node of a binary parse tree; a leaf has a word."""

    word: int = 0
    children: list[Node] = field(default_factory=list)


class TreeLSTM(nn.Module):
    """States of a node from those of its two children."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, hidden)
        self.leaf = nn.Linear(hidden, 3 * hidden)
        self.inner = nn.Linear(2 * hidden, 5 * hidden)

    def forward(self, node: Node) -> tuple[torch.Tensor, torch.Tensor]:
        if not node.children:
            i, o, u = self.leaf(self.embedding.weight[node.word]).chunk(3)
            c = torch.sigmoid(i) * torch.tanh(u)
        else:
            (h1, c1), (h2, c2) = (self(child) for child in node.children)
            i, o, u, f1, f2 = self.inner(torch.cat([h1, h2])).chunk(5)
            c = torch.sigmoid(i) * torch.tanh(u)
            c = c + torch.sigmoid(f1) * c1 + torch.sigmoid(f2) * c2
        return torch.sigmoid(o) * torch.tanh(c), c


class Classifier(nn.Module):
    """Scores of the five classes for every tree of a batch."""

    def __init__(self, hidden: int = 256) -> None:
        super().__init__()
        self.encoder = TreeLSTM(hidden)
        self.scores = nn.Linear(hidden, 5)

    def forward(self, trees: list[Node]) -> torch.Tensor:
        roots = [self.encoder(tree)[0] for tree in trees]
        return self.scores(torch.stack(roots))


def random_tree(rng: random.Random, leaves: int) -> Node:
    """Return a tree that leans as parse trees do: most inner nodes have a leaf as a child."""
    parts = [Node(rng.randrange(WORDS)) for _ in range(leaves)]
    while len(parts) > 1:
        at = max(0, len(parts) - 2 - int(rng.expovariate(0.4)))
        parts[at : at + 2] = [Node(children=parts[at : at + 2])]
    return parts[0]


def make_workload(batch_size: int = 8):
    """Return the model and a batch: inference."""
    torch.manual_seed(0)
    rng = random.Random(0)
    trees = [random_tree(rng, rng.randint(8, 30)) for _ in range(batch_size)]
    return Classifier().eval(), (trees,)


def make_training(batch_size: int = 8):
    """Return the parts of a training step."""
    model, (trees,) = make_workload(batch_size)
    labels = torch.randint(0, 5, (batch_size,))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return model.train(), ((trees,), labels), nn.functional.cross_entropy, optimizer
