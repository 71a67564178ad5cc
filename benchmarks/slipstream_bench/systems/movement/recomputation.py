"""Which values of a step are cheaper to recompute than to write and read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from slipstream.durations.movement import Operation, find_regions, fusible
from slipstream.graph.traffic import short_name


def with_recomputation(operations: Sequence[Operation], lasting: Iterable[int]) -> list[Operation]:
    """Return the operations with values recomputed by later regions if that moves fewer bytes.

    A value that one region writes only for others is recomputed by each of them if its inputs are
    in memory anyway and have fewer bytes to read than the value to write and read. Dropout masks
    are drawn again from a seed, which costs nothing. Contractions are never recomputed.

    Returns:
        Operations that read the inputs of recomputed values, for `analyze`.
    """
    regions = find_regions(operations)
    outliving = set(lasting)
    maker = {v: number for number, op in enumerate(operations) for v, _ in op.writes}
    nbytes: dict[int, int] = {}
    fewest: dict[int, int] = {}
    for op in operations:
        for v, n in (*op.reads, *op.writes):
            # Reads of different views of a value can differ in size.
            nbytes[v], fewest[v] = max(n, nbytes.get(v, n)), min(n, fewest.get(v, n))
    reads = [dict(op.reads) for op in operations]
    users: dict[int, set[int]] = {}
    for number, operation in enumerate(operations):
        for v, _ in operation.reads:
            users.setdefault(v, set()).add(number)

    def leaves(v: int) -> bool:
        if v in outliving or v not in maker:
            return True
        return any(regions[u] != regions[maker[v]] for u in users.get(v, ()))

    def origins(v: int) -> set[int] | None:
        """Return values in memory from which `v` can be recomputed; None if it cannot be."""
        operation = operations[maker[v]]
        if not fusible(operation.call):
            return None
        drawn = short_name(operation.call) in ("native_dropout", "bernoulli")
        if drawn and v != operation.writes[0][0]:
            return set()
        sources: set[int] = set()
        for source, _ in operation.reads:
            stored = source not in maker or not fusible(operations[maker[source]].call)
            parts = {source} if stored or (leaves(source) and source != v) else origins(source)
            if parts is None:
                return None
            sources |= parts
        return sources

    for v in sorted(maker, key=lambda value: -nbytes[value]):
        home = regions[maker[v]]
        others = [u for u in users.get(v, ()) if regions[u] != home]
        if v in outliving or not others or not fusible(operations[maker[v]].call):
            continue
        parts = origins(v)
        if parts is None or not all(fusible(operations[u].call) for u in others):
            continue
        gain = fewest[v]
        for region in {regions[u] for u in others}:
            present = {s for n, r in enumerate(reads) if regions[n] == region for s in r}
            gain += fewest[v] - sum(nbytes[s] for s in parts - present)
        if gain <= 0:
            continue
        for u in others:
            del reads[u][v]
            reads[u].update({s: nbytes[s] for s in parts})
            users[v].remove(u)
            for s in parts:
                users.setdefault(s, set()).add(u)
    return [
        replace(op, reads=tuple(read.items())) for op, read in zip(operations, reads, strict=True)
    ]
