"""Cells of recursive models: what a leaf and an inner node compute.

A cell runs eagerly on `TreeNode` structures, and compiles like any other recursive model.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import nn

States = tuple[torch.Tensor, ...]


class TreeNode:
    """A node of a tree or DAG.

    Attributes:
        children: nodes; empty for a leaf.
        word: the node's integer input; None if it has none.
    """

    __slots__ = ("children", "word")

    def __init__(self, children: Sequence[TreeNode] = (), word: int | None = None) -> None:
        self.children, self.word = tuple(children), word


class Cell(nn.Module):
    """Base of cells; ``cell(node)`` returns the node's states, each [hidden].

    Subclasses define `leaf` and `internal`.
    """

    def leaf(self, word: Any) -> States:
        """Return the states of a node without children."""
        raise NotImplementedError

    def internal(self, children: Sequence[States], word: Any) -> States:
        """Return the states of an inner node from its children's; `word` may be None."""
        raise NotImplementedError

    def forward(self, node: Any) -> States:
        """Return the states of `node`, which has attributes ``children`` and ``word``."""
        children = [self(child) for child in node.children]
        return self.internal(children, node.word) if children else self.leaf(node.word)


def _total(states: Sequence[torch.Tensor]) -> torch.Tensor:
    return reduce(torch.add, states)


class TreeFC(Cell):
    """``h = relu(W [h_1; ...; h_k] + b)``; a leaf's state is its embedding."""

    def __init__(self, words: int, hidden: int, arity: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, hidden)
        self.joined = nn.Linear(arity * hidden, hidden)

    def leaf(self, word: Any) -> States:
        return (self.embedding.weight[word],)

    def internal(self, children: Sequence[States], word: Any) -> States:
        return (torch.relu(self.joined(torch.cat([state for (state,) in children]))),)


class TreeRNN(TreeFC):
    """``h = tanh(W [h_1; ...; h_k] + b)``."""

    def internal(self, children: Sequence[States], word: Any) -> States:
        return (torch.tanh(self.joined(torch.cat([state for (state,) in children]))),)


class TreeLSTM(Cell):
    """N-ary Tree-LSTM, with a forget gate per child (Tai et al., ACL 2015)."""

    def __init__(self, words: int, hidden: int, arity: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, hidden)
        self.input = nn.Linear(hidden, 3 * hidden)
        self.joined = nn.Linear(arity * hidden, (3 + arity) * hidden)

    def leaf(self, word: Any) -> States:
        i, o, u = self.input(self.embedding.weight[word]).chunk(3)
        c = torch.sigmoid(i) * torch.tanh(u)
        return torch.sigmoid(o) * torch.tanh(c), c

    def internal(self, children: Sequence[States], word: Any) -> States:
        gates = self.joined(torch.cat([h for h, _ in children]))
        i, o, u, *forget = gates.chunk(3 + len(children))
        c = torch.sigmoid(i) * torch.tanh(u)
        for f, (_, child) in zip(forget, children, strict=True):
            c = c + torch.sigmoid(f) * child
        return torch.sigmoid(o) * torch.tanh(c), c


class ChildSumTreeLSTM(TreeLSTM):
    """Child-sum Tree-LSTM, for any number of children (Tai et al., ACL 2015)."""

    def __init__(self, words: int, hidden: int) -> None:
        Cell.__init__(self)
        self.embedding = nn.Embedding(words, hidden)
        self.input = nn.Linear(hidden, 3 * hidden)
        self.joined = nn.Linear(hidden, 3 * hidden)
        self.forget = nn.Linear(hidden, hidden)

    def internal(self, children: Sequence[States], word: Any) -> States:
        i, o, u = self.joined(_total([h for h, _ in children])).chunk(3)
        c = torch.sigmoid(i) * torch.tanh(u)
        for h, child in children:
            c = c + torch.sigmoid(self.forget(h)) * child
        return torch.sigmoid(o) * torch.tanh(c), c


