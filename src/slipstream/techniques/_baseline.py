"""Features that a recorded step already uses, and reasons why techniques do not apply."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.graph import Graph, StepPhase, TensorSpec, unique_in_order
from slipstream.techniques.autocast import ROOT

_STEP = "Optimizer.step#"


def already_compiled(graph: Graph) -> str | None:
    """Return the reason that torch.compile hides the model's operators; None if it does not."""
    if not _baseline(graph).get("compiled"):
        return None
    return (
        "the model is compiled already, which hides its operators; profile it without torch.compile"
    )


def already_autocast(graph: Graph) -> str | None:
    """Return the reason that the step already runs under autocast; None if it does not."""
    dtype = _baseline(graph).get("amp")
    return f"the step runs under autocast ({dtype}) already" if dtype else None


def hidden_model(graph: Graph) -> str | None:
    """Return the reason that the step has no model to change; None if its model is known."""
    modules = unique_in_order(graph.tasks.module, len(graph.strings)).tolist()
    if any(graph.string(module).partition(".")[0] == ROOT for module in modules):
        return None
    return "the step hides its model; return (model, batch, loss, optimizer)"


def is_compiled(graph: Graph) -> bool:
    """Whether parts of the step went through torch.compile."""
    return bool(_baseline(graph).get("compiled"))


def updated_tensors(graph: Graph) -> list[TensorSpec]:
    """Return the tensors that the step's optimizer updates; empty without an optimizer."""
    described: Any = graph.meta.get("optimizer") or {"tensors": []}
    return [
        TensorSpec(dtype, tuple(shape), tuple(strides), device)
        for dtype, shape, strides, device in described["tensors"]
    ]


def update_tasks(graph: Graph) -> NDArray[np.int64]:
    """Return the tasks inside ``Optimizer.step``."""
    inside = np.array([text.startswith(_STEP) for text in graph.strings])
    phase = graph.tasks.phase == StepPhase.OPTIMIZER
    return np.flatnonzero(phase & inside[graph.tasks.scope])


def _baseline(graph: Graph) -> dict[str, Any]:
    # Imported and older graphs have no baseline.
    baseline: Any = graph.meta.get("baseline")
    return baseline if isinstance(baseline, dict) else {}
