"""Let cuDNN try its convolution algorithms on the first step and keep the fastest.

Source: ``torch.backends.cudnn.benchmark``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from slipstream.durations import common_spread
from slipstream.graph import Editor, Graph
from slipstream.provenance import Provenance
from slipstream.technique import (
    CodeChange,
    Context,
    Quality,
    QualityKind,
    Stage,
    TechniqueSettings,
    Traits,
)
from slipstream.techniques.gpu import kernels, need_gpu, not_on_gpu
from slipstream.workload import BuiltWorkload, Workload

# Relative. Only cuDNN knows the algorithms for a shape and their speed.
_SPREAD = 0.3


@dataclass(frozen=True)
class CudnnBenchmark(TechniqueSettings):
    """Choose convolution algorithms by trying them instead of by rules."""

    name: ClassVar[str] = "cudnn_benchmark"
    traits: ClassVar[Traits] = Traits(stage=Stage.COMPILE, kernels_only=True)
    effect: ClassVar[Quality] = Quality(
        QualityKind.ROUNDING, "the same convolutions; runs may differ in rounding"
    )

    def why_not(self, graph: Graph, workload: Workload | None = None) -> str | None:
        """Return why there is nothing to try; None if there is."""
        reason = not_on_gpu(graph, "cuDNN runs only on NVIDIA GPUs")
        if reason is None and not len(_convolutions(graph)):
            reason = "the step has no cuDNN convolution"
        return reason

    def predict(self, graph: Graph, context: Context) -> Graph:
        """Widen the uncertainty of convolutions: the result of trying is unknown."""
        chosen = _convolutions(graph)
        spread = common_spread(graph, chosen, _SPREAD)
        edit = Editor(graph, str(self))
        edit.scale(chosen, 1.0, Provenance.ASSUMED, spread=spread)
        return edit.apply(
            f"{len(chosen)} kernels of convolutions may change, which only a run shows"
        )

    def apply(self, built: BuiltWorkload) -> None:
        """Set torch's flag in this process.

        Raises:
            WorkloadError: there is no NVIDIA GPU, or the model is not on it.
        """
        import torch

        need_gpu(built, self.name)
        torch.backends.cudnn.benchmark = True

    def code(self, workload: Workload) -> CodeChange | None:
        """Return the flag, after the imports."""
        flag = "backends.cudnn.benchmark = True"
        return CodeChange.of(
            workload, lambda where: where.at_top(f"{{torch}}.{flag}"), by_hand=f"torch.{flag}"
        )


def _convolutions(graph: Graph) -> NDArray[np.int64]:
    """Return the kernels that convolutions launched."""
    return kernels(graph, lambda name, scope: "convolution" in scope)
