"""TensorFloat-32: float32 matrix products on tensor cores, with ten bits of mantissa inside.

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

# Kernels of cuBLAS, CUTLASS and cuDNN say in their names what they multiply with.
_FLOAT32 = re.compile(r"sgemm|ffma|simt_s|scudnn|f32f32_f32f32_f32")
_TENSOR_CORES = re.compile(r"tf32|s884|s1688|s16816|h884|h1688|h16816|tensorop|hmma|gmma|wgmma")
_BEFORE_AMPERE = re.compile(r"\b(maxwell|pascal|volta|turing)_|sm[567]\d_")
# What is bound by memory gains nothing. Stands in for a device that is not known.
_UNKNOWN = "NVIDIA A100"
_Z90 = 1.645
_BEYOND = 1.75


@dataclass(frozen=True)
class Tf32(TechniqueSettings):
    """Allow TensorFloat-32 in float32 matrix products and convolutions."""

    name: ClassVar[str] = "tf32"
    traits: ClassVar[Traits] = Traits(stage=Stage.PRECISION, kernels_only=True)
    effect: ClassVar[Quality] = Quality(
        QualityKind.ROUNDING, "float32's range, ten bits of mantissa in products, float32 sums"
    )

    def why_not(self, graph: Graph, workload: Workload | None = None) -> str | None:
        """None, or why no kernel of the step would change."""
        reason = not_on_gpu(
            graph, "TensorFloat-32 exists only on NVIDIA GPUs from Ampere (2020) on"
        )
        if reason is not None:
            return reason
        if len(kernels(graph, lambda name, scope: bool(_BEFORE_AMPERE.search(name)))):
            return "the step ran on a GPU older than Ampere (2020), which has no TensorFloat-32"
        if not len(_float32(graph)):
            if len(kernels(graph, lambda name, scope: bool(_TENSOR_CORES.search(name)))):
                return "its matrix products run on tensor cores already"
            return "no kernel of the step is known to multiply float32 matrices"
        return None

    def predict(self, graph: Graph, context: Context) -> Graph:
        """Scale float32 matrix products by an assumed factor: between none and the data sheet's."""
        chosen, most = _float32(graph), _at_most(graph)
        factor = 1 / math.sqrt(most)
        # So wide that a 90 % interval reaches from no gain to the most, and a little beyond.
        spread = common_spread(graph, chosen, _BEYOND * math.log(most) / 2 / _Z90)
        edit = Editor(graph, str(self))
        edit.scale(chosen, factor, Provenance.ASSUMED, spread=spread)
        return edit.apply(
            f"{len(chosen)} float32 matrix products in TensorFloat-32, assumed "
            f"{1 / factor:.2g} times as fast (1 to {most:.1f})"
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
        """The flag of matrix products, after the imports; that of cuDNN is set by default."""
        flag = "backends.cuda.matmul.allow_tf32 = True"
        return CodeChange.of(
            workload,
            lambda where: where.at_top(f"{{torch}}.{flag}"),
            by_hand=f"torch.{flag}",
            technique=self,
        )


def _at_most(graph: Graph) -> float:
    """How many times as fast products can get, as the data sheet of the step's device says."""
    name = str(graph.meta.get("device_name", _UNKNOWN))
    for device in (device_named(name), device_named(_UNKNOWN)):
        if device is not None and {"tf32", "fp32"} <= set(device.flops):
            return device.flops["tf32"].value / device.flops["fp32"].value
    raise AssertionError(f"{_UNKNOWN} has a data sheet")


def _float32(graph: Graph) -> NDArray[np.int64]:
    """Kernels that multiply float32 matrices without tensor cores.

    Not those of convolutions: PyTorch allows TensorFloat-32 there by default, so where cuDNN chose
    another kernel it was for a reason that the flag does not change.
    """

    def plain(name: str, scope: str) -> bool:
        convolves = "conv" in scope.lower() or "cudnn" in name
        return bool(_FLOAT32.search(name)) and not _TENSOR_CORES.search(name) and not convolves

    return kernels(graph, plain)
