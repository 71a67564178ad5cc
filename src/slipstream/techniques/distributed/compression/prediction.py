"""The step of a worker whose gradients are compressed: encode, transfer, decode for each bucket."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from slipstream.durations import Question
from slipstream.graph import Call, Editor, Graph, Role, Work, replace_exchange
from slipstream.graph.exchange import Exchange
from slipstream.provenance import Provenance
from slipstream.techniques.distributed.compression.compressor import Compressor
from slipstream.techniques.distributed.compression.timing import exchange_call
from slipstream.techniques.distributed.replicas import need_cluster

if TYPE_CHECKING:
    from slipstream.technique import Context

_ALONE = (
    "there is no exchange of gradients to compress: combine it with ddp, as ddp:workers=4+{name}"
)
_DTYPE = "float32"
# Bytes a second of a pass over memory that nobody timed, and how many passes there may be.
_ASSUMED_PASS = 5e9
_ASSUMED_PASSES = 3.0
_UNKNOWN_SPREAD = 0.5
THREAD = "gradient exchange"
"""The lane of the thread that encodes, waits and decodes, where it has a core to itself."""


def exchanged(graph: Graph) -> list[Exchange]:
    """The buckets that would be compressed: all-reduces of float32 gradients."""
    return [
        row
        for row in graph.exchanges
        if row.collective.kind == "all_reduce"
        and row.tensors
        and row.ready >= 0
        and row.awaited >= 0
        and all(spec.dtype == _DTYPE for spec in row.tensors)
    ]


def why_not(compressor: Compressor, graph: Graph) -> str | None:
    """None, or why nothing of the step can be compressed."""
    if not graph.exchanges:
        return _ALONE.format(name=compressor.name)
    if not exchanged(graph):
        return "no bucket of float32 gradients is all-reduced in this step"
    if any(spec.device.partition(":")[0] != "cpu" for r in exchanged(graph) for spec in r.tensors):
        return "gradients are not on a processor, where the encoders run"
    return None


def questions(compressor: Compressor, graph: Graph) -> Sequence[Question]:
    """All of each bucket's work, and its encoding."""
    asked: dict[str, Question] = {}
    for row in exchanged(graph):
        for part in ("all", "encode"):
            call = exchange_call(compressor, _shapes(row), row.ranks, part)
            asked[call.key] = _timed(call)
    return list(asked.values())


def predict(compressor: Compressor, graph: Graph, context: Context) -> Graph:
    """Each bucket's all-reduce replaced by what the compressor computes and sends.

    Raises:
        UsageError: no cluster to send it on.
    """
    from slipstream.techniques.distributed.compression.bucket import Layout

    cluster = need_cluster(context, compressor.name)
    edit = Editor(graph, str(compressor))
    before = after = 0.0
    kept = 0
    for row in exchanged(graph):
        layout = Layout.of({f"p{n}": shape for n, shape in enumerate(_shapes(row))})
        messages = compressor.messages(layout)
        encode, decode = _work(compressor, row, context)
        told = [one.collective(row.ranks) for one in messages]
        transfers = [
            replace(row.collective, kind=kind, algo="auto", nbytes=size) for kind, size in told
        ]
        replace_exchange(
            edit, row, cluster, encode=[encode], transfers=transfers, decode=[decode],
            thread=THREAD if has_free_core(graph) else "",
        )  # fmt: skip
        before += 2.0 * (row.ranks - 1) / row.ranks * row.collective.nbytes
        after += sum(one.sent_bytes(row.ranks) for one in messages)
        kept += 4 * layout.numel
    if compressor.keeps and len(graph.memory):
        edit.allocate(kept, Role.GRADIENT, -1, -1)
    return edit.apply(f"{before / max(after, 1.0):.1f} times fewer bytes of gradients")


def has_free_core(graph: Graph) -> bool:
    """Whether the hook's thread finds a core that the recorded step does not compute on.

    Where it does not, it takes its time from one of the step's threads, and the others wait for
    that one: the step is held up by all of it, as if it were computed in between.
    """
    machine = graph.meta.get("machine") or {}
    cores = machine.get("cpu.logical") or 1
    return int(cores) > int(graph.meta.get("threads", 1))


def _timed(call: Call) -> Question:
    # One thread exchanges all buckets; its CPU time other programs do not add to.
    return Question(call, threads=1)


def _shapes(row: Exchange) -> list[tuple[int, ...]]:
    return [spec.shape for spec in row.tensors]


def _work(compressor: Compressor, row: Exchange, context: Context) -> tuple[Work, Work]:
    """What is computed before the last transfer, and after it."""
    calls = [exchange_call(compressor, _shapes(row), row.ranks, part) for part in ("all", "encode")]
    both, encode = (context.durations.lookup(_timed(call)) for call in calls)
    names = f"{compressor.name} encode", f"{compressor.name} decode"
    if both is None or encode is None:
        nanoseconds = _ASSUMED_PASSES * row.collective.nbytes / _ASSUMED_PASS * 1e9
        first, second = (
            Work(name, nanoseconds / 2, Provenance.ASSUMED, _UNKNOWN_SPREAD) for name in names
        )
        return first, second
    rest = max(both.nanoseconds - encode.nanoseconds, 0.0)
    return (
        Work(names[0], encode.nanoseconds, encode.provenance, encode.spread, calls[1]),
        Work(names[1], rest, both.provenance, both.spread, calls[0]),
    )
