"""Facts about a model's tables, as input to a plan: sizes, look-ups and weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from slipstream.errors import InvalidArgumentError, UnknownNameError
from slipstream.graph import Graph, Statistics, TableIds
from slipstream.techniques.embedding.formats.format import TableFacts

IdStatistics = Graph | Statistics | Sequence[TableIds] | Mapping[str, Any]
"""A recorded graph with the statistic "ids", that statistic, or counts [rows] by table."""

_ROOT = "model."


def facts_of(
    model: torch.nn.Module, id_stats: IdStatistics | None, *, trained: bool, least_rows: int
) -> list[TableFacts]:
    """Return the exchangeable tables of `model` of at least `least_rows` rows.

    Raises:
        InvalidArgumentError: the model has no such table, trained weights are not finite, or counts
            do not fit a table.
        UnknownNameError: counts of a table that is not in the model.
    """
    modules = dict(exchangeable(model, least_rows))
    if not modules:
        raise InvalidArgumentError(
            "model",
            f"has no nn.Embedding or nn.EmbeddingBag of at least {least_rows} rows that can be "
            "exchanged",
            remedy="pass least_rows=N to change the limit",
        )
    counts = _counts(id_stats)
    for name in counts:
        if name not in dict(model.named_modules()):
            raise UnknownNameError("table", name, modules)
    counted = {
        name: _shares(name, count, modules[name].num_embeddings)
        for name, count in counts.items()
        if name in modules
    }
    total = sum(lookups for _, lookups in counted.values())
    # Tables without counts are assumed to be read as often as the average.
    usual = (None, total / len(counted) if counted else 1.0)
    facts = []
    for name, module in modules.items():
        shares, lookups = counted.get(name, usual)
        weight = module.weight.detach()
        if trained and not bool(weight.isfinite().all()):
            raise InvalidArgumentError("model", f"the table '{name}' holds NaN or infinity")
        facts.append(
            TableFacts(
                name, module.num_embeddings, module.embedding_dim, weight.element_size(), shares,
                weight if trained else None, lookups,
            )
        )  # fmt: skip
    return facts


def exchangeable(model: torch.nn.Module, rows: int) -> list[tuple[str, Any]]:
    """Return modules by name, of at least `rows` rows, that share their weights with no other."""
    holders: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            holders[id(parameter)] = holders.get(id(parameter), 0) + 1
    return [
        (name, module)
        for name, module in model.named_modules()
        if type(module) in (torch.nn.Embedding, torch.nn.EmbeddingBag)
        and module.num_embeddings >= rows
        and module.weight.dtype.is_floating_point
        and holders[id(module.weight)] == 1
        and module.max_norm is None
        and not module.scale_grad_by_freq
    ]


def _counts(id_stats: IdStatistics | None) -> dict[str, Any]:
    if id_stats is None:
        return {}
    if isinstance(id_stats, Graph):
        id_stats = id_stats.statistics
    if isinstance(id_stats, Statistics):
        if "ids" not in id_stats.recorded:
            raise InvalidArgumentError(
                "id_stats", "has no look-ups, which are recorded only on request",
                remedy="record them with ss.profile(workload, needs=('ids',))",
            )  # fmt: skip
        id_stats = id_stats.ids
    if isinstance(id_stats, Mapping):
        return dict(id_stats)
    try:
        return {table.table.removeprefix(_ROOT): table for table in id_stats}
    except (AttributeError, TypeError) as error:
        raise InvalidArgumentError(
            "id_stats", f"a {type(id_stats).__name__} has no look-ups by table",
            remedy='pass a recorded graph, or counts of each row: {"item": counts}',
        ) from error  # fmt: skip


def _shares(name: str, counts: Any, rows: int) -> tuple[torch.Tensor, float]:
    """Return the shares of look-ups by row, and the number of look-ups."""
    if isinstance(counts, TableIds):
        if counts.rows != rows:
            raise InvalidArgumentError(
                "id_stats", f"'{name}' had {counts.rows} rows when recorded, but has {rows} now"
            )
        if not counts.lookups:
            return torch.full((rows,), 1 / rows, dtype=torch.float64), 0.0
        return shares_of(counts), float(counts.lookups)
    try:
        shares = torch.as_tensor(counts, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidArgumentError("id_stats", f"'{name}' has no counts: {counts!r:.40}") from error
    if shares.shape != (rows,) or not bool((shares.isfinite() & (shares >= 0)).all()):
        raise InvalidArgumentError(
            "id_stats", f"'{name}' needs a count for each of its {rows} rows, none of them negative"
        )
    total = float(shares.sum())
    return (shares / total if total else torch.full_like(shares, 1 / rows)), total


def shares_of(ids: TableIds) -> torch.Tensor:
    """Return the share of look-ups per row of a recorded table, float64 [rows], summing to 1.

    Rows without their own count get equal shares: of the remaining counted look-ups, and of the
    share of ids seen once, which estimates unseen ids (Good, "The Population Frequencies of
    Species", 1953).
    """
    shares = torch.zeros(ids.rows, dtype=torch.float64)
    hot = torch.tensor(ids.hot_ids, dtype=torch.int64)
    once = ids.frequency[0] if ids.frequency else 0
    unseen = once / ids.lookups if ids.distinct < ids.rows else 0.0
    shares[hot] = torch.tensor(ids.hot_counts, dtype=torch.float64) / ids.lookups * (1 - unseen)
    others = ids.rows - len(hot)
    if others:
        uncounted = torch.ones(ids.rows, dtype=torch.bool)
        uncounted[hot] = False
        shares[uncounted] = max(1 - float(shares.sum()), 0.0) / others
    return shares / shares.sum()
