"""Predicted tiles and batch-norm groups: settings, reasons against them, exchanges; loading."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from slipstream.errors import InvalidArgumentError, UsageError
from slipstream.graph import Graph, replay
from slipstream.technique import parse, refusal
from slipstream.techniques.spatial.input import InputModel
from slipstream.techniques.spatial.technique import BatchNormGroups, Spatial
from slipstream.verbs.scaling import curve
from slipstream.workload.built import build_from
from small_steps import FAST, Copies, graph_of, shared, still
from tiny_models import record


def recorded(layers: list[nn.Module]) -> Graph:
    torch.manual_seed(0)
    batch = torch.randn(4, 3, 32, 24), torch.randint(0, 2, (4,))
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    built = build_from((model, batch, nn.functional.cross_entropy, optimizer), (), 0, "images")
    return still(record(built))


@pytest.fixture(scope="module")
def graph() -> Graph:
    layers = [
        nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(4, 8, 5, 2, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2),
    ]  # fmt: skip
    return recorded(layers)


def test_a_fixed_batch_is_not_divided_among_tiles(graph: Graph) -> None:
    points = curve(graph, FAST, [2, 4], text="spatial", global_batch=4, durations=Copies()).points
    assert [point.prediction.samples[1] for point in points] == [4, 4]
    walls = {wall.name: wall for wall in points[-1].walls}
    assert "1 sample per worker" in walls["fixed batch"].detail
    assert (walls["batch norm"].detail, walls["batch norm"].remedy) == (
        "sums of tiles", "fewer tiles"
    )  # fmt: skip
    assert walls["batch norm"].ns > 0
    # What cannot be combined with tiles is no remedy.
    assert "halos" in walls["all-reduce"].detail
    for name in ("all-reduce", "update"):
        assert (walls[name].remedy[:5], walls[name].saved_ns) == ("none:", 0.0)
    # The batch does not grow with tiles either if it is the recorded one.
    (point,) = curve(graph, FAST, [4], text="spatial", durations=Copies()).points
    (same,) = (wall for wall in point.walls if wall.name == "fixed batch")
    assert same == walls["fixed batch"]
    assert same.remedy == "a larger batch"
    # Groups divide the workers, also if 16 samples need more of them.
    points = curve(graph, FAST, [2, 6], global_batch=6, durations=Copies()).points
    walls = {wall.name: wall for wall in points[-1].walls}
    assert walls["batch norm"].remedy == "batch_norm_groups:6"
    (point,) = curve(graph, FAST, [6], global_batch=30, durations=Copies()).points
    walls = {wall.name: wall for wall in point.walls}
    assert walls["batch norm"].remedy == "batch_norm_groups:6"


def test_settings_are_checked_and_written_back() -> None:
    assert str(parse("spatial:4,rows=2")[0]) == "spatial:4,rows=2"
    assert (Spatial(6).grid, Spatial(6, 2).grid, Spatial(2).grid) == ((3, 2), (2, 3), (2, 1))
    for text, problem in (
        ("spatial:1", "1 is not between 2 and"),
        ("spatial:4,rows=3", "4 tiles do not make 3 rows"),
        ("batch_norm_groups:0", "0 is less than 1"),
    ):
        with pytest.raises(InvalidArgumentError, match=problem):
            parse(text)
    with pytest.raises(UsageError, match="cannot be combined"):
        parse("ddp:2+spatial:2")


def test_reasons_against_tiles_and_groups(graph: Graph) -> None:
    assert "no convolution" in str(refusal(Spatial(2), graph_of("transformer")))
    assert "smaller than the halo" in str(refusal(Spatial(32, 32), graph))
    assert refusal(Spatial(4), graph) is None
    up = recorded([nn.ConvTranspose2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()])
    assert "transposed convolutions" in str(refusal(Spatial(2), up))
    assert "combine it" in str(refusal(BatchNormGroups(2), graph))
    assert "4 workers do not make groups of 3" in str(
        refusal(BatchNormGroups(3), shared(graph, FAST))
    )
    assert "no batch norm" in str(refusal(BatchNormGroups(2), graph_of("transformer")))


def test_tiles_exchange_halos_and_statistics(graph: Graph) -> None:
    tiled = shared(graph, FAST, "spatial:4")
    assert (tiled.samples, tiled.workers) == (4, 4)
    halos = [row for row in tiled.exchanges if row.purpose == "halo"]
    # Both convolutions, two axes each; the gradient of the batch is not computed.
    assert [row.collective.nbytes for row in halos] == [
        4 * 3 * 4 * 1 * 12, 4 * 3 * 4 * 1 * 17, 4 * 4 * 4 * 2 * 6, 4 * 4 * 4 * 2 * 10,
        4 * 4 * 4 * 2 * 6, 4 * 4 * 4 * 2 * 10,
    ]  # fmt: skip
    assert sum(row.purpose == "statistic" for row in tiled.exchanges) == 3
    assert {row.ranks for row in halos} == {2}
    names = [tiled.task(number).name for number in range(len(tiled))]
    assert names.count("copy of tile and halo") == 3
    # The largest tile: 16 x 12 of 32 x 24, with its halo and without padding.
    convolutions = [call for call in tiled.calls if call.name == "aten::convolution"]
    assert (4, 3, 18, 14) in [call.inputs[0].shape for call in convolutions]
    assert replay(tiled).peak_bytes < 0.5 * replay(graph).peak_bytes


def test_groups_sum_statistics_between_neighbours(graph: Graph) -> None:
    grouped = shared(graph, FAST, "ddp:4+batch_norm_groups:2")
    rows = [row for row in grouped.exchanges if row.purpose == "statistic"]
    assert [row.collective.nbytes for row in rows] == [16.0, 16.0, 32.0]
    assert rows[0].collective.group is not None
    assert rows[0].collective.group.members.tolist() == [[0, 1], [2, 3]]


def test_the_slowest_host_is_the_expected_maximum() -> None:
    model = InputModel(samples=64, load_ns=1e6, spread=0.5, loaders=2)
    batches = np.random.default_rng(0).normal(64e6, 0.5e6 * 8, (4000, 128)) / 2
    assert model.slowest_ns(128) == pytest.approx(float(batches.max(axis=1).mean()), rel=2e-3)
    assert model.slowest_ns(1) == 32e6
    loaders = model.loaders_for(128, 10e6)
    assert InputModel(64, 1e6, 0.5, loaders).waiting_ns(128, 10e6) == 0.0
    assert InputModel(64, 1e6, 0.5, loaders - 1).waiting_ns(128, 10e6) > 0.0
    with pytest.raises(InvalidArgumentError, match="too short"):
        model.loaders_for(128, 1.0)
    with pytest.raises(InvalidArgumentError, match="loaders"):
        InputModel(64, 1e6, loaders=0)
    loaded: list[int] = []
    assert InputModel.measured(loaded.append, 10, samples=8).load_ns >= 0.0
    assert loaded == list(range(10))
