"""Exposed communication of a rank, attributed to layers.

    exposed = ExposedTimes()
    watch(built, exposed)

The code that blocks the training thread reports the wait: hooks of ``DistributedDataParallel`` the
arrival of each bucket, `PriorityDDP` the wait at a layer's gate. An interval is attributed to the
gradients that arrive at its end, or to the layer at whose gate training waits, as in
`slipstream.graph.views.exposed`, which predicts the same. Without a watcher nothing is timed.
"""

from __future__ import annotations

import bisect
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from slipstream.capture.compiling import compiled_already
from slipstream.capture.modules import ROOT
from slipstream.ranks.buffers import limit_buffers
from slipstream.ranks.group import ProcessGroup
from slipstream.workload import BuiltWorkload

Future = torch.futures.Future[torch.Tensor]


class ExposedTime(NamedTuple):
    """An interval in which the training thread is blocked.

    Attributes:
        began_s, ended_s: times of `time.perf_counter`.
        parameters: parameters whose gradients it waits for.
        what: name of the wait, if it is not for gradients.
    """

    began_s: float
    ended_s: float
    parameters: Sequence[torch.Tensor]
    what: str = ""


class ExposedTimes:
    """The waits of a rank's training thread, in order."""

    def __init__(self) -> None:
        self.times: list[ExposedTime] = []

    def add(
        self, began_s: float, ended_s: float, parameters: Sequence[torch.Tensor], what: str = ""
    ) -> None:
        """Record a wait, unless it is empty."""
        if ended_s > began_s:
            self.times.append(ExposedTime(began_s, ended_s, parameters, what))


@runtime_checkable
class ReportsExposed(Protocol):
    """A model or an optimizer that reports its waits."""

    def report_exposed(self, exposed: ExposedTimes | None) -> None:
        """Report waits to `exposed` from now on; None stops."""


def watch(built: BuiltWorkload, exposed: ExposedTimes | None) -> bool:
    """Report every wait to `exposed` from now on; None stops.

    A ``DistributedDataParallel`` without a hook gets one that runs the same all-reduces, which DDP
    cannot remove again.

    Returns:
        Whether the model or the optimizer reports its waits.
    """
    watched = False
    for target in (built.model, built.optimizer):
        if isinstance(target, DistributedDataParallel):
            watched |= watch_buckets(target, exposed)
        elif isinstance(target, ReportsExposed):
            target.report_exposed(exposed)
            watched = True
    return watched


def watch_buckets(model: DistributedDataParallel, exposed: ExposedTimes | None) -> bool:
    """Watch one model; return False if it has a hook that is not ours."""
    if not getattr(model, "_comm_hooks", []):
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        put_hook(model, functools.partial(allreduce_hook, model.process_group))
    ours = [state for _, state in model._comm_hooks if isinstance(state, BucketHook)]
    for hook in ours:
        hook.watch(exposed)
    return bool(ours)


def put_hook(
    model: DistributedDataParallel, on_bucket: Callable[[Any], Future],
    ranks: ProcessGroup | None = None,
) -> None:  # fmt: skip
    """Register `on_bucket` as the exchange of the model's buckets, and make it watchable.

    Args:
        ranks: the group that exchanges buckets; its time limits then apply to buffers, too.
    """
    model.register_comm_hook(BucketHook(on_bucket), _call)
    if ranks is not None:
        limit_buffers(model, ranks)


def _call(state, bucket):  # type: ignore[no-untyped-def] # DDP compares annotations with types
    return state.on_bucket(bucket)


class BucketHook:
    """A communication hook of ``DistributedDataParallel`` that can be watched.

    DDP waits for its buckets in order after the backward pass; those of our hooks that raise errors
    of the exchange wait for all buckets in the call for the last one. Copying a bucket back to its
    gradients while the next one is in flight counts as waiting.
    """

    def __init__(self, on_bucket: Callable[[Any], Future]) -> None:
        self._exchange = on_bucket
        self._exposed: ExposedTimes | None = None
        self._arrivals: list[_Arrival] = []
        # Begin and return of the call for the last bucket, and end of the backward pass.
        self._began_s = self._returned_s = self._over_s = 0.0

    def watch(self, exposed: ExposedTimes | None) -> None:
        """Report every later backward pass to `exposed`; first report the previous one."""
        self._report()
        self._exposed = exposed

    def on_bucket(self, bucket: Any) -> Future:
        """Exchange a bucket; DDP calls it in the same order on all ranks."""
        if self._exposed is None:
            return self._exchange(bucket)
        if bucket.index() == 0:
            self._report()
            # Runs before the callback that DDP queues with the last bucket, which waits.
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_over)
        arrival = _Arrival(bucket.parameters())
        self._arrivals.append(arrival)
        self._began_s = time.perf_counter()
        future = self._exchange(bucket)
        self._returned_s = time.perf_counter()
        return future.then(arrival.note)

    def _backward_over(self) -> None:
        self._over_s = time.perf_counter()

    def _report(self) -> None:
        """Report the waits of the previous backward pass."""
        arrivals, self._arrivals = self._arrivals, []
        if self._exposed is None:
            return
        blocked = (self._began_s, self._returned_s), (self._over_s, math.inf)
        previous_s = self._began_s
        for arrival in arrivals:
            for began, ended in blocked:
                self._exposed.add(
                    max(began, previous_s), min(ended, arrival.at_s), arrival.parameters
                )
            previous_s = max(previous_s, arrival.at_s)


