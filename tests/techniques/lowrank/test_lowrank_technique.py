"""The technique `lowrank`: in the graph, the model, the optimizer and a training."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from slipstream.durations import Durations, Timing
from slipstream.errors import InvalidArgumentError, WorkloadError
from slipstream.graph import Call, Role
from slipstream.graph.flow import matches
from slipstream.technique import Context, parse
from slipstream.techniques.distributed.gradients import gradients, nbytes_of
from slipstream.techniques.lowrank import LowRank, LowRankLinear
from slipstream.techniques.lowrank.recorded import sites
from slipstream.verbs.predicting import predict
from slipstream.verbs.results import Predicted
from slipstream.workload import Workload, build_from

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from recorded import build, cannot_be_timed, graph_of, inference

from known_durations import BytesMoved, context_for, timed_by_bytes


def images() -> Any:
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1, groups=2), nn.Flatten(),
        nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 4),
    )  # fmt: skip
    batch = (torch.randn(4, 3, 8, 8), torch.randint(0, 4, (4,)))
    return model, batch, cross_entropy, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


class Sequences(nn.Module):
    """Attention, an LSTM, and linear layers on three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.lstm = nn.LSTM(16, 16, batch_first=True)
        self.wide, self.out = nn.Linear(16, 24), nn.Linear(24, 4)

    def forward(self, x: Any) -> torch.Tensor:
        y, _ = self.lstm(self.attention(x, x, x, need_weights=False)[0])
        made: torch.Tensor = self.out(self.wide(y))[:, 0]
        return made


def sequences() -> Any:
    model = Sequences()
    batch = (torch.randn(4, 5, 16), torch.randint(0, 4, (4,)))
    return model, batch, cross_entropy, torch.optim.Adam(model.parameters(), foreach=True)


@pytest.mark.parametrize("text", ["lowrank:0.25", "lowrank:0.25,ends=yes", "lowrank:rank=2"])
@pytest.mark.parametrize("make", [images, sequences])
def test_counts_bytes_and_memory_equal_those_of_the_changed_model(make: Any, text: str) -> None:
    graph, (technique,) = timed_by_bytes(graph_of(make)), parse(text)
    assert technique.why_not(graph) is None
    after = technique.predict(graph, context_for(technique, graph))
    model = build(make, technique).model
    real = 4 * sum(p.numel() for p in model.parameters())
    assert int(after.memory.nbytes[after.memory.role == Role.PARAMETER].sum()) == real
    assert nbytes_of(gradients(after)) == real
    shares = [float(g.memory.nbytes[g.memory.role == Role.OPTIMIZER].sum()) for g in (after, graph)]
    dense = 4 * sum(p.numel() for p in build(make).model.parameters())
    assert shares[0] / shares[1] == pytest.approx(real / dense, rel=0.01)


@pytest.mark.parametrize("make", [images, sequences])
def test_requested_calls_can_be_timed(make: Any) -> None:
    assert cannot_be_timed(LowRank(ends=True).required_timings(graph_of(make))) == []


def test_operators_equal_those_of_the_changed_model() -> None:
    (technique,) = parse("lowrank:0.25")
    graph = timed_by_bytes(graph_of(images))
    after = technique.predict(graph, context_for(technique, graph))
    changed = graph_of_changed()
    for name in ("aten::convolution", "aten::convolution_backward", "aten::mm", "aten::addmm"):
        ours, theirs = (
            sorted(
                tuple(spec.shape for spec in g.task(t).known_call.inputs)
                for t in range(len(g))
                if g.task(t).name == name
            )
            for g in (after, changed)
        )
        if name == "aten::mm":
            # A matmul may be the transpose of the other.
            ours, theirs = (
                sorted(tuple(sorted((*a, *b))) for a, b in side) for side in (ours, theirs)
            )
        assert ours == theirs, name
    for call in {after.task(t).known_call for t in range(len(after)) if after.task(t).name in _MMS}:
        # Operands are contiguous: of the two axes, one has stride one and the other its length.
        for spec in call.inputs[-2:]:
            dense = ((spec.shape[1], 1), (1, spec.shape[0]))
            assert spec.strides in dense or 1 in spec.shape, call


_MMS = ("aten::mm", "aten::addmm")


@pytest.mark.parametrize("make", [images, sequences])
def test_every_lookup_was_requested(make: Any) -> None:
    graph, technique = timed_by_bytes(graph_of(make)), LowRank(0.25)
    requested = {call.key for call in technique.required_timings(graph)}
    looked_up: set[str] = set()

    class Spy(BytesMoved):
        def lookup(self, call: Call) -> Timing | None:
            looked_up.add(call.key)
            return super().lookup(call)

    technique.predict(graph, Context(cast("Durations", Spy())))
    assert looked_up == requested


