"""What is known of a model's tables before they are planned: sizes, look-ups, numbers."""

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
    """The tables of `model` that may be exchanged, with at least `least_rows` rows.

    Raises:
        InvalidArgumentError: the model has none, trained numbers that are not finite, or counts
            that do not fit a table.
        UnknownNameError: counts of a table that the model lacks.
    """
    modules = dict(exchangeable(model, least_rows))
    if not modules:
        raise InvalidArgumentError(
            "model",
            f"has no nn.Embedding or nn.EmbeddingBag of {least_rows} rows and more that can be "
            "exchanged",
            remedy="least_rows=N changes the limit",
        )
    counts = _counts(id_stats)
    for name in counts:
        if name not in dict(model.named_modules()):
            raise UnknownNameError("table", name, modules)
    known = {
        name: _shares(name, count, modules[name].num_embeddings)
        for name, count in counts.items()
        if name in modules
    }
    total = sum(lookups for _, lookups in known.values())
    # A table that was not counted is taken to be read as often as the others.
    usual = (None, total / len(known) if known else 1.0)
    facts = []
    for name, module in modules.items():
        shares, lookups = known.get(name, usual)
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
    """Modules by name, of at least so many rows, whose weights nothing else holds."""
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
                "id_stats", "has no look-ups; they are recorded on request",
                remedy="ss.profile(workload, needs=('ids',))",
            )  # fmt: skip
        id_stats = id_stats.ids
    if isinstance(id_stats, Mapping):
        return dict(id_stats)
    try:
        return {one.table.removeprefix(_ROOT): one for one in id_stats}
    except (AttributeError, TypeError) as error:
        raise InvalidArgumentError(
            "id_stats", f"a {type(id_stats).__name__} has no look-ups by table",
            remedy='a recorded graph, or counts of each row: {"item": counts}',
        ) from error  # fmt: skip


def _shares(name: str, counts: Any, rows: int) -> tuple[torch.Tensor, float]:
    """Shares of look-ups by row, and their number."""
    if isinstance(counts, TableIds):
        if counts.rows != rows:
            raise InvalidArgumentError(
                "id_stats", f"'{name}' had {counts.rows} rows when it was recorded, now {rows}"
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
            "id_stats", f"'{name}' needs a count for each of its {rows} rows, none negative"
        )
    total = float(shares.sum())
    return (shares / total if total else torch.full_like(shares, 1 / rows)), total


def shares_of(ids: TableIds) -> torch.Tensor:
    """Of a recorded table the share of look-ups that go to each row: float64 [rows], sums to 1.

    What is not known by number is alike: the counted look-ups of other ids, and for ids that were
    not seen the share of those seen once (Good, "The Population Frequencies of Species", 1953).
    """
    shares = torch.zeros(ids.rows, dtype=torch.float64)
    hot = torch.tensor(ids.hot_ids, dtype=torch.int64)
    once = ids.frequency[0] if ids.frequency else 0
    unseen = once / ids.lookups if ids.distinct < ids.rows else 0.0
    shares[hot] = torch.tensor(ids.hot_counts, dtype=torch.float64) / ids.lookups * (1 - unseen)
    others = ids.rows - len(hot)
    if others:
        rest = torch.ones(ids.rows, dtype=torch.bool)
        rest[hot] = False
        shares[rest] = max(1 - float(shares.sum()), 0.0) / others
    return shares / shares.sum()