class _Arrival:
    """Arrival time of a bucket."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self.parameters, self.at_s = parameters, 0.0

    def note(self, future: Future) -> torch.Tensor:
        self.at_s = time.perf_counter()
        return future.value()


class Layers:
    """Layers of parameters, under the names that a recorded step gives to gradients.

    A parameter belongs to its module or, if that is never called because its parent computes for
    it, to the closest ancestor that is; a tied parameter to the owner that is called first.

    Attributes:
        order: layers with parameters, in the order of their first calls.
    """

    def __init__(self, model: nn.Module) -> None:
        wraps = isinstance(model, DistributedDataParallel | ReportsExposed)
        inner = getattr(model, "module", None) if wraps else None
        self._model = inner if isinstance(inner, nn.Module) else model
        self._called: list[str] = []
        self.order: list[str] = []
        self._of: dict[int, str] = {}
        self._assign()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record the modules that a step calls, unless the model is compiled."""
        if compiled_already(self._model):
            yield
            return
        self._called = []
        hooks: list[Any] = []
        for name, module in self._model.named_modules():
            hook: Any = module.register_forward_pre_hook
            hooks.append(hook(lambda *_, name=name: self._called.append(name)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self._assign()

    def shares(self, parameters: Sequence[torch.Tensor]) -> dict[str, float]:
        """Return the share of each layer in the parameters' bytes; empty without parameters."""
        by_layer: dict[str, float] = {}
        total = sum(parameter.nbytes for parameter in parameters)
        for parameter in parameters:
            layer = self._of.get(id(parameter), ROOT)
            share = parameter.nbytes / total if total else 1.0 / len(parameters)
            by_layer[layer] = by_layer.get(layer, 0.0) + share
        return by_layer

    def _assign(self) -> None:
        names = [name for name, _ in self._model.named_modules()]
        # Before the first call, assume that all modules are called in the order of registration.
        place = {name: n for n, name in reversed(list(enumerate(self._called or names)))}
        places: dict[str, int] = {}
        self._of = {}
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            owner = name.rpartition(".")[0]
            while owner and owner not in place:
                owner = owner.rpartition(".")[0]
            layer = f"{ROOT}.{owner}" if owner else ROOT
            places[layer] = place.get(owner, 0)
            current = self._of.get(id(parameter))
            if current is None or places[layer] < places[current]:
                self._of[id(parameter)] = layer
        used = set(self._of.values())
        self.order = sorted(used, key=lambda layer: places[layer])


def step_by_step(
    exposed: ExposedTimes, layers: Layers, stamps: Sequence[float]
) -> list[dict[str, float]]:
    """Return the seconds waited per layer, for each step between consecutive `stamps`.

    Waits that are not for a layer are listed under their name in parentheses.
    """
    steps: list[dict[str, float]] = [{} for _ in stamps[1:]]
    for wait in exposed.times:
        number = bisect.bisect_right(stamps, wait.began_s) - 1
        if not 0 <= number < len(steps):
            continue
        elapsed_s = wait.ended_s - wait.began_s
        for layer, share in (layers.shares(wait.parameters) or {f"({wait.what})": 1.0}).items():
            steps[number][layer] = steps[number].get(layer, 0.0) + share * elapsed_s
    return steps


def typical(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return means by layer over the middle half of `steps`, ordered by their total wait.

    All layers use the same steps, so that their means add up; outliers do not count.
    """
    ordered = sorted(steps, key=lambda step: sum(step.values()))
    skipped = len(ordered) // 4
    middle = ordered[skipped : len(ordered) - skipped]
    layers = dict.fromkeys(layer for step in middle for layer in step)
    return {layer: sum(step.get(layer, 0.0) for step in middle) / len(middle) for layer in layers}
