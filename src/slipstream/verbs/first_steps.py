"""The first steps of a workload: their losses, or an inference's output.

What a child tells of them is JSON: numbers cross the pipe as text, for there are infinities.
"""

from __future__ import annotations

import base64
import math
import time
from collections.abc import Generator, Mapping
from typing import Any

import numpy as np

from slipstream.measure.checks import Trial
from slipstream.workload import Built

_MOST_STEPS = 50
# The first step's loss says nothing of training yet.
_FEWEST_STEPS = 2
# Of an output; larger ones are sampled evenly. A megabyte for each seed.
_MOST_VALUES = 1 << 17
# Of a batch, that a classifier is asked about.
_MOST_ITEMS = 4096


def first_steps(
    built: Built, steps: int | None, limit_s: float = math.inf
) -> Generator[None, Any, dict[str, Any]]:
    """Run `steps` steps, or as many as fit in `limit_s`; what `losses` and `trial_of` read."""
    began = time.monotonic()
    losses: list[str | None] = []
    output: dict[str, Any] = {"output": None, "shape": []}
    while len(losses) < (steps or _MOST_STEPS):
        value = yield
        number = number_of(value)
        losses.append(None if number is None else repr(number))
        if number is None and not built.training:
            output = _sampled(value)
            # Without training the next one is the same, and not worth its time where that counts.
            if limit_s < math.inf and built.metric is None:
                break
        late = time.monotonic() - began > limit_s
        if steps is None and late and len(losses) >= _FEWEST_STEPS:
            break
    return {"steps": len(losses), "losses": losses, "training": built.training, **output}


def answers(built: Built) -> dict[str, list[int]]:
    """The class that a classifier gives each item of its batch, and that it has where that is told.

    Empty where the model is none, or cannot be asked by itself.
    """
    from slipstream.measure.instability import top_classes
    from slipstream.runtimes.python import TorchRuntime

    if built.model is None:
        return {}
    training = built.model.training
    try:
        asked = TorchRuntime("model", built.model, built.batch, built.loss, threads=0)
        scores = asked.run([part[:_MOST_ITEMS] for part in asked.samples])[0]
        if scores.ndim != 2 or scores.shape[1] < 2:
            return {}
        given = top_classes(scores, 1)[:, 0]
        targets = asked.targets
        if targets is None or targets.ndim != 1 or targets.dtype.kind not in "iu":
            return {"answers": given.tolist()}
        return {"answers": given.tolist(), "targets": targets[:_MOST_ITEMS].tolist()}
    except Exception:
        # Whatever the user's model minds: the row is left out, the proof goes on.
        return {}
    finally:
        built.model.train(training)


def losses(found: Mapping[str, Any]) -> tuple[float | None, ...]:
    """The loss of each step; None where it returned no number."""
    return tuple(None if loss is None else float(loss) for loss in found["losses"])


def trial_of(seed: int, found: Mapping[str, Any]) -> Trial:
    """What `first_steps` told of the steps from `seed`."""
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
    """What a step returned, as a number; None where it is none."""
    import torch

    if isinstance(value, torch.Tensor) and value.numel() == 1:
        # A script's loss still has its graph.
        return float(value.detach())
    return float(value) if isinstance(value, (int, float)) else None


def _sampled(value: Any) -> dict[str, Any]:
    """The first tensor in what a step returned: float64 as text, evenly sampled.

    Of an output that has a loss beside it, the output.
    """
    import torch

    from slipstream.surgery import tensors_in

    tensors = tensors_in(value)
    if not tensors:
        return {"output": None, "shape": []}
    whole = next((one for one in tensors if one.numel() > 1), tensors[0]).detach()
    flat = (torch.view_as_real(whole) if whole.is_complex() else whole).reshape(-1)
    flat = flat[:: max(1, -(-flat.numel() // _MOST_VALUES))]
    values = flat.to("cpu", torch.float64).numpy().astype("<f8")
    return {"output": base64.b64encode(values.tobytes()).decode(), "shape": list(whole.shape)}
