"""Networks searched together with hardware: exact costs, exact best hardware, limits."""

from __future__ import annotations

import functools
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import slipstream as ss
from known_durations import BytesMoved
from slipstream.cli._main import _command
from slipstream.durations import Durations
from slipstream.errors import (
    InvalidArgumentError,
    SlipstreamError,
    StoreError,
    UnknownNameError,
    WorkloadError,
)
from slipstream.hardware import Accelerator, Area, Array
from slipstream.nas import Supernet, derive_space, estimate
from slipstream.nas.codesign import ChipSpace, Codesign, ProcessorSpace, network_layers, search
from slipstream.nas.trace import op_name
from slipstream_bench.systems.codesign import oracle
from slipstream_bench.systems.nas.families import FAMILIES

EDGE = Accelerator.load("edge")
VALUES = {
    "tiles": (1, 4), "rows": (2, 8), "columns": (2, 4), "lanes": (4, 16),
    "onchip_bytes": (4096.0, 65536.0), "dram_bytes_per_s": (1e9, 8e9),
}  # fmt: skip


def small() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.GELU(), nn.Conv2d(16, 32, 1), nn.ReLU(),
        nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 4),
    )  # fmt: skip


@functools.cache
def supernet() -> Supernet:
    torch.manual_seed(0)
    return Supernet(derive_space(small().eval(), torch.randn(2, 1, 8, 8)))


def width_score(module: nn.Module) -> float:
    """Return a score that wider networks improve less and less."""
    return float(np.log(sum(p.numel() for p in module.parameters())))


@pytest.mark.parametrize("seed", range(0, 500, 4))
def test_cycles_and_bytes_are_those_of_counted_jobs(seed: int) -> None:
    for predicted, counted in oracle.comparisons(seed, EDGE):
        assert predicted == counted


def test_the_time_is_at_least_that_of_the_peaks_and_more_hardware_is_never_slower() -> None:
    space = ChipSpace(EDGE, VALUES)
    config = supernet().space.full
    layers = network_layers(supernet(), config)
    costs = space.costs_of(layers)
    shapes = [layer.product[0] for layer in layers if layer.product]
    macs = sum(shape.macs for shape in shapes)
    moved = sum(np.prod(size) for shape in shapes for size in shape.shapes.values())
    assert (costs["time"] >= 1e3 * macs / space.chips.macs / space.chips.clock_hz).all()
    assert (costs["time"] >= 1e3 * moved / space.chips.dram_bytes_per_s).all()
    grid = {name: c.reshape([len(v) for v in VALUES.values()]) for name, c in costs.items()}
    for axis in range(len(VALUES)):
        assert (np.diff(grid["time"], axis=axis) <= 0).all()
        assert (np.diff(grid["area"], axis=axis) > 0).all()


def test_the_costs_of_a_space_are_those_of_each_chip_alone() -> None:
    space, config = ChipSpace(EDGE, VALUES), supernet().space.smallest
    costs = space.costs(supernet(), config)
    for point in range(0, len(space), 7):
        alone = ChipSpace(space.chip(point), {"tiles": (space.chip(point).array.tiles,)})
        assert alone.baseline(supernet(), config) == pytest.approx(
            {name: column[point] for name, column in costs.items()}
        )
        assert space.point(space.at(point)) == point


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_have_the_multiplications_of_the_network(family: str) -> None:
    torch.manual_seed(0)
    make, inputs = FAMILIES[family]
    net = Supernet(derive_space(make().eval(), inputs()))
    if family in ("lstm", "rnn", "gru"):
        with pytest.raises(WorkloadError, match="cannot run"):
            network_layers(net, net.space.full)
        return
    for config in (net.space.full, net.space.smallest):
        layers = network_layers(net, config, batch=net_batch(net))
        macs = sum(layer.product[0].macs for layer in layers if layer.product)
        assert macs == net_batch(net) * estimate(net, config)["macs"]
        assert all(layer.product or layer.elements for layer in layers)


def net_batch(net: Supernet) -> int:
    size: Any = next(n for n in net.nodes if n.op == "placeholder").meta["val"].shape[0]
    return size if isinstance(size, int) else int(size.node.hint)


def test_only_operators_in_the_output_stage_of_a_product_are_free() -> None:
    layers = network_layers(supernet(), supernet().space.full)
    assert [layer.name.split()[-1] for layer in layers] == [
        "conv2d", "conv2d", "gelu", "conv2d", "max_pool2d", "adaptive_avg_pool2d", "linear"
    ]  # fmt: skip
    alone, four = (network_layers(supernet(), supernet().space.full, batch=b) for b in (1, 4))
    for single, several in zip(alone, four, strict=True):
        if single.product and several.product:
            assert several.product[0].macs == 4 * single.product[0].macs
        else:
            assert several.operations == 4 * single.operations


def found(**settings: Any) -> Codesign:
    return search(supernet(), width_score, ChipSpace(EDGE, VALUES), **settings)