def graph_of_changed() -> Any:
    def changed() -> Any:
        model, batch, loss, optimizer = images()
        built = build_from((model, batch, loss, optimizer), parse("lowrank:0.25"), 0, "changed")
        return built.model, built.batch, built.loss, built.optimizer

    return graph_of(changed)


def test_reasons_why_not() -> None:
    graph = graph_of(images)
    assert "does not train" in str(LowRank().why_not(graph_of(inference)))
    assert "only=x" in str(LowRank(only="x*").why_not(graph))
    assert "a product of rank 999" in str(LowRank(rank=999).why_not(graph))
    assert "fewer parameters" in str(LowRank(1.0).why_not(graph))


def test_invalid_settings_are_refused() -> None:
    for text in ("lowrank:0", "lowrank:1.5", "lowrank:rank=0", "lowrank:0.25,warmup=1"):
        with pytest.raises(InvalidArgumentError, match="lowrank:"):
            parse(text)


def test_a_rank_above_all_full_ranks_names_the_layers() -> None:
    with pytest.raises(WorkloadError, match="0: rank 99 is above its full rank of 16"):
        build(images, LowRank(rank=99, ends=True))


def test_layers_whose_full_rank_is_below_the_rank_stay_dense() -> None:
    model = build(images, LowRank(rank=16)).model
    assert model[6].first.out_features == 16
    assert model[-1].weight.shape == (4, 64), "the last has a full rank of 4, and stays dense"
    assert isinstance(build(images, LowRank(rank=20)).model[4], nn.Conv2d)


def test_the_switch_follows_the_dense_share() -> None:
    torch.manual_seed(0)
    model, batch, loss, optimizer = images()
    from slipstream.workload import BuiltWorkload

    built = build_from(
        BuiltWorkload(model, batch, loss, optimizer, planned_steps=10), (), 0, "planned"
    )
    LowRank(warmup=0.3).apply(built)
    kinds = []
    for _ in range(5):
        built.step()
        kinds.append(isinstance(built.model[6], LowRankLinear))
    assert kinds == [False, False, True, True, True]


def test_the_automatic_mode_chooses_ranks_and_moment() -> None:
    torch.manual_seed(0)
    model, batch, loss, optimizer = images()
    from slipstream.workload import BuiltWorkload

    built = build_from(
        BuiltWorkload(model, batch, loss, optimizer, planned_steps=60), (), 0, "planned"
    )
    LowRank(auto=True, warmup=0.5).apply(built)
    before = sum(p.numel() for p in built.model.parameters())
    losses = [float(built.step()) for _ in range(40)]
    assert sum(p.numel() for p in built.model.parameters()) < before
    assert losses[-1] < 0.5 * losses[0]


def test_the_edit_equals_apply(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        "import torch\n"
        "def make():\n"
        "    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))\n"
        "    optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "    return model, (torch.randn(2, 8), torch.randn(2, 8)), torch.nn.MSELoss(), optimizer\n"
    )
    change = LowRank(0.25).code(Workload(f"{path}:make"))
    assert change is not None
    lines = [line[1:] for line in change.diff.splitlines() if line.startswith("+    ")]
    assert lines == ["    import slipstream", "    slipstream.lowrank.factorize(model, 0.25)"]
    assert change.diff.index("factorize") < change.diff.index("optim.SGD")


class Gated(nn.Module):
    """A GRU, which has no thin form, before a linear layer, which has."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(32, 32, batch_first=True)
        self.wide, self.out = nn.Linear(32, 64), nn.Linear(64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.out(self.wide(self.gru(x)[0][:, -1]))
        return scores


def gated() -> Any:
    model, batch = Gated(), (torch.randn(4, 6, 32), torch.randint(0, 4, (4,)))
    return model, batch, cross_entropy, torch.optim.SGD(model.parameters(), 0.1)


def test_dense_layers_are_predicted_dense() -> None:
    assert {site.module for site in matches(graph_of(gated), sites)} == {"wide", "out"}
    model = build(gated, LowRank(0.25, ends=True)).model
    assert isinstance(model.gru, nn.GRU)


@pytest.mark.parametrize("make", [images, gated], ids=lambda make: make.__name__)
def test_other_techniques_can_look_up_matmul_calls(make: Any, tmp_path: Path) -> None:
    """`amp` requests variants of the calls it finds."""
    durations = Durations(threads=1, path=tmp_path / "durations.db")
    after = LowRank(0.25, ends=True).predict(graph_of(make), Context(durations))
    assert {hash(call) for call in after.calls}
    (prediction,) = predict(
        graph_of(make), ["lowrank:0.25+amp:bf16"], durations=durations, measuring_s=0
    )
    assert isinstance(prediction, Predicted)
