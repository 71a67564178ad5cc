"""Compressors as techniques: encode, transfer and decode replace each all-reduce."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from slipstream.durations import TimingRequest
from slipstream.graph import Call, Editor, Exchange, Graph, Role, Work, price, replace_exchange
from slipstream.technique import CodeChange, Context, Quality, QualityKind, Stage, Traits
from slipstream.techniques.distributed.compression.compressor import Compressor
from slipstream.techniques.distributed.replicas import ON_REPLICAS, OnReplicas, all_reduces

if TYPE_CHECKING:
    from slipstream.workload import BuiltWorkload, Workload

# Traits of a technique on top of one that creates replicas.
COMPRESSES = replace(ON_REPLICAS, stage=Stage.DISTRIBUTION + 1, compresses=True)
# Advice for compressors that delay most of a gradient.
LATE = (
    "tune the learning rate again, first without momentum: residuals arrive late and all together, "
    "and momentum repeats them"
)
OP = "slipstream::compression"
THREAD = "gradient exchange"
"""Lane of the thread that encodes, waits and decodes, if it has a separate core."""
# Assumed bandwidth of an unmeasured pass over memory, in bytes per second, and number of passes.
_ASSUMED_PASS = 5e9
_ASSUMED_PASSES = 3.0


class CompressionTechnique(Compressor, OnReplicas):
    """Base of compressors as techniques on top of ``ddp``.

    Attributes:
        advice: required changes of the training; see the convergence rows of the benchmark.
    """

    traits: ClassVar[Traits] = COMPRESSES
    advice: ClassVar[str] = ""

    def why_not(self, graph: Graph, workload: Workload | None = None) -> str | None:
        """Return why no exchange of the step can be compressed; None if one can."""
        if not graph.exchanges:
            return (
                "the step exchanges no gradients: combine it with ddp, for example "
                f"ddp:workers=4+{self.name}"
            )
        rows = _compressible(graph)
        if not rows:
            return "no bucket of float32 gradients is all-reduced in this step"
        if any(spec.device.partition(":")[0] != "cpu" for row in rows for spec in row.tensors):
            return "gradients are not on CPU, where the encoders run"
        return None

    def required_timings(self, graph: Graph) -> Sequence[TimingRequest]:
        """Return the encoding of each bucket, and all of its work."""
        questions = [q for row in _compressible(graph) for q in self._questions(row)]
        return list({question.call.key: question for question in questions}.values())

    def predict(self, graph: Graph, context: Context) -> Graph:
        """Replace each bucket's all-reduce by encoding, transfer and decoding.

        Raises:
            UsageError: the context has no cluster.
        """
        from slipstream.techniques.distributed.compression.bucket import Layout

        cluster = self.need_cluster(context)
        edit = Editor(graph, str(self))
        before = after = 0.0
        residual_bytes = 0
        for row in _compressible(graph):
            layout = Layout.of({f"p{n}": spec.shape for n, spec in enumerate(row.tensors)})
            messages = self.messages(layout)
            encode, decode = self._work(row, context)
            sent = [message.collective(row.ranks) for message in messages]
            transfers = [
                replace(row.collective, kind=kind, algo="auto", nbytes=size) for kind, size in sent
            ]
            replace_exchange(
                edit, row, cluster, encode=[encode], transfers=transfers, decode=[decode],
                thread=THREAD if _has_free_core(graph) else "",
            )  # fmt: skip
            before += 2.0 * (row.ranks - 1) / row.ranks * row.collective.nbytes
            after += sum(message.sent_bytes(row.ranks) for message in messages)
            residual_bytes += 4 * layout.numel
        if self.keeps and len(graph.memory):
            edit.allocate(residual_bytes, Role.GRADIENT, -1, -1)
        return edit.apply(f"{before / max(after, 1.0):.1f} times fewer bytes of gradients")

    def apply(self, built: BuiltWorkload) -> None:
        """Register the hook on a model that DistributedDataParallel already wraps.

        Raises:
            WorkloadError: the model is not wrapped.
            UsageError: the model already has a hook.
        """
        from slipstream.techniques.distributed.compression.hook import compress

        compress(self.need_ddp(built, str(self)), self)

    def quality(self, graph: Graph | None = None) -> Quality:
        """Return that training has to be repeated; see the card for accuracy at equal steps."""
        return Quality(QualityKind.NEEDS_TRAINING, "the mean gradient is approximated", self.advice)

    def code(self, workload: Workload) -> CodeChange | None:
        """Return a manual step: compress after wrapping the model in DDP."""
        return CodeChange(
            "",
            "after model = DistributedDataParallel(model), by hand:\n"
            f'    slipstream.distributed.compress(model, "{self}")',
        )

    def _questions(self, row: Exchange) -> tuple[TimingRequest, TimingRequest]:
        """Return the encoding of a bucket, and all of the work on it."""
        shapes = [spec.shape for spec in row.tensors]
        # One thread exchanges all buckets; its CPU time excludes other programs.
        encode, both = (
            TimingRequest(exchange_call(self, shapes, row.ranks, part), threads=1)
            for part in ("encode", "all")
        )
        return encode, both

    def _work(self, row: Exchange, context: Context) -> tuple[Work, Work]:
        """Return the work before the last transfer, and after it."""
        encode, both = self._questions(row)
        assumed_ns = _ASSUMED_PASSES * row.collective.nbytes / _ASSUMED_PASS * 1e9
        first = price(context.durations, encode, assumed_ns / 2)
        whole = price(context.durations, both, assumed_ns)
        decode_ns = max(whole.nanoseconds - first.nanoseconds, 0.0)
        return (
            Work(f"{self.name} encode", first.nanoseconds, first.provenance, first.spread,
                 encode.call),
            Work(f"{self.name} decode", decode_ns, whole.provenance, whole.spread, both.call),
        )  # fmt: skip


def exchange_call(
    compressor: Compressor, shapes: Sequence[tuple[int, ...]], workers: int, part: str
) -> Call:
    """Return the call that times one bucket's work on one worker.

    Args:
        shapes: shapes of the gradients in the bucket.
        part: ``all``, or ``encode`` for the work before the last communication.
    """
    return Call(f"{OP}()", (str(compressor), tuple(shapes), workers, part))


def _compressible(graph: Graph) -> list[Exchange]:
    """Return the all-reduces of float32 gradients."""
    return [
        row
        for row in all_reduces(graph)
        if row.tensors
        and row.ready >= 0
        and row.awaited >= 0
        and all(spec.dtype == "float32" for spec in row.tensors)
    ]


def _has_free_core(graph: Graph) -> bool:
    """Whether the machine has a core that the recorded step does not use, for the hook's thread.

    Otherwise that thread delays one of the step's threads, for which the others wait, so that the
    step takes longer by all of its work.
    """
    machine = graph.meta.get("machine") or {}
    cores = machine.get("cpu.logical") or 1
    return int(cores) > int(graph.meta.get("threads", 1))