def test_the_best_hardware_of_a_network_is_that_of_a_loop_over_all_chips() -> None:
    pairs = found(constraints={"time": "<= 4x", "area": "<= 1"})
    rng = np.random.default_rng(0)
    space: Any = pairs.hardware
    for config in (supernet().space.full, *(supernet().space.sample(rng) for _ in range(5))):
        best, least = None, np.inf
        limit = pairs.limits[0].value
        for point in range(len(space)):
            chip = ChipSpace(space.chip(point), {"tiles": (space.chip(point).array.tiles,)})
            costs = chip.baseline(supernet(), config)
            if costs["time"] <= limit and costs["area"] <= 1 and costs["energy"] < least:
                best, least = point, costs["energy"]
        assert best is not None
        own = pairs.pair(config, pairs.best_point(config), 0.0)
        assert own.costs["energy"] == pytest.approx(least)
        assert own.costs["time"] <= limit


@pytest.mark.parametrize("algorithm", ["nested", "joint"])
def test_a_search_returns_pairs_within_the_limits(algorithm: str, tmp_path: Path) -> None:
    store = tmp_path / "pairs.db"
    limits = {"time": "<= 1x", "area": "<= 1"}
    pairs = found(constraints=limits, algorithm=algorithm, store=store).run(15)
    front = pairs.pareto()
    # The second candidate is the largest uniformly scaled network within the limits.
    first, second = (pairs._split(trial.config)[0] for trial in pairs.study.trials[:2])
    assert first == supernet().space.smallest
    assert all(second[name] >= first[name] for name in first)
    assert second != first
    assert 1 <= pairs.trainings <= 15
    assert [p.score for p in front] == sorted({p.score for p in front}, reverse=True)
    for pair, cheaper in itertools.pairwise(front):
        assert pair.costs["energy"] > cheaper.costs["energy"]
    for pair in front:
        assert pair.costs["area"] <= 1
        assert pair.score == width_score(pairs.export(pair))
        layers, changes = pairs.explain(pair)
        assert len(layers.rows) == len(network_layers(supernet(), pair.config))
        assert len(changes.rows) == len(VALUES)
    again = found(constraints=limits, algorithm=algorithm, store=store).run(15)
    assert again.trainings == 0
    assert again.pareto() == front


@pytest.mark.parametrize(
    "chips",
    [ChipSpace(EDGE, VALUES | {"rows": (2, 4)}), ChipSpace(EDGE, VALUES, item_bytes=2),
     ChipSpace(replace(EDGE, vector_lanes=2 * EDGE.vector_lanes), VALUES)],
)  # fmt: skip
def test_a_search_is_not_continued_on_other_chips(chips: ChipSpace, tmp_path: Path) -> None:
    store = tmp_path / "pairs.db"
    found(exponents={"energy": -0.5}, store=store).run(1)
    with pytest.raises(StoreError, match="hardware was 'ChipSpace of 64 points"):
        search(supernet(), width_score, chips, exponents={"energy": -0.5}, store=store).run(2)
    with pytest.raises(StoreError, match="exponents was"):
        found(exponents={"energy": -0.1}, store=store).run(2)


def test_one_objective_is_the_score_times_costs_to_exponents() -> None:
    pairs = found(exponents={"energy": -0.5, "time": -0.1}).run(12)
    base = pairs.hardware.baseline(supernet(), supernet().space.full)
    best = pairs.best()
    assert best is not None
    for trial in pairs.study.trials:
        if "reward" in trial.values:
            values = trial.values
            expected = values["score"] * (values["energy"] / base["energy"]) ** -0.5
            expected *= (values["time"] / base["time"]) ** -0.1
            assert values["reward"] == pytest.approx(expected)
    assert best.score in [t.values["score"] for t in pairs.study.top(1)]


def test_limits_that_nothing_satisfies_name_the_nearest_pair_before_any_training() -> None:
    with pytest.raises(InvalidArgumentError, match=r"nearest reaches time .* area") as error:
        found(constraints={"time": "<= 1 ns", "area": "<= 0.01"})
    assert "tiles = " in str(error.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"minimize": ["cost"]}, "unknown metric 'cost'"),
        ({"minimize": []}, "names no metric"),
        ({"constraints": {"time": ">= 1 ms"}}, "not an upper limit"),
        ({"constraints": {"time": "fast"}}, "is not a limit"),
        ({"constraints": {"time": "<= fastx"}}, "is not a limit"),
        ({"exponents": {"energy": 0.1}}, "is not negative"),
        ({"algorithm": "phase"}, "unknown algorithm"),
    ],
)
def test_invalid_searches_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SlipstreamError, match=message):
        found(**settings)
    with pytest.raises(InvalidArgumentError, match="a str is not a space of hardware"):
        search(supernet(), width_score, "edge")  # type: ignore[arg-type]


