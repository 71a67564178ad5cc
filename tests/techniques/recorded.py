"""Small real steps, recorded once per test session."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from slipstream.durations import microbenchmark
from slipstream.graph import Call, Graph, Kind, replace_tasks
from slipstream.workload import BuiltWorkload, build_from
from tiny_models import record


def mlp() -> Any:
    """Three linear layers with AdamW."""
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.Linear(32, 4))
    batch = (torch.randn(8, 16), torch.randint(0, 4, (8,)))
    return model, batch, cross_entropy, torch.optim.AdamW(model.parameters(), lr=1e-2)


def images() -> Any:
    """Convolution, norm, pooling and a linear head on small images."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(16, 4),
    )  # fmt: skip
    batch = (torch.randn(4, 3, 16, 16), torch.randint(0, 4, (4,)))
    return model, batch, cross_entropy, torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


def inference() -> Any:
    """A linear layer, no optimizer."""
    return nn.Linear(8, 8), torch.randn(4, 8)


def build(make: Callable[[], Any], *techniques: Any) -> BuiltWorkload:
    """Return the workload of `make`, from a fixed seed."""
    torch.manual_seed(0)
    return build_from(make(), techniques, 0, make.__name__)


@functools.cache
def graph_of(make: Callable[[], Any]) -> Graph:
    """Return one recorded step, in which every operator takes some time.

    Of a short one nothing may be left once the profiler's cost is taken off.
    """
    graph = record(build(make))
    least = np.where(graph.tasks.kind == Kind.OP, 100.0, 0.0)
    return replace_tasks(graph, duration_ns=np.maximum(graph.tasks.duration_ns, least))


def cannot_be_timed(calls: Iterable[Call]) -> list[Any]:
    """Return the errors of micro-benchmarks of `calls`, which are run as briefly as possible."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(microbenchmark, "_ROUNDS", 1)
        patch.setattr(microbenchmark, "_SAMPLE_NS", 1)
        patch.setattr(microbenchmark, "_ROTATED_BYTES", 1)
        patch.setattr(microbenchmark, "keep_pages", lambda: True)
        found = microbenchmark.run([call.to_json() for call in calls], threads=1)
    assert found
    return [timing["error"] for timing in found if "error" in timing]
