"""The statistic "ids": the rows of embedding tables that a step looks up, and how often.

Look-ups are observed in torch's dispatcher, which covers ``nn.Embedding``, ``nn.EmbeddingBag``,
their functional forms and indexing of a parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from slipstream.capture.events import Dispatched
from slipstream.capture.modules import ROOT
from slipstream.graph import MAX_HOT_IDS, TableIds

if TYPE_CHECKING:
    import torch

Ids = NDArray[np.int64]
# (ids of a call, sizes of its bags or None)
_Lookup = tuple[Ids, Ids | None]


@dataclass
class _Table:
    name: str
    rows: int
    dimension: int
    item_bytes: int
    # Ids of each look-up of the current step; distinct ids and counts of all steps.
    now: list[Ids] = field(default_factory=list)
    seen: list[tuple[Ids, Ids]] = field(default_factory=list)
    blocks: list[list[int]] = field(default_factory=list)
    bag_sizes: list[Ids] = field(default_factory=list)


class Lookups(Dispatched):
    """Context manager that counts look-ups of embedding tables.

    Args:
        model: Model that names its tables; others are named by size.
    """

    def __init__(self, model: torch.nn.Module | None) -> None:
        self._names: dict[int, str] = {}
        for name, parameter in model.named_parameters() if model is not None else ():
            self._names[id(parameter)] = f"{ROOT}.{name}".removesuffix(".weight")
        self._tables: dict[object, _Table] = {}

    def end_step(self) -> None:
        """Assign the look-ups since the last call to one step."""
        for table in self._tables.values():
            ids = np.concatenate(table.now) if table.now else np.empty(0, np.int64)
            distinct, counts = np.unique(ids, return_counts=True)
            table.seen.append((distinct, counts.astype(np.int64)))
            bits = max(table.rows - 1, 0).bit_length() + 1
            table.blocks.append([_count_sorted(distinct >> k) for k in range(bits)])
            table.now = []

    def result(self) -> tuple[TableIds, ...]:
        """Return the tables in the order of their first look-up."""
        return tuple(_summary(table) for table in self._tables.values())

    def _note(self, operator: Any, args: Sequence[Any]) -> None:
        import torch

        name = operator.overloadpacket.__name__
        take = _LOOKUPS.get(name)
        weight = args[0] if args else None
        if take is None or not isinstance(weight, torch.Tensor) or weight.dim() != 2:
            return
        table_name = self._names.get(id(weight))
        if table_name is None and not name.startswith(("embedding", "_embedding")):
            return  # any tensor may be indexed; only parameters are tables
        lookup = take(args)
        if lookup is None:
            return
        ids, bags = lookup
        key = table_name or weight.untyped_storage().data_ptr()
        if key not in self._tables:
            rows, dimension = weight.shape
            called = table_name or f"a table of {rows} x {dimension}"
            self._tables[key] = _Table(called, rows, dimension, weight.element_size())
        table = self._tables[key]
        # Plain indexing may count from the end.
        table.now.append(np.where(ids < 0, ids + table.rows, ids))
        if bags is not None:
            table.bag_sizes.append(bags)


def _array(tensor: Any) -> Ids:
    ids: Ids = tensor.detach().cpu().numpy().reshape(-1).astype(np.int64)
    return ids


def _embedding(args: Sequence[Any]) -> _Lookup:
    return _array(args[1]), None


def _bag(args: Sequence[Any]) -> _Lookup:
    """(weight, indices, offsets, ..., include_last_offset at 7)."""
    ids, offsets = _array(args[1]), _array(args[2])
    last = len(args) > _LAST_OFFSET and args[_LAST_OFFSET]
    return ids, np.diff(offsets if last else np.append(offsets, len(ids)))


def _select(args: Sequence[Any]) -> _Lookup | None:
    return (_array(args[2]), None) if args[1] == 0 else None


def _index(args: Sequence[Any]) -> _Lookup | None:
    import torch

    first, *rest = args[1]
    integers = (torch.int64, torch.int32)
    if first is None or first.dtype not in integers or any(index is not None for index in rest):
        return None
    return _array(first), None


_LAST_OFFSET = 7
# By operator; under torch.inference_mode, embedding_bag is not decomposed.
_LOOKUPS = {
    "embedding": _embedding, "_embedding_bag": _bag, "_embedding_bag_forward_only": _bag,
    "embedding_bag": _bag, "index_select": _select, "index": _index,
}  # fmt: skip


def _count_sorted(values: Ids) -> int:
    return int(np.count_nonzero(np.diff(values))) + 1 if len(values) else 0


def _summary(table: _Table) -> TableIds:
    steps = len(table.blocks)
    ids = np.concatenate([distinct for distinct, _ in table.seen])
    distinct, inverse = np.unique(ids, return_inverse=True)
    counts = np.bincount(
        inverse, np.concatenate([counts for _, counts in table.seen]), len(distinct)
    ).astype(np.int64)
    order = np.lexsort((distinct, -counts))
    running = np.cumsum(counts[order])
    total = int(counts.sum())
    # 1, 2, 4, ... and all of them.
    ends = [2**k for k in range((len(distinct) - 1).bit_length())] + [len(distinct)]
    sizes = np.concatenate(table.bag_sizes) if table.bag_sizes else np.empty(0, np.int64)
    hot = order[:MAX_HOT_IDS]
    return TableIds(
        table=table.name,
        rows=table.rows,
        dimension=table.dimension,
        item_bytes=table.item_bytes,
        lookups=total,
        distinct=len(distinct),
        hot_ids=tuple(distinct[hot].tolist()),
        hot_counts=tuple(counts[hot].tolist()),
        top_share=tuple(float(running[end - 1]) / total for end in ends) if total else (),
        frequency=_histogram(counts),
        blocks=tuple(sum(column) / steps for column in zip(*table.blocks, strict=True)),
        bags=len(sizes),
        bag_ids=int(sizes.sum()),
        empty_bags=int(np.count_nonzero(sizes == 0)),
        bag_sizes=_histogram(sizes[sizes > 0]),
        longest_bag=int(sizes.max(initial=0)),
    )


def _histogram(values: Ids) -> tuple[int, ...]:
    """Count the positive `values` in [2^k, 2^(k+1)), by k."""
    # Unlike a logarithm, frexp is exact.
    return tuple(np.bincount(np.frexp(values.astype(float))[1] - 1).tolist()) if len(values) else ()
