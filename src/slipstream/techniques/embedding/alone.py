"""Embeddings with parameters of their own, made from plain numbers: for micro-benchmarks."""

from __future__ import annotations

import torch
from torch import nn

from slipstream.techniques.embedding.making import Making
from slipstream.techniques.embedding.robe import ROBEEmbedding, ROBEEmbeddingBag
from slipstream.techniques.embedding.shared_array import SharedArray
from slipstream.techniques.embedding.ways import WAYS
from slipstream.techniques.embedding.ways.way import Setting, TableFacts


class AloneBag(ROBEEmbeddingBag):
    """`ROBEEmbeddingBag` over ``SharedArray(size, block=block, sign=sign)``."""

    def __init__(
        self, num_embeddings: int, embedding_dim: int, size: int, block: int, sign: bool, mode: str
    ) -> None:
        pool = SharedArray(size, block=block, sign=sign)
        super().__init__(num_embeddings, embedding_dim, pool, mode=mode)


class Alone(ROBEEmbedding):
    """`ROBEEmbedding` over ``SharedArray(size, block=block, sign=sign)``."""

    def __init__(
        self, num_embeddings: int, embedding_dim: int, size: int, block: int, sign: bool
    ) -> None:
        pool = SharedArray(size, block=block, sign=sign)
        super().__init__(num_embeddings, embedding_dim, pool)


class Planned(nn.Module):
    """A table of random numbers as a way of a plan keeps it.

    Args:
        way: its name.
        settings: as `Choice.settings`, as pairs; ids as their number.
        mode: of bags; empty for ``nn.Embedding``.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        way: str,
        settings: tuple[tuple[str, int], ...],
        mode: str,
    ) -> None:
        super().__init__()
        self.num_embeddings = num_embeddings
        kept: dict[str, Setting] = {
            key: tuple(range(value)) if key == "hot" else value for key, value in settings
        }
        old: nn.Embedding | nn.EmbeddingBag = (
            nn.EmbeddingBag(num_embeddings, embedding_dim, mode=mode)
            if mode
            else nn.Embedding(num_embeddings, embedding_dim)
        )
        chosen = WAYS[way]
        weight = None if chosen.trains else old.weight.detach()
        facts = TableFacts("alone", num_embeddings, embedding_dim, weight=weight)
        self.inner = chosen.module(old, facts, kept, Making(0, 1, False, [old.weight]))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """As the module in the model is called."""
        made: torch.Tensor = self.inner(input)
        return made
