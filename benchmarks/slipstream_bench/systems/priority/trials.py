"""Random runs of real ranks: none may hang, and if one rank fails all others get an error.

A rank may raise in a backward pass and continue: then the ranks continue with the next run, in a
new group. In the last run of a launch a rank exits or stops, after which the group is unusable.
"""

from __future__ import annotations

import contextlib
import random
import time
from typing import Any

import torch
import torch.distributed as dist

from slipstream.child import exit_with
from slipstream.errors import CommunicationError
from slipstream.ranks.operations import raise_priority
from slipstream.techniques.distributed.priority.simulate import ORDERS
from slipstream.techniques.distributed.priority.wrapper import PriorityDDP
from slipstream_bench.systems.priority.workloads import Emulated, Layer

_STEPS = 9
_TIMEOUT_S, _PATIENCE_S = 4.0, 2.0
_WORST_S = 15.0
_RAISES = 0.06


class _FailedError(Exception):
    """Raised by the rank that is to fail."""


def run(count: int, seed: int) -> list[dict[str, Any]]:
    """Return for each trial whether it ended as required, and how long an error took."""
    raise_priority()
    found = [_trial(1000 * seed + n, n == count - 1) for n in range(count)]
    # A rank that is to exit does so now: the others see its connections close.
    exit_with(found)


def _trial(seed: int, last: bool) -> dict[str, Any]:
    """Layers, order, slices and failures are the same on all ranks; delays differ."""
    common, own = random.Random(seed), random.Random(f"{seed}/{dist.get_rank()}")
    layers = [
        Layer(common.choice((1, 700, 5_000, 40_000)), 0.0, 0.0) for _ in range(common.randint(1, 9))
    ]
    fails = last or common.random() < _RAISES
    culprit = common.randrange(dist.get_world_size()) if fails else -1
    at, ends = common.randrange(_STEPS), common.random() < 0.5
    model = Emulated(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    jitter = common.choice((0.0, 0.002))
    began, error_s, error, step = time.perf_counter(), 0.0, None, -1
    failing = dist.get_rank() == culprit
    order, slice_elems = common.choice(ORDERS), common.choice((256, 4_000, 50_000))
    credit = common.choice((1, 10_000, 1_000_000))
    how = f"{order}, slices of {slice_elems}, credit {credit}"
    wrapped: PriorityDDP | None = None
    try:
        wrapped = PriorityDDP(
            model,
            optimizer,
            timeout_s=_TIMEOUT_S,
            patience_s=_PATIENCE_S,
            order=order,
            slice_elems=slice_elems,
            credit=credit,
        )
        for step in range(_STEPS):
            for layer in model.layers:
                layer.times = (own.uniform(0, jitter), own.uniform(0, jitter))  # type: ignore[assignment]
            if own.random() < 0.1:
                time.sleep(own.uniform(0, 0.05))
            began = time.perf_counter()
            optimizer.zero_grad()
            loss = wrapped(torch.ones(1, requires_grad=True)).sum()
            if failing and step == at:
                if last:
                    # The rank exits, or continues without taking part.
                    time.sleep(0.0 if ends else _WORST_S)
                    return {"fails": True, "ended": True, "named": True, "error_s": 0.0}
                chosen: Any = own.choice(list(model.parameters()))
                chosen.register_hook(_fail)
            loss.backward()
            optimizer.step()
        wrapped.synchronize()
    except CommunicationError as raised:
        error = raised
        error_s = time.perf_counter() - began
    except _FailedError:
        pass
    if fails and not last:
        # The others have their error; this rank leaves the group.
        dist.barrier()
        if failing and wrapped is not None:
            wrapped._ranks.explain(_FailedError("raised"), "a trial")
    if wrapped is not None:
        with contextlib.suppress(CommunicationError):
            wrapped.close()
    named = error is not None and error.ranks == (culprit,)
    return {
        "fails": fails, "ended": failing or (error is not None) == fails,
        "named": named or failing or not fails, "error_s": error_s,
        "said": "" if error is None else f"{how}, step {step}: {error}",
    }  # fmt: skip


def _fail(gradient: torch.Tensor) -> None:
    raise _FailedError
