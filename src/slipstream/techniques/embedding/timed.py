"""A table's module in any format, made from plain numbers: for micro-benchmarks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from slipstream.techniques.embedding.formats import FORMATS
from slipstream.techniques.embedding.formats.format import Exchange, Setting, Start, TableFacts


def module_of(
    num_embeddings: int,
    embedding_dim: int,
    format: str,
    settings: tuple[tuple[str, int], ...],
    mode: str,
) -> Any:
    """The module of a table of random numbers.

    Args:
        format: its name.
        settings: of the format, as pairs; ids with rows of their own as their count.
        mode: of bags; empty for ``nn.Embedding``.
    """
    chosen = FORMATS[format]
    # No numbers are needed of a table that is made anew.
    where = "meta" if chosen.trains else "cpu"
    old: nn.Embedding | nn.EmbeddingBag = (
        nn.EmbeddingBag(num_embeddings, embedding_dim, mode=mode, device=where)
        if mode
        else nn.Embedding(num_embeddings, embedding_dim, device=where)
    )
    weight = None if chosen.trains else old.weight.detach()
    with_ids: dict[str, Setting] = {
        key: tuple(range(value)) if key == "hot" else value for key, value in settings
    }
    table = TableFacts("", num_embeddings, embedding_dim, weight=weight)
    start = Start(1.0, torch.device("cpu"), torch.float32)
    return chosen.module(Exchange(old, table, with_ids), start)