def test_limits_of_areas_that_are_not_described_are_refused() -> None:
    chips = ChipSpace(replace(EDGE, area=Area()), VALUES)
    with pytest.raises(InvalidArgumentError, match="area: is 0"):
        search(supernet(), width_score, chips, constraints={"area": "<= 1"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[space]\nrows = [3]", "power of two"), ("[space]\nlanes = [2.5]", "not an integer"),
        ("[space]\nspeed = [1]", "unknown attribute"), ("[space]\ntiles = 4", "space.tiles"),
        ("item_bytes = 0\n[space]\ntiles = [4]", "item_bytes"),
    ],
)  # fmt: skip
def test_invalid_spaces_are_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "space.toml").write_text(f'base = "edge"\n{text}\n')
    with pytest.raises(SlipstreamError, match=message):
        ChipSpace.load(tmp_path / "space.toml")


def test_a_model_traced_for_one_batch_is_refused_for_others() -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.last(self.first(x).view(4, 16))
            return y

    net = Supernet(derive_space(Fixed().eval(), torch.randn(4, 8)))
    with pytest.raises(WorkloadError, match="batch of 4 only"):
        network_layers(net, net.space.full)
    assert network_layers(net, net.space.full, batch=4)


def test_a_processor_is_timed_by_operator_and_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    class Known(BytesMoved):
        def measure(self, calls: Any, *args: Any, **how: Any) -> None:
            super().measure([request.call for request in calls])

        def lookup(self, call: Any) -> Any:
            return super().lookup(call.call)

    table: Any = Known()
    monkeypatch.setattr("slipstream.nas.codesign.processor.usable_cores", lambda: 2)
    space = ProcessorSpace((1, 2), batches=(1, 4), durations=table)
    space._overhead = 500.0
    config = supernet().space.full
    costs = space.costs(supernet(), config)
    assert len(space) == 8
    point = space.point({"threads": 1, "dtype": "bfloat16", "batch": 4})
    operators = [n for n in supernet().nodes if n.op == "call_function" and op_name(n) != "flatten"]
    assert costs["time"][point] == costs["latency"][point] / 4
    total = costs["latency"][space.point({"threads": 1, "dtype": "float32", "batch": 4})]
    halved = (total * 1e6 - 1500 * len(operators)) / 2
    assert costs["latency"][point] * 1e6 == pytest.approx(halved + 1500 * len(operators))
    pairs = search(supernet(), width_score, space, minimize=["time"]).run(5)
    assert all(pair.hardware["batch"] == 4 for pair in pairs.pareto())
    (best,) = pairs.pareto()[:1]
    assert len(pairs.explain(best)[0].rows) == len(operators)
    with pytest.raises(InvalidArgumentError, match="more than 2 cores"):
        ProcessorSpace((3,))
    with pytest.raises(UnknownNameError, match="dtype"):
        ProcessorSpace((1,), ("int8",))


def test_operators_with_several_results_take_time_on_a_processor() -> None:
    make, inputs = FAMILIES["lstm"]
    net = Supernet(derive_space(make().eval(), inputs()))
    values = {"threads": 1, "dtype": "float32", "batch": net_batch(net)}
    requests = ProcessorSpace((1,))._requests(net, net.space.full, values)
    assert "lstm" in {name.split()[-1] for name, _ in requests}


@pytest.mark.full
def test_the_overhead_of_a_processor_is_measured(tmp_path: Path) -> None:
    space = ProcessorSpace(
        (1,), ("float32",), (1,), durations=Durations(path=tmp_path / "durations.db")
    )
    (time,) = space.costs(supernet(), supernet().space.smallest)["time"]
    assert 0 <= space._overhead_ns(supernet()) < 1e6 * time


TASK = """\
import torch
from torch import nn
import slipstream as ss

def task():
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4)).eval()
    net = ss.nas.Supernet(ss.nas.derive_space(model, torch.randn(2, 8)))
    return net, lambda module: float(module[0].out_features)

def failing():
    return task()[0], lambda module: module.accuracy

def model():
    return nn.Linear(8, 2)
"""


def test_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("task.py").write_text(TASK.replace("module[0]", 'module.get_submodule("0")'))
    Path("space.toml").write_text('base = "edge"\n[space]\ntiles = [1, 2]\nlanes = [4, 16]\n')
    arguments = ["nas", "codesign", "task.py:task", "--hw", "space.toml", "--trials", "6"]
    assert _command([*arguments, "--limit", "time<=2x", "--json", "-o", "small.py"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert {pair["score"] for pair in result["pareto"]} >= {8.0, 32.0}
    assert set(result["best"]["costs"]) == set(result["baseline"]) == {"time", "energy", "area"}
    assert Path("small.py").exists()
    with pytest.raises(SlipstreamError, match="is not a limit"):
        _command([*arguments, "--limit", "time"])
    with pytest.raises(WorkloadError, match=r"no network was scored.*has no attribute"):
        _command([*arguments[:2], "task.py:failing", *arguments[3:]])
    with pytest.raises(SlipstreamError, match="does not return"):
        _command(["nas", "codesign", "task.py:model", "--hw", "space.toml"])


def test_codesign_is_part_of_the_package() -> None:
    assert ss.codesign.search is search
    assert replace(EDGE, array=Array(tiles=1)).array.tiles == 1
