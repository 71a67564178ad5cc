"""Modules of tables in any format, from integer settings, for micro-benchmarks."""

from __future__ import annotations

from functools import lru_cache
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
    """Return the module of a randomly initialized table.

    A format of trained tables takes seconds to fit, so its last module is returned again.

    Args:
        format: name of the format.
        settings: settings of the format as pairs; of hot ids their count.
        mode: reduction of bags; empty for ``nn.Embedding``.
    """
    make = _make if FORMATS[format].trains else _make_once
    return make(num_embeddings, embedding_dim, format, settings, mode)


def _make(
    num_embeddings: int,
    embedding_dim: int,
    format: str,
    settings: tuple[tuple[str, int], ...],
    mode: str,
) -> Any:
    chosen = FORMATS[format]
    # Trainable formats do not read the old weights.
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


_make_once = lru_cache(maxsize=1)(_make)
