"""A way to compress as a technique: encode, transfer, decode in place of each all-reduce."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from slipstream.durations import Question
from slipstream.graph import Call, Editor, Exchange, Graph, Role, Work, price, replace_exchange
from slipstream.technique import CodeChange, Context, Quality, QualityKind, Stage, Traits
from slipstream.techniques.distributed.compression.compressor import Compressor
from slipstream.techniques.distributed.replicas import ON_REPLICAS, OnReplicas, all_reduces

if TYPE_CHECKING:
    from slipstream.workload import BuiltWorkload, Workload

# Of a step that is shared among workers already.
COMPRESSES = replace(ON_REPLICAS, stage=Stage.DISTRIBUTION + 1, compresses=True)
# Of those that send so little at once that most of a gradient arrives later.
LATE = (
    "find the learning rate anew, without momentum first: what is kept arrives late and in one "
    "piece, and momentum repeats it"
)
OP = "slipstream::compression"
THREAD = "gradient exchange"
"""The lane of the thread that encodes, waits and decodes, where it has a core to itself."""
# Bytes a second of a pass over memory that nobody timed, and how many passes there may be.
_ASSUMED_PASS = 5e9
_ASSUMED_PASSES = 3.0


class CompressionTechnique(Compressor, OnReplicas):
    """A way to compress, as a technique on top of ``ddp``.

    Attributes:
        advice: what of the training has to change with it; see the convergence rows of the bench.
    """

    traits: ClassVar[Traits] = COMPRESSES
    advice: ClassVar[str] = ""

    def why_not(self, graph: Graph, workload: Workload | None = None) -> str | None:
        """None, or why nothing of the step can be compressed."""
        if not graph.exchanges:
            return (
                "there is no exchange of gradients to compress: combine it with ddp, as "
                f"ddp:workers=4+{self.name}"
            )
        rows = _compressible(graph)
        if not rows:
            return "no bucket of float32 gradients is all-reduced in this step"
        if any(spec.device.partition(":")[0] != "cpu" for row in rows for spec in row.tensors):
            return "gradients are not on a processor, where the encoders run"
        return None

    def required_timings(self, graph: Graph) -> Sequence[Question]:
        """Each bucket's encoding, and all of its work."""
        asked = [question for row in _compressible(graph) for question in self._questions(row)]
        return list({one.call.key: one for one in asked}.values())

    def predict(self, graph: Graph, context: Context) -> Graph:
        """Encode, transfer and decode in place of each bucket's all-reduce.

        Raises:
            UsageError: no cluster to send it on.
        """
        from slipstream.techniques.distributed.compression.bucket import Layout

        cluster = self.need_cluster(context)
        edit = Editor(graph, str(self))
        before = after = 0.0
        kept = 0
        for row in _compressible(graph):
            layout = Layout.of({f"p{n}": spec.shape for n, spec in enumerate(row.tensors)})
            messages = self.messages(layout)
            encode, decode = self._work(row, context)
            sent = [one.collective(row.ranks) for one in messages]
            transfers = [
                replace(row.collective, kind=kind, algo="auto", nbytes=size) for kind, size in sent
            ]
            replace_exchange(
                edit, row, cluster, encode=[encode], transfers=transfers, decode=[decode],
                thread=THREAD if _has_free_core(graph) else "",
            )  # fmt: skip
            before += 2.0 * (row.ranks - 1) / row.ranks * row.collective.nbytes
            after += sum(one.sent_bytes(row.ranks) for one in messages)
            kept += 4 * layout.numel
        if self.keeps and len(graph.memory):
            edit.allocate(kept, Role.GRADIENT, -1, -1)
        return edit.apply(f"{before / max(after, 1.0):.1f} times fewer bytes of gradients")

    def apply(self, built: BuiltWorkload) -> None:
        """Put the hook on a model that is in DDP already.

        Raises:
            WorkloadError: it is not.
            UsageError: it has a hook.
        """
        from slipstream.techniques.distributed.compression.hook import compress

        compress(self.need_ddp(built, str(self)), self)

    def quality(self, graph: Graph | None = None) -> Quality:
        """Another sequence of updates; see the card for accuracy at equal steps."""
        return Quality(QualityKind.NEEDS_TRAINING, "the mean gradient is approximated", self.advice)

    def code(self, workload: Workload) -> CodeChange | None:
        """One line after the model is in DDP, to be placed by hand."""
        return CodeChange(
            "",
            "after model = DistributedDataParallel(model), by hand:\n"
            f'    slipstream.distributed.compress(model, "{self}")',
        )

    def _questions(self, row: Exchange) -> tuple[Question, Question]:
        """What encoding a bucket takes, and all of the work on it."""
        shapes = [spec.shape for spec in row.tensors]
        # One thread exchanges all buckets; its CPU time other programs do not add to.
        encode, both = (
            Question(exchange_call(self, shapes, row.ranks, part), threads=1)
            for part in ("encode", "all")
        )
        return encode, both

    def _work(self, row: Exchange, context: Context) -> tuple[Work, Work]:
        """What is computed before the last transfer, and after it."""
        encode, both = self._questions(row)
        assumed_ns = _ASSUMED_PASSES * row.collective.nbytes / _ASSUMED_PASS * 1e9
        first = price(context.durations, encode, assumed_ns / 2)
        whole = price(context.durations, both, assumed_ns)
        rest_ns = max(whole.nanoseconds - first.nanoseconds, 0.0)
        return (
            Work(f"{self.name} encode", first.nanoseconds, first.provenance, first.spread,
                 encode.call),
            Work(f"{self.name} decode", rest_ns, whole.provenance, whole.spread, both.call),
        )  # fmt: skip


def exchange_call(
    compressor: Compressor, shapes: Sequence[tuple[int, ...]], workers: int, part: str
) -> Call:
    """One bucket's work on one worker: to be asked of `slipstream.durations`.

    Args:
        shapes: of the gradients in the bucket.
        part: ``all`` of it, or what comes before the last communication: ``encode``.
    """
    return Call(f"{OP}()", (str(compressor), tuple(shapes), workers, part))


def _compressible(graph: Graph) -> list[Exchange]:
    """All-reduces of float32 gradients."""
    return [
        row
        for row in all_reduces(graph)
        if row.tensors
        and row.ready >= 0
        and row.awaited >= 0
        and all(spec.dtype == "float32" for spec in row.tensors)
    ]


def _has_free_core(graph: Graph) -> bool:
    """Whether the hook's thread finds a core that the recorded step does not compute on.

    Where it does not, it takes its time from one of the step's threads, and the others wait for
    that one: the step is held up by all of it, as if it were computed in between.
    """
    machine = graph.meta.get("machine") or {}
    cores = machine.get("cpu.logical") or 1
    return int(cores) > int(graph.meta.get("threads", 1))
