"""The part of the Technique protocol that all ways to compress share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from slipstream.technique import CodeChange, Context, Quality, QualityKind, Stage, Traits
from slipstream.techniques.distributed.compression import prediction
from slipstream.techniques.distributed.compression.compressor import Compressor
from slipstream.techniques.distributed.replicas import ON_REPLICAS, need_ddp

if TYPE_CHECKING:
    from slipstream.durations import Question
    from slipstream.graph import Graph
    from slipstream.workload import Built, Workload

# Of those that send so little at once that most of a gradient arrives later.
LATE = (
    "find the learning rate anew, without momentum first: what is kept arrives late and in one "
    "piece, and momentum repeats it"
)
# Of a step that is shared among workers already.
COMPRESSES = replace(ON_REPLICAS, stage=Stage.DISTRIBUTION + 1, compresses=True)


class CompressionTechnique(Compressor):
    """A way to compress, as a technique on top of ``ddp``.

    Attributes:
        advice: what of the training has to change with it; see the convergence rows of the bench.
    """

    traits: ClassVar[Traits] = COMPRESSES
    advice: ClassVar[str] = ""

    def why_not(self, graph: Graph, workload: Workload | None = None) -> str | None:
        """None, or why nothing of the step can be compressed."""
        return prediction.why_not(self, graph)

    def questions(self, graph: Graph) -> Sequence[Question]:
        """Each bucket's encoding and decoding."""
        return prediction.questions(self, graph)

    def predict(self, graph: Graph, context: Context) -> Graph:
        """Encode, transfer and decode in place of each bucket's all-reduce."""
        return prediction.predict(self, graph, context)

    def apply(self, built: Built) -> None:
        """Put the hook on a model that is in DDP already.

        Raises:
            WorkloadError: it is not.
            UsageError: it has a hook.
        """
        from slipstream.techniques.distributed.compression.hook import compress

        compress(need_ddp(built, self.name, str(self)), self)

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
