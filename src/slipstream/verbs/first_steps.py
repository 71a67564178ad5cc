"""Run the first steps of a workload for their losses, or for an inference's output.

A child sends numbers as JSON strings, because JSON has no infinities.
"""

from __future__ import annotations

import base64
import math
import time
from collections.abc import Generator, Mapping
from typing import Any

import numpy as np

from slipstream.measure.checks import Trial
from slipstream.workload import BuiltWorkload

_MAX_STEPS = 50
# A first loss alone shows nothing of training.
_MIN_STEPS = 2
# Maximum output values per seed, a megabyte; larger outputs are sampled evenly.
_MAX_VALUES = 1 << 17
# Maximum items of a batch that a classifier's answers are compared on.
_MAX_ITEMS = 4096


def first_steps(
    built: BuiltWorkload, steps: int | None, limit_s: float = math.inf
) -> Generator[None, Any, dict[str, Any]]:
    """Run `steps` steps, or as many as fit in `limit_s`; see `losses` and `trial_of`."""
    began = time.monotonic()
    losses: list[str | None] = []
    output: dict[str, Any] = {"output": None, "shape": []}
    while len(losses) < (steps or _MAX_STEPS):
        value = yield
        number = number_of(value)
        losses.append(None if number is None else repr(number))
        if number is None and not built.training:
            output = _sampled(value)
            # Without training the next output is identical and not worth limited time.
            if limit_s < math.inf and built.metric is None:
                break
        late = time.monotonic() - began > limit_s
        if steps is None and late and len(losses) >= _MIN_STEPS:
            break
    return {"steps": len(losses), "losses": losses, "training": built.training, **output}


def answers(built: BuiltWorkload) -> dict[str, list[int]]:
    """Return a classifier's predicted class of each item of its batch, and the labels if available.

    Empty if the model is not a classifier or cannot be called on the batch alone.
    """
    from slipstream.measure.instability import top_classes
    from slipstream.runtimes.python import TorchRuntime

    if built.model is None:
        return {}
    training = built.model.training
    try:
        runtime = TorchRuntime("model", built.model, built.batch, built.loss, threads=0)
        scores = runtime.run([part[:_MAX_ITEMS] for part in runtime.samples])[0]
        if scores.ndim != 2 or scores.shape[1] < 2:
            return {}
        predicted = top_classes(scores, 1)[:, 0]
        targets = runtime.targets
        if targets is None or targets.ndim != 1 or targets.dtype.kind not in "iu":
            return {"answers": predicted.tolist()}
        return {"answers": predicted.tolist(), "targets": targets[:_MAX_ITEMS].tolist()}
    except Exception:
        # If the model fails here for any reason, the comparison is left out of the proof.
        return {}
    finally:
        built.model.train(training)


def losses(found: Mapping[str, Any]) -> tuple[float | None, ...]:
    """Return the loss of each step; None for a step that returned no number."""
    return tuple(None if loss is None else float(loss) for loss in found["losses"])


def trial_of(seed: int, found: Mapping[str, Any]) -> Trial:
    numbers = [loss for loss in losses(found) if loss is not None]
    output = found["output"]
    return Trial(
        seed=seed,
        steps=found["steps"],
        losses=tuple(numbers) if len(numbers) == len(found["losses"]) else None,
        metric=None if found.get("metric") is None else float(found["metric"]),
        output=None if output is None else np.frombuffer(base64.b64decode(output), "<f8"),
        shape=tuple(found["shape"]),
        training=found["training"],
        answers=tuple(found.get("answers", ())),
        targets=tuple(found.get("targets", ())),
    )


def number_of(value: Any) -> float | None:
    """Return a step's result as a number; None if it is not one."""
    import torch

    if isinstance(value, torch.Tensor) and value.numel() == 1:
        # A script's loss still has its graph.
        return float(value.detach())
    return float(value) if isinstance(value, (int, float)) else None


def _sampled(value: Any) -> dict[str, Any]:
    """Return the first tensor of a step's result as base64 float64 values, evenly sampled.

    Prefers a tensor with more than one value, so an output over the loss next to it.
    """
    import torch

    from slipstream.surgery import tensors_in

    tensors = tensors_in(value)
    if not tensors:
        return {"output": None, "shape": []}
    whole = next((tensor for tensor in tensors if tensor.numel() > 1), tensors[0]).detach()
    flat = (torch.view_as_real(whole) if whole.is_complex() else whole).reshape(-1)
    flat = flat[:: max(1, -(-flat.numel() // _MAX_VALUES))]
    values = flat.to("cpu", torch.float64).numpy().astype("<f8")
    return {"output": base64.b64encode(values.tobytes()).decode(), "shape": list(whole.shape)}
