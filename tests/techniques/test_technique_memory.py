"""Predicted peaks against those of really transformed steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from recorded import build, graph_of, images
from torch import nn
from torch.nn.functional import cross_entropy

from slipstream.durations import Durations
from slipstream.graph import Allocations, Graph, Role, StepPhase, replay
from slipstream.technique import Context, parse
from tiny_models import record


def wide(make: Any = torch.optim.AdamW, **settings: Any) -> Any:
    """Parameters outweigh activations."""
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.Linear(256, 4))
    batch = (torch.randn(8, 64), torch.randint(0, 4, (8,)))
    return model, batch, cross_entropy, make(model.parameters(), lr=1e-2, **settings)


def deep() -> Any:
    """Activations outweigh parameters; norm, attention-free, with a residual connection."""

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 128), nn.Linear(128, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

    model = nn.Sequential(*(Residual() for _ in range(3)), nn.Linear(64, 4))
    batch = (torch.randn(2048, 64), torch.randint(0, 4, (2048,)))
    return model, batch, cross_entropy, torch.optim.SGD(model.parameters(), lr=1e-2)


def attention() -> Any:
    """With dropout, so built from matmuls; one saves a view of the output of all projections."""

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.TransformerEncoderLayer(32, 4, 64), nn.Linear(32, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.layer(x)[0])

    model = Classifier()
    batch = (torch.randn(48, 16, 32), torch.randint(0, 4, (16,)))
    return model, batch, cross_entropy, torch.optim.SGD(model.parameters(), lr=1e-2)


def adagrad() -> Any:
    return wide(torch.optim.Adagrad)


def rmsprop() -> Any:
    return wide(torch.optim.RMSprop, momentum=0.9, weight_decay=0.1)


def rebuilding() -> Any:
    """Inputs that are also targets; the loss is in a storage of their size."""
    model = nn.Sequential(nn.Linear(640, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 640))
    batch = torch.randn(256, 640)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    return model, (batch, batch), nn.functional.mse_loss, optimizer


def real(make: Any, text: str) -> Graph:
    return record(build(make, *parse(text)), steps=2)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (wide, "fused_optimizer:fused"),
        (wide, "fused_optimizer:foreach"),
        (adagrad, "fused_optimizer:foreach"),
        (rmsprop, "fused_optimizer:foreach"),
        (wide, "accumulation:3"),
        (deep, "accumulation:3"),
        (rebuilding, "batch_size:x2"),
        (rebuilding, "amp:bf16"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_the_predicted_peak_equals_that_of_the_real_step(
    make: Any, text: str, tmp_path: Path
) -> None:
    (technique,) = parse(text)
    graph = graph_of(make)
    durations = Durations(threads=1, path=tmp_path / "durations.db")
    durations.measure(technique.required_timings(graph))
    after = technique.predict(graph, Context(durations))
    after.check()
    peak = replay(after).peak_bytes
    assert peak == pytest.approx(replay(real(make, text)).peak_bytes, rel=0.05)


def test_an_unmeasured_foreach_update_needs_the_size_of_the_parameters(
    tmp_path: Path,
) -> None:
    (technique,) = parse("fused_optimizer:foreach")
    graph = graph_of(wide)
    context = Context(Durations(threads=1, path=tmp_path / "durations.db"))
    after = technique.predict(graph, context)
    update = [int(n) for n in after.memory.nbytes[after.memory.role == Role.TEMPORARY]]
    parameters = sum(p.nbytes for p in wide()[0].parameters())
    assert parameters in update


@pytest.mark.parametrize("make", [deep, images, attention])
def test_autocast_saves_what_the_real_step_saves(make: Any, tmp_path: Path) -> None:
    """Without workspaces, since those of 16-bit kernels depend on the CPU."""
    (technique,) = parse("amp:bf16")
    context = Context(Durations(threads=1, path=tmp_path / "durations.db"))
    predicted, truth = technique.predict(graph_of(make), context), real(make, "amp:bf16")
    predicted.check()
    assert saved(predicted) == pytest.approx(saved(truth), rel=0.02)
    assert saved(predicted) < 0.8 * saved(graph_of(make))


def saved(graph: Graph) -> int:
    """Return bytes from the forward pass that are alive when the backward pass begins."""
    memory = graph.memory
    first = int((graph.tasks.phase == StepPhase.BACKWARD).argmax())
    made_before = (memory.producer >= 0) & (memory.producer < first)
    return int(memory.nbytes[made_before & (memory.release >= first)].sum())


def test_sixteen_bits_lower_the_peak(tmp_path: Path) -> None:
    graph = graph_of(deep)
    (technique,) = parse("amp:bf16")
    after = technique.predict(graph, Context(Durations(threads=1, path=tmp_path / "d.db")))
    assert replay(after).peak_bytes < 0.8 * replay(graph).peak_bytes


def test_leftovers_of_an_earlier_step_are_freed_in_the_first_batch(tmp_path: Path) -> None:
    graph = graph_of(rebuilding)
    (technique,) = parse("accumulation:3")
    after = technique.predict(graph, Context(Durations(threads=1, path=tmp_path / "d.db")))
    memory = after.memory
    left = (memory.producer < 0) & (memory.release >= 0) & (memory.role == Role.OTHER)
    assert left.sum() == len(graph.memory.handed_on()[0]) == 1
    assert (memory.release[left] < len(graph)).all()


def test_gradients_live_while_batches_are_accumulated(tmp_path: Path) -> None:
    graph = graph_of(wide)
    (technique,) = parse("accumulation:3")
    after = technique.predict(graph, Context(Durations(threads=1, path=tmp_path / "d.db")))

    def left(graph: Graph) -> int:
        memory = graph.memory
        return int(memory.nbytes[(memory.role == Role.GRADIENT) & (memory.release < 0)].sum())

    assert left(after) == left(graph)
    added = after.memory.role == Role.GRADIENT
    assert added.sum() > (graph.memory.role == Role.GRADIENT).sum()


def test_a_graph_without_memory_stays_without(tmp_path: Path) -> None:
    bare = replace(graph_of(deep), memory=Allocations.none())
    context = Context(Durations(threads=1, path=tmp_path / "d.db"))
    for text in ("fused_optimizer:foreach", "accumulation:2", "amp:bf16", "checkpointing"):
        (technique,) = parse(text)
        if technique.why_not(bare) is None:
            assert len(technique.predict(bare, context).memory) == 0


def steep() -> Any:
    """Gradients of convolutions need much temporarily: with AVX2 9.0 MB of NCHW, 6.4 of NHWC."""
    model = nn.Sequential(
        nn.Conv2d(3, 24, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(24, 48, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(48, 16, 3, padding=1),
    )  # fmt: skip
    batch = (torch.randn(8, 3, 96, 96), torch.randint(0, 16, (8, 24, 24)))
    return model, batch, cross_entropy, torch.optim.SGD(model.parameters(), lr=1e-2)


def test_workspace_of_convolutions_in_the_other_format_is_predicted(tmp_path: Path) -> None:
    (technique,) = parse("channels_last")
    graph = graph_of(steep)
    durations = Durations(threads=1, path=tmp_path / "durations.db")
    durations.measure(technique.required_timings(graph))
    after = technique.predict(graph, Context(durations))
    after.check()
    actual = replay(real(steep, "channels_last")).peak_bytes
    assert replay(after).peak_bytes == pytest.approx(actual, rel=0.005)
