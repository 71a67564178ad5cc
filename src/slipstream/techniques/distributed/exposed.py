"""Exposed communication, and for whose gradients: measured in a rank.

    exposed = ExposedTimes()
    watch(built, exposed)

What a rank's training thread waits for is told by whoever makes it wait: hooks of
``DistributedDataParallel`` say when each bucket has arrived, `PriorityDDP` what a layer's gate
waited for. A stretch is counted for what arrives at its end, or for the layer at whose gate
training stands, as in `slipstream.graph.views.exposed`, which predicts the same. Nobody is told
anything, and nothing is timed, unless somebody watches.
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
    """A stretch in which the training thread stands still.

    Attributes:
        began_s, ended_s: by `time.perf_counter`.
        parameters: whose gradients it waits for.
        what: what else it waits for, where it is not these.
    """

    began_s: float
    ended_s: float
    parameters: Sequence[torch.Tensor]
    what: str = ""


class ExposedTimes:
    """The exposed communication of a rank: what its training thread waited for, in order."""

    def __init__(self) -> None:
        self.times: list[ExposedTime] = []

    def add(
        self, began_s: float, ended_s: float, parameters: Sequence[torch.Tensor], what: str = ""
    ) -> None:
        """It waited, if that is any time at all."""
        if ended_s > began_s:
            self.times.append(ExposedTime(began_s, ended_s, parameters, what))


@runtime_checkable
class TellsExposed(Protocol):
    """A model or an optimizer that tells what training waits for."""

    def tell_exposed(self, exposed: ExposedTimes | None) -> None:
        """Tell `exposed` from now on; None: nobody."""


def watch(built: BuiltWorkload, exposed: ExposedTimes | None) -> bool:
    """Let `exposed` be told of every stretch from now on; None: nobody any more.

    What cannot tell is left alone. A plain ``DistributedDataParallel`` is given a hook that does
    the same all-reduces; it stays, for DDP takes none away.

    Returns:
        Whether somebody tells.
    """
    told = False
    for one in (built.model, built.optimizer):
        if isinstance(one, DistributedDataParallel):
            told |= watch_buckets(one, exposed)
        elif isinstance(one, TellsExposed):
            one.tell_exposed(exposed)
            told = True
    return told


def watch_buckets(model: DistributedDataParallel, exposed: ExposedTimes | None) -> bool:
    """As `watch`, of one model; False where its hook is one that somebody else has put on."""
    if not getattr(model, "_comm_hooks", []):
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        put_hook(model, functools.partial(allreduce_hook, model.process_group))
    ours = [state for _, state in model._comm_hooks if isinstance(state, BucketHook)]
    for one in ours:
        one.watch(exposed)
    return bool(ours)


def put_hook(
    model: DistributedDataParallel, on_bucket: Callable[[Any], Future],
    ranks: ProcessGroup | None = None,
) -> None:  # fmt: skip
    """Let `on_bucket` exchange the model's buckets, and tell whoever watches of it.

    Args:
        ranks: through which buckets are exchanged; its limits are those of the buffers, too.
    """
    model.register_comm_hook(BucketHook(on_bucket), _call)
    if ranks is not None:
        limit_buffers(model, ranks)


def _call(state, bucket):  # type: ignore[no-untyped-def] # DDP compares annotations with types
    return state.on_bucket(bucket)


class BucketHook:
    """A communication hook of ``DistributedDataParallel`` that can be watched.

    DDP waits for its buckets in order, when the backward pass is over; hooks of ours that raise
    what failed wait for all of them in the call of the last one. What copies a bucket to where its
    gradients are while the next one is on its way counts as waiting.
    """

    def __init__(self, on_bucket: Callable[[Any], Future]) -> None:
        self._exchange = on_bucket
        self._exposed: ExposedTimes | None = None
        self._arrivals: list[_Arrival] = []
        # When the call of the last bucket began and returned, and the backward pass was over.
        self._began_s = self._returned_s = self._over_s = 0.0

    def watch(self, exposed: ExposedTimes | None) -> None:
        """Tell `exposed` of every backward pass from now on; the last one is told now."""
        self._tell()
        self._exposed = exposed

    def on_bucket(self, bucket: Any) -> Future:
        """Exchange a bucket; DDP calls it in the same order on all ranks."""
        if self._exposed is None:
            return self._exchange(bucket)
        if bucket.index() == 0:
            self._tell()
            # It is called before what DDP queues with the last bucket, which waits.
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_over)
        arrival = _Arrival(bucket.parameters())
        self._arrivals.append(arrival)
        self._began_s = time.perf_counter()
        future = self._exchange(bucket)
        self._returned_s = time.perf_counter()
        return future.then(arrival.note)

    def _backward_over(self) -> None:
        self._over_s = time.perf_counter()

    def _tell(self) -> None:
        """Of the backward pass before, all of whose buckets have arrived."""
        arrivals, self._arrivals = self._arrivals, []
        if self._exposed is None:
            return
        standing = (self._began_s, self._returned_s), (self._over_s, math.inf)
        free = self._began_s
        for one in arrivals:
            for began, ended in standing:
                self._exposed.add(max(began, free), min(ended, one.at_s), one.parameters)
            free = max(free, one.at_s)


class _Arrival:
    """When a bucket is there."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self.parameters, self.at_s = parameters, 0.0

    def note(self, future: Future) -> torch.Tensor:
        self.at_s = time.perf_counter()
        return future.value()