class TreeGRU(Cell):
    """Child-sum Tree-GRU: ``h = z * s + (1 - z) * tanh(U (r * s) + b)`` with ``s = sum_k h_k``."""

    def __init__(self, words: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, hidden)
        self.gates = nn.Linear(hidden, 2 * hidden)
        self.candidate = nn.Linear(hidden, hidden)

    def leaf(self, word: Any) -> States:
        return (torch.tanh(self.embedding.weight[word]),)

    def internal(self, children: Sequence[States], word: Any) -> States:
        total = _total([state for (state,) in children])
        z, r = torch.sigmoid(self.gates(total)).chunk(2)
        return (self._mixed(z, total, torch.tanh(self.candidate(r * total))),)

    def _mixed(self, z: torch.Tensor, total: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        return z * total + (1 - z) * g


class SimpleTreeGRU(TreeGRU):
    """``h = (1 - z) * tanh(U (r * s) + b)``."""

    def _mixed(self, z: torch.Tensor, total: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        return (1 - z) * g


class MVRNN(Cell):
    """Matrix-vector RNN (Socher et al., EMNLP 2012).

    A node has a vector a and a matrix A: ``tanh(W [B a; A b] + w)`` and ``M [A; B]`` for children
    (a, A) and (b, B).
    """

    def __init__(self, words: int, hidden: int) -> None:
        super().__init__()
        self.vectors = nn.Embedding(words, hidden)
        self.matrices = nn.Parameter(torch.randn(words, hidden, hidden) / hidden**0.5)
        self.joined = nn.Linear(2 * hidden, hidden)
        self.mixed = nn.Parameter(torch.randn(hidden, 2 * hidden) / (2 * hidden) ** 0.5)

    def leaf(self, word: Any) -> States:
        return self.vectors.weight[word], self.matrices[word]

    def internal(self, children: Sequence[States], word: Any) -> States:
        (a, of_a), (b, of_b) = children
        vector = torch.tanh(self.joined(torch.cat([of_b @ a, of_a @ b])))
        return vector, self.mixed @ torch.cat([of_a, of_b])


class DAGRNN(Cell):
    """``h = relu(U x + W sum_k h_k + b)``: every node has a word x."""

    def __init__(self, words: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, hidden)
        self.input = nn.Linear(hidden, hidden, bias=False)
        self.joined = nn.Linear(hidden, hidden)

    def leaf(self, word: Any) -> States:
        x = self.embedding.weight[word]
        return (torch.relu(self.input(x) + self.joined.bias),)

    def internal(self, children: Sequence[States], word: Any) -> States:
        x = self.input(self.embedding.weight[word])
        return (torch.relu(x + self.joined(_total([state for (state,) in children]))),)


class SequenceLSTM(Cell):
    """LSTM over a chain; a node's child is the previous step."""

    def __init__(self, words: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, hidden)
        self.cell = nn.LSTMCell(hidden, hidden)

    def leaf(self, word: Any) -> States:
        zeros = torch.zeros_like(self.embedding.weight[word])
        return self.internal([(zeros, zeros)], word)

    def internal(self, children: Sequence[States], word: Any) -> States:
        (h, c), cell = children[0], self.cell
        gates = cell.weight_ih @ self.embedding.weight[word] + cell.bias_ih + cell.bias_hh
        i, f, g, o = (gates + cell.weight_hh @ h).chunk(4)
        c = torch.sigmoid(i) * torch.tanh(g) + torch.sigmoid(f) * c
        return torch.sigmoid(o) * torch.tanh(c), c


class SequenceGRU(Cell):
    """GRU over a chain; a node's child is the previous step."""

    def __init__(self, words: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, hidden)
        self.cell = nn.GRUCell(hidden, hidden)

    def leaf(self, word: Any) -> States:
        return self.internal([(torch.zeros_like(self.embedding.weight[word]),)], word)

    def internal(self, children: Sequence[States], word: Any) -> States:
        (state,), cell = children[0], self.cell
        of_input = (cell.weight_ih @ self.embedding.weight[word] + cell.bias_ih).chunk(3)
        of_state = (cell.weight_hh @ state + cell.bias_hh).chunk(3)
        r = torch.sigmoid(of_input[0] + of_state[0])
        z = torch.sigmoid(of_input[1] + of_state[1])
        n = torch.tanh(of_input[2] + r * of_state[2])
        return ((1 - z) * n + z * state,)
