"""What a recorded step has already, in the words of a technique that therefore does not apply."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.graph import Graph, StepPhase, TensorSpec

_STEP = "Optimizer.step#"


def already_compiled(graph: Graph) -> str | None:
    """Why nothing can be said of the model's operators: torch.compile has fused them already."""
    if not _baseline(graph).get("compiled"):
        return None
    return (
        "the model is compiled already, which hides its operators; profile it without torch.compile"
    )


def already_autocast(graph: Graph) -> str | None:
    """Under which dtype the step's autocast runs, in words; None when it runs under none."""
    dtype = _baseline(graph).get("amp")
    return f"the step runs under autocast ({dtype}) already" if dtype else None


def is_compiled(graph: Graph) -> bool:
    """Whether parts of the step went through torch.compile."""
    return bool(_baseline(graph).get("compiled"))


def updated_tensors(graph: Graph) -> list[TensorSpec]:
    """What the step's optimizer updates; nothing where it has none."""
    described: Any = graph.meta.get("optimizer") or {"tensors": []}
    return [
        TensorSpec(dtype, tuple(shape), tuple(strides), device)
        for dtype, shape, strides, device in described["tensors"]
    ]


def update_tasks(graph: Graph) -> NDArray[np.int64]:
    """Tasks inside ``Optimizer.step``."""
    inside = np.array([text.startswith(_STEP) for text in graph.strings])
    phase = graph.tasks.phase == StepPhase.OPTIMIZER
    return np.flatnonzero(phase & inside[graph.tasks.scope])


def _baseline(graph: Graph) -> dict[str, Any]:
    # A graph that was imported, or recorded before this was, says nothing.
    baseline: Any = graph.meta.get("baseline")
    return baseline if isinstance(baseline, dict) else {}
