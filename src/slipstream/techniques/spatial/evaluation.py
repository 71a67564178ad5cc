"""Evaluation on all ranks, whose metric another process computes while training continues.

Whole batches are distributed over the ranks, so that each example is scored in the same batch as by
one process, and scores are collected in the order of the data set: metrics are exactly those of one
process. A rank without a batch in the last round scores one whose result is not used.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from slipstream.arguments import as_integer
from slipstream.child import Child
from slipstream.errors import ChildError, InvalidArgumentError, SlipstreamError
from slipstream.files import temporary_path
from slipstream.ranks.group import ProcessGroup, process_group
from slipstream.ranks.wire import wait
from slipstream.surgery.check import evaluating
from slipstream.techniques.spatial.metric import address

# The module that runs in the child.
_IN_CHILD = "slipstream.techniques.spatial.metric"
Score = Callable[[Any, Sequence[int]], torch.Tensor]


class Evaluation:
    """Evaluation of one data set, for all ranks of a process group. Use as a context manager.

    Args:
        score: returns the scores of the examples with these indices, [examples, ...], of equal
            shapes and dtypes; its arguments are the model and the indices.
        examples: size of the data set.
        batch_size: examples per call of `score`.
        metric: computes the metric from float64 or integer scores, a NumPy array [examples, ...];
            a function in a module or script that can be imported. It returns JSON values.
        group: process group; None for the default group.

    Raises:
        UsageError: no process group is initialised.
        InvalidArgumentError: a number is not positive, or `metric` cannot be imported.
    """

    def __init__(
        self, score: Score, examples: int, batch_size: int, metric: Callable[[Any], Any],
        group: Any = None,
    ) -> None:  # fmt: skip
        self.score = score
        self.examples = as_integer("examples", examples)
        self.batch_size = as_integer("batch_size", batch_size)
        self.ranks = process_group(group)
        # The metric's module may be next to the script.
        paths = {"PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)}
        self._metric = address(metric)
        self._child = Child("the metric of an evaluation", environment=paths)
        self._child.start_call(f"{_IN_CHILD}:warm_up", **self._metric)
        self._previous: PendingMetric | None = None
        self._started = 0

    def __enter__(self) -> Evaluation:
        return self

    def __exit__(self, *ended: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process that computes the metric."""
        self._child.close()

    def start(self, model: torch.nn.Module) -> PendingMetric:
        """Score all examples in evaluation mode, and start to compute the metric.

        All ranks call it, and take turns with the metric. A rank whose previous metric is not
        finished waits for it.

        Raises:
            InvalidArgumentError: `score` did not return a tensor with a row per example.
            CommunicationError: a rank exited or hung.
        """
        owner = self._started % self.ranks.size
        self._started += 1
        with evaluating(model), torch.no_grad():
            scores = self._collected(model, owner)
        pending = PendingMetric(self.ranks, owner)
        if scores is not None:
            if self._previous is not None:
                self._previous.finish()
            path = temporary_path("scores", ".npy")
            np.save(path, scores.numpy())
            pending.begin(
                self._child, {**self._metric, "scores": str(path)}, warming=self._previous is None
            )
            self._previous = pending
        return pending

    def _batches(self, rank: int) -> list[range]:
        whole = [
            range(at, min(at + self.batch_size, self.examples))
            for at in range(0, self.examples, self.batch_size)
        ]
        return whole[rank :: self.ranks.size]

    def _scored(self, model: torch.nn.Module, batch: Sequence[int]) -> torch.Tensor:
        scores = self.score(model, batch)
        tensor = isinstance(scores, torch.Tensor)
        if not tensor or not scores.dim() or len(scores) != len(batch):
            found = f"shape {list(scores.shape)}" if tensor else f"type {type(scores).__name__}"
            raise InvalidArgumentError(
                "score", f"returned scores of {found} for {len(batch)} examples",
                remedy="return a tensor with one score, or one row of scores, per example",
            )  # fmt: skip
        return scores.detach()

    def _collected(self, model: torch.nn.Module, owner: int) -> torch.Tensor | None:
        """Return the scores of all examples, on rank `owner`; None on others."""
        size = self.ranks.size
        batches = self._batches(self.ranks.rank)
        found = [self._scored(model, batch) for batch in batches]
        if len(batches) < len(self._batches(0)):
            # Layers that communicate need all ranks in every round.
            idle = self._scored(model, self._batches(0)[0])
            found = found or [idle[:0]]
        kinds = {(part.shape[1:], part.dtype) for part in found}
        if len(kinds) > 1:
            raise InvalidArgumentError(
                "score", "returned different shapes or dtypes per example: "
                + ", ".join(sorted(f"{list(shape)} of {dtype}" for shape, dtype in kinds)),
                remedy="return scores of the same shape and dtype for all batches",
            )  # fmt: skip
        local = torch.cat(found).contiguous()
        if local.is_floating_point():
            local = local.double()
        parts = {
            rank: local.new_empty((sum(map(len, self._batches(rank))), *local.shape[1:]))
            for rank in range(size)
            if rank != owner
        }
        if self.ranks.rank != owner:
            self._swap({owner: local}, {})
            return None
        self._swap({}, parts)
        scores = local.new_empty((self.examples, *local.shape[1:]))
        for rank, part in {**parts, owner: local}.items():
            for batch, rows in zip(
                self._batches(rank), part.split([len(b) for b in self._batches(rank)]), strict=True
            ):
                scores[batch.start : batch.stop] = rows
        return scores

    def _swap(self, sent: dict[int, torch.Tensor], received: dict[int, torch.Tensor]) -> None:
        wire = self.ranks.wire
        self.ranks.run("scores", lambda: wait(list(wire.post(sent, received).values())))


class PendingMetric:
    """A metric that is being computed.

    Attributes:
        owner: the rank whose process computes it.
        seconds: duration of the computation, on that rank; 0 before `result`.
        waited_s: for how long `result` waited for it, on that rank.
    """

    def __init__(self, ranks: ProcessGroup, owner: int) -> None:
        self.owner, self.seconds, self.waited_s = owner, 0.0, 0.0
        self._ranks, self._calls = ranks, 0
        self._child: Child | None = None
        self._answer: Any = None

    def begin(self, child: Child, arguments: dict[str, Any], *, warming: bool) -> None:
        """Start the computation in `child`, which may be busy with its warm-up."""
        child.start_call(f"{_IN_CHILD}:compute", **arguments)
        self._child, self._calls = child, 1 + warming

    def result(self) -> Any:
        """Return the metric on all ranks, which all call this; wait for it if necessary.

        Raises:
            ChildError: the metric failed; on all ranks.
        """
        self.finish()
        answer = [self._answer]
        source = dist.get_process_group_ranks(self._ranks.group)[self.owner]
        group = self._ranks.group
        self._ranks.run("a metric", lambda: dist.broadcast_object_list(answer, source, group))
        if isinstance(answer[0], ChildError):
            raise answer[0]
        return answer[0]

    def finish(self) -> None:
        """Wait until the metric is computed, if it is computed by this rank's process."""
        if self._child is None:
            return
        began = time.perf_counter()
        try:
            done = [self._child.finish_call() for _ in range(self._calls)][-1]
            self._answer, self.seconds = done["value"], done["seconds"]
        except SlipstreamError as error:
            self._answer = ChildError(f"rank {self.owner}: {error}")
        self.waited_s, self._child = time.perf_counter() - began, None
