"""Random runs of real ranks: none may hang, and where one rank fails all others are told.

A rank may raise in a backward pass and live on, after which the ranks go on with the next run, in a
group of its own; at the end of a launch one ends, or stops, after which they are of no more use.
"""

from __future__ import annotations

import contextlib
import random
import time
from typing import Any

import torch
import torch.distributed as dist

from slipstream.child import leave
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
    """By the rank that is to fail."""


def run(count: int, seed: int) -> list[dict[str, Any]]:
    """Of each trial: whether it ended as it has to, and how long an error took to come."""
    raise_priority()
    found = [_trial(1000 * seed + n, n == count - 1) for n in range(count)]
    # A rank that is to end does: the others see its connections close.
    leave(found)


def _trial(seed: int, last: bool) -> dict[str, Any]:
    """Layers, order, slices and failures are the same on all ranks; delays are each rank's own."""
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
    mine = dist.get_rank() == culprit
    order, slice_elems = common.choice(ORDERS), common.choice((256, 4_000, 50_000))
    credit = common.choice((1, 10_000, 1_000_000))
    how = f"{order}, slices of {slice_elems}, credit {credit}"
    one: PriorityDDP | None = None
    try:
        one = PriorityDDP(
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
            loss = one(torch.ones(1, requires_grad=True)).sum()
            if mine and step == at:
                if last:
                    # It ends, or lives on and takes no part any more.
                    time.sleep(0.0 if ends else _WORST_S)
                    return {"fails": True, "ended": True, "named": True, "error_s": 0.0}
                chosen: Any = own.choice(list(model.parameters()))
                chosen.register_hook(_fail)
            loss.backward()
            optimizer.step()
        one.synchronize()
    except CommunicationError as raised:
        error = raised
        error_s = time.perf_counter() - began
    except _FailedError:
        pass
    if fails and not last:
        # The others have had their error; this one leaves what they have left.
        dist.barrier()
        if mine and one is not None:
            one._ranks.explain(_FailedError("raised"), "a trial")
    if one is not None:
        with contextlib.suppress(CommunicationError):
            one.close()
    named = error is not None and error.ranks == (culprit,)
    return {
        "fails": fails, "ended": mine or (error is not None) == fails,
        "named": named or mine or not fails, "error_s": error_s,
        "said": "" if error is None else f"{how}, step {step}: {error}",
    }  # fmt: skip


def _fail(gradient: torch.Tensor) -> None:
    raise _FailedError
