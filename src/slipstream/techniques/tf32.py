"""TensorFloat-32: float32 matrix products on tensor cores, with ten bits of mantissa.

Source: NVIDIA, "NVIDIA A100 Tensor Core GPU Architecture", 2020; in PyTorch
``torch.backends.cuda.matmul.allow_tf32`` and ``torch.backends.cudnn.allow_tf32``.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from slipstream.durations import common_spread
from slipstream.durations.roofline import device_named
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

# The names of cuBLAS, CUTLASS and cuDNN kernels contain the instructions they use.
_FLOAT32 = re.compile(r"sgemm|ffma|simt_s|scudnn|f32f32_f32f32_f32")
_TENSOR_CORES = re.compile(r"tf32|s884|s1688|s16816|h884|h1688|h16816|tensorop|hmma|gmma|wgmma")
_BEFORE_AMPERE = re.compile(r"\b(maxwell|pascal|volta|turing)_|sm[567]\d_")
# Data sheet used for an unknown device.
_DEFAULT_DEVICE = "NVIDIA A100"
_Z90 = 1.645
_MARGIN = 1.75


@dataclass(frozen=True)
class Tf32(TechniqueSettings):
    """Allow TensorFloat-32 in float32 matrix products and convolutions."""

    name: ClassVar[str] = "tf32"
    traits: ClassVar[Traits] = Traits(stage=Stage.PRECISION, kernels_only=True)
    effect: ClassVar[Quality] = Quality(
        QualityKind.ROUNDING, "float32's range, ten bits of mantissa in products, float32 sums"
    )

    def why_not(self, graph: Graph, workload: Workload | None = None) -> str | None:
        """Return why no kernel of the step would change; None if one would."""
        reason = not_on_gpu(graph, "TensorFloat-32 exists only on NVIDIA GPUs since Ampere (2020)")
        if reason is not None:
            return reason
        if len(kernels(graph, lambda name, scope: bool(_BEFORE_AMPERE.search(name)))):
            return "the step ran on a GPU older than Ampere (2020), which has no TensorFloat-32"
        if not len(_float32(graph)):
            if len(kernels(graph, lambda name, scope: bool(_TENSOR_CORES.search(name)))):
                return "its matrix products run on tensor cores already"
            return "no kernel of the step is recognised as a float32 matrix product"
        return None

    def predict(self, graph: Graph, context: Context) -> Graph:
        """Scale float32 matrix products by an assumed factor below that of the data sheet."""
        chosen, max_speedup = _float32(graph), _max_speedup(graph)
        factor = 1 / math.sqrt(max_speedup)
        # A 90 % interval from no gain, as for memory-bound kernels, to slightly above the maximum.
        spread = common_spread(graph, chosen, _MARGIN * math.log(max_speedup) / 2 / _Z90)
        edit = Editor(graph, str(self))
        edit.scale(chosen, factor, Provenance.ASSUMED, spread=spread)
        return edit.apply(
            f"{len(chosen)} float32 matrix products in TensorFloat-32, assumed "
            f"{1 / factor:.2g} times as fast (1 to {max_speedup:.1f})"
        )

    def apply(self, built: BuiltWorkload) -> None:
        """Set torch's two flags in this process.

        Raises:
            WorkloadError: there is no NVIDIA GPU, or the model is not on it.
        """
        import torch

        need_gpu(built, self.name)
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.allow_tf32 = True

    def code(self, workload: Workload) -> CodeChange | None:
        """Return the flag of matrix products, after the imports; cuDNN's is set by default."""
        flag = "backends.cuda.matmul.allow_tf32 = True"
        return CodeChange.of(
            workload,
            lambda where: where.at_top(f"{{torch}}.{flag}"),
            by_hand=f"torch.{flag}",
            technique=self,
        )


def _max_speedup(graph: Graph) -> float:
    """Return the maximum speed-up of matrix products by the data sheet of the step's device."""
    name = str(graph.meta.get("device_name", _DEFAULT_DEVICE))
    for device in (device_named(name), device_named(_DEFAULT_DEVICE)):
        if device is not None and {"tf32", "fp32"} <= set(device.flops):
            return device.flops["tf32"].value / device.flops["fp32"].value
    raise AssertionError(f"{_DEFAULT_DEVICE} has a data sheet")


def _float32(graph: Graph) -> NDArray[np.int64]:
    """Return the kernels that multiply float32 matrices without tensor cores.

    Convolutions are excluded: PyTorch allows TensorFloat-32 for them by default, so the flag does
    not change the kernel that cuDNN chose.
    """

    def plain(name: str, scope: str) -> bool:
        convolves = "conv" in scope.lower() or "cudnn" in name
        return bool(_FLOAT32.search(name)) and not _TENSOR_CORES.search(name) and not convolves

    return kernels(graph, plain)