class Layers:
    """Which layer each parameter is of: the names that a recorded step gives to gradients.

    A parameter is of the module that owns it; where that is never called (its parent computes for
    it), of the next one outwards that is; a tied one of the owner that is called first.

    Attributes:
        order: layers with parameters, in the order in which they are called first.
    """

    def __init__(self, model: nn.Module) -> None:
        wraps = isinstance(model, DistributedDataParallel | TellsExposed)
        inner = getattr(model, "module", None) if wraps else None
        self._model = inner if isinstance(inner, nn.Module) else model
        self._called: list[str] = []
        self.order: list[str] = []
        self._of: dict[int, str] = {}
        self._look()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within it, a step tells which modules are called; not of a model that is compiled."""
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
            self._look()

    def shares(self, parameters: Sequence[torch.Tensor]) -> dict[str, float]:
        """Shares of these parameters' bytes, by layer, that add up to 1; none of none."""
        by_layer: dict[str, float] = {}
        whole = sum(one.nbytes for one in parameters)
        for one in parameters:
            layer = self._of.get(id(one), ROOT)
            share = one.nbytes / whole if whole else 1.0 / len(parameters)
            by_layer[layer] = by_layer.get(layer, 0.0) + share
        return by_layer

    def _look(self) -> None:
        names = [name for name, _ in self._model.named_modules()]
        # Before anything was called: every module would be, in the order of registration.
        place = {name: n for n, name in reversed(list(enumerate(self._called or names)))}
        places: dict[str, int] = {}
        self._of = {}
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            owner = name.rpartition(".")[0]
            while owner and owner not in place:
                owner = owner.rpartition(".")[0]
            layer = f"{ROOT}.{owner}" if owner else ROOT
            places[layer] = place.get(owner, 0)
            known = self._of.get(id(parameter))
            if known is None or places[layer] < places[known]:
                self._of[id(parameter)] = layer
        used = set(self._of.values())
        self.order = sorted(used, key=lambda layer: places[layer])


def step_by_step(
    exposed: ExposedTimes, layers: Layers, stamps: Sequence[float]
) -> list[dict[str, float]]:
    """Seconds by layer of each step, of which `stamps` has the begin of each and the last's end.

    What is no layer's counts under what it is called, in parentheses.
    """
    steps: list[dict[str, float]] = [{} for _ in stamps[1:]]
    for one in exposed.times:
        number = bisect.bisect_right(stamps, one.began_s) - 1
        if not 0 <= number < len(steps):
            continue
        spent = one.ended_s - one.began_s
        for layer, share in (layers.shares(one.parameters) or {f"({one.what})": 1.0}).items():
            steps[number][layer] = steps[number].get(layer, 0.0) + share * spent
    return steps


def typical(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Means by layer over the middle half of `steps`, by how long each stands still in all.

    The same steps for all layers, so that these add up to a step; a step that something held up
    does not count.
    """
    ordered = sorted(steps, key=lambda step: sum(step.values()))
    left = len(ordered) // 4
    middle = ordered[left : len(ordered) - left]
    layers = dict.fromkeys(layer for step in middle for layer in step)
    return {layer: sum(step.get(layer, 0.0) for step in middle) / len(middle) for layer in layers}
