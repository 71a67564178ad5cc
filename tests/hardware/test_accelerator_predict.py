"""Recorded steps on accelerators: masks, layers, errors, the command line, Verilog."""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import slipstream as ss
from slipstream.cli._main import _command
from slipstream.cluster.quantity import Quantity
from slipstream.errors import InvalidArgumentError, SlipstreamError, UsageError
from slipstream.graph import Graph, Kind, load, save
from slipstream.hardware import (
    Accelerator,
    Array,
    Chips,
    Energy,
    FrontEnd,
    LayerShape,
    MaskRecorder,
    Operand,
    Pass,
    accelerate,
    simulate_masks,
)
from slipstream.hardware.mapping import cost
from slipstream.hardware.ordering import best_order
from slipstream.hardware.predict import energy_pj, sensitivity
from slipstream.hardware.rtl import cosimulate, write_rtl
from slipstream.hardware.space import products_of, sweep_space
from slipstream.workload import build_from
from tiny_models import captured, record

CHIP = Accelerator.load("tensordash")


class Net(nn.Module):
    """A batch norm and a GELU, a layer that runs twice, and a grouped strided convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Conv2d(3, 8, 3, padding=1)
        self.normed = nn.Conv2d(8, 8, 3, stride=2, groups=2, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.twice = nn.Linear(8, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.normed(self.plain(x).relu())).relu().flatten(2).mT
        x = self.twice(functional.gelu(self.twice(x))).relu()
        return self.head(x.mean(1))


@functools.cache
def recorded() -> tuple[Graph, nn.Module]:
    torch.manual_seed(0)
    model = Net()
    batch = torch.randn(4, 3, 9, 9), torch.randint(0, 4, (4,))
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    built = build_from((model, batch, functional.cross_entropy, optimizer), [], 0, "net")
    with tempfile.TemporaryDirectory() as folder:
        save(record(built, "sparsity"), Path(folder) / "run.slipgraph")
        graph = load(Path(folder) / "run.slipgraph")
    return graph, model


def test_masks_of_a_recorded_step_are_those_of_its_tensors() -> None:
    graph, model = recorded()
    masks = {(m.module, m.call, m.operand): m for m in graph.statistics.masks}
    assert len(masks) == 15
    weight = masks["normed", 0, "weight"]
    np.testing.assert_array_equal(
        weight.unpacked(), model.get_parameter("normed.weight").detach().numpy() != 0
    )
    shares = {entry.module: entry for entry in graph.statistics.sparsity}
    mask = masks["normed", 0, "activation"].unpacked()
    assert mask.shape == (4, 8, 9, 9)
    assert 1 - mask.mean() == pytest.approx(shares["model.normed"].inputs, abs=0.01)
    assert masks["plain", 0, "gradient"].unpacked().mean() < 0.8  # zero where ReLU is flat
    assert masks["normed", 0, "gradient"].unpacked().all()  # batch norm spreads every gradient
    assert len(masks["twice", 1, "activation"].bits) == 4 * 16 * 8 // 8


def test_layers_and_passes_of_the_step() -> None:
    step = accelerate(recorded()[0], CHIP)
    passes = {
        (layer.module, number): {cost.which: cost for cost in layer.passes}
        for number, layer in enumerate(step.layers)
    }
    assert [module for module, _ in passes] == ["plain", "normed", "twice", "twice", "head"]
    first = passes["plain", 0]
    assert set(first) == {Pass.FORWARD, Pass.WEIGHT}  # the batch needs no gradient
    assert first[Pass.FORWARD].structural_speedup > 1.5  # 3 of 16 lanes
    assert first[Pass.FORWARD].speedup == 1.0
    normed = passes["normed", 1]
    assert set(normed) == set(Pass)
    assert normed[Pass.FORWARD].scheduled == "activation"
    assert normed[Pass.FORWARD].sparsity > 0.2
    assert normed[Pass.INPUT].speedup == 1.0
    assert any("batch norm makes the gradient of 1 layer dense" in note for note in step.notes)
    assert any("'gelu' makes the gradient of 1 layer dense" in note for note in step.notes)
    tasks = step.graph.tasks
    simulated = tasks.provenance != recorded()[0].tasks.provenance
    assert (simulated | (tasks.call < 0)).all()


def test_front_ends_are_ordered_and_dense_ones_need_no_masks() -> None:
    graph = recorded()[0]
    times = [
        ss.predict_accelerator(graph, replace(CHIP, frontend=FrontEnd(kind))).step.layers  # type: ignore[arg-type]
        for kind in ("dense", "lookahead", "ideal")
    ]
    cycles = [sum(c.cycles for layer in layers for c in layer.passes) for layers in times]
    assert cycles[0] > cycles[1] > cycles[2]
    bare = replace(graph, statistics=replace(graph.statistics, masks=()))
    found = ss.predict_accelerator(bare, CHIP)
    assert found.compute_speedup() == 1.0
    assert "no masks were recorded" in found.step.notes[0]


def test_nan_counts_as_nonzero_and_is_reported() -> None:
    layer = nn.Linear(4, 2)
    with MaskRecorder(layer) as masks:
        layer(torch.tensor([[float("nan"), 0.0, -0.0, 1e-42]]))
    mask = masks.take()[0]
    assert mask.unpacked().tolist() == [[True, False, False, True]]
    assert mask.nans == 1


def test_masks_are_taken_in_the_dtype_of_autocast() -> None:
    layer = nn.Linear(2, 2)
    with MaskRecorder(layer) as masks, torch.autocast("cpu", torch.bfloat16):
        layer(torch.tensor([[1e-45, 1.0]]))
    mask = masks.take()[0]
    assert (mask.dtype, mask.unpacked().tolist()) == ("bfloat16", [[False, True]])


@pytest.mark.parametrize("name", ["lstm", "transformer", "mlp inference"])
def test_operators_without_a_template_are_refused_by_name_and_others_take_time(name: str) -> None:
    graph = captured(name)
    if name == "lstm":
        with pytest.raises(InvalidArgumentError, match=r"tensordash cannot run 'aten::.*lstm|rnn"):
            accelerate(graph, CHIP)
        return
    step = accelerate(graph, CHIP)
    assert step.vector_ns > 0
    if "inference" in name:
        assert any("no backward pass" in note for note in step.notes)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("array = { lanes = 3 }", "array.lanes"), ("array = { lanes = 65 }", "array.lanes"),
        ("array = { rows = 0 }", "array.rows"), ("array = { rows = 3 }", "array.rows"),
        ("array = { tiles = 0 }", "array.tiles"), ("array = { tiles = 5000 }", "array.tiles"),
        ("clock_hz = 0", "clock_hz"),
        ("clock_hz = nan", "clock_hz"), ("vector_lanes = 0", "vector_lanes"),
        ("frontend = { lookahead = 0 }", "frontend.lookahead"),
        ("frontend = { lookaside = [[3, 1]] }", "frontend.lookaside"),
        ("frontend = { kind = 'magic' }", "frontend.kind"), ("arrays = 1", "arrays"),
        ("memory = { onchip_bytes = 0 }", "memory.onchip_bytes"), ("= 1", "not TOML"),
        ("energy = { mac = -1 }", "energy.mac"),
    ],
)  # fmt: skip
def test_invalid_descriptions_name_the_setting(text: str, place: str, tmp_path: Path) -> None:
    path = tmp_path / "chip.toml"
    path.write_text(f'base = "tensordash"\n{text}\n')
    with pytest.raises(SlipstreamError, match=place):
        Accelerator.load(path)


def test_a_file_contains_what_differs_from_its_base(tmp_path: Path) -> None:
    path = tmp_path / "wide.toml"
    path.write_text('base = "tensordash"\narray = { lanes = 32 }\nclock_hz = 1e9\n')
    chip = Accelerator.load(path)
    assert chip.array == replace(CHIP.array, lanes=32)
    assert (chip.name, chip.clock_hz.value, chip.energy) == ("wide", 1e9, CHIP.energy)


def test_a_name_in_a_folder_is_not_a_shipped_chip(tmp_path: Path) -> None:
    assert Accelerator.load("tensordash.toml") == CHIP
    with pytest.raises(SlipstreamError, match="unknown accelerator"):
        Accelerator.load(tmp_path / "tensordash.toml")


def test_energies_can_be_zero() -> None:
    free = {name: Quantity(0.0) for name in vars(CHIP.energy)}
    found = ss.predict_accelerator(recorded()[0], replace(CHIP, energy=Energy(**free)))
    assert found.energy_gain == (1.0, 1.0)
    assert {energy for _, energy in sensitivity(found.step).values()} == {0.0}


def test_a_sweep_gives_each_chip_the_cost_it_has_alone() -> None:
    graph = recorded()[0]
    found = sweep_space(graph, CHIP, {"rows": [2, 4], "lanes": [8, 16], "clock_hz": [5e8, 1e9]})
    assert len(found.time_ns) == 8
    for number in range(8):
        alone = Chips(*(column[number : number + 1] for column in vars(found.chips).values()))
        costs = {
            (shape, which, size): cost(shape, which, alone, item_bytes=size)
            for shape, which, size in products_of(graph)
        }
        time_ns = sum(n * costs[key].time_ns(alone)[0] for key, n in products_of(graph).items())
        assert found.time_ns[number] == pytest.approx(time_ns)
    for rows in ([0], [4, float("nan")], [float("inf")], []):
        with pytest.raises(SlipstreamError, match=r"rows: .* is not a list of finite values"):
            sweep_space(graph, CHIP, {"rows": rows})
    with pytest.raises(SlipstreamError, match=r"rows: 1\.5 is not an integer"):
        sweep_space(graph, CHIP, {"rows": [1.5]})
    many = range(1, 101)
    with pytest.raises(SlipstreamError, match="100,000,000 chips"):
        sweep_space(graph, CHIP, {"rows": many, "tiles": many, "lanes": many, "columns": many})


@pytest.mark.parametrize("kind", ["lookahead", "ideal"])
def test_a_sweep_with_zeros_simulates_each_chip(kind: Literal["lookahead", "ideal"]) -> None:
    graph, chip = recorded()[0], replace(CHIP, frontend=FrontEnd(kind))
    space = {"tiles": [1, 4], "rows": [2, 4], "columns": [2, 3], "lanes": [8, 16]}
    found = sweep_space(graph, chip, space, zeros=True)
    assert (found.time_ns < sweep_space(graph, chip, space).time_ns).any()
    for number in range(len(found.time_ns)):
        size = {name: int(getattr(found.chips, name)[number]) for name in space}
        step = accelerate(graph, replace(chip, array=Array(**size)))
        passes = [cost for layer in step.layers for cost in layer.passes]
        assert found.time_ns[number] == pytest.approx(sum(cost.time_ns for cost in passes))
        assert found.energy_pj[number] == pytest.approx(sum(energy_pj(step)))
    with pytest.raises(InvalidArgumentError, match="no masks were recorded"):
        sweep_space(captured("mlp"), chip, space, zeros=True)


def test_masks_of_a_training_loop_are_simulated_like_a_recorded_step() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, "valid"), nn.ReLU(), nn.Conv2d(8, 8, 3, padding="same"), nn.ReLU(),
        nn.Flatten(2), nn.Linear(16, 4),
    )  # fmt: skip
    x = torch.randn(2, 3, 9, 9)
    with MaskRecorder(model) as masks:
        model(x).square().sum().backward()
    found = simulate_masks(model, masks.take(), CHIP)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    batch = x, torch.zeros(2, 8, 4)
    built = build_from((model, batch, functional.mse_loss, optimizer), [], 0, "net")
    step = accelerate(record(built, "sparsity"), CHIP)
    expected = {layer.module.removeprefix("model."): layer for layer in step.layers}
    assert list(found) == list(expected)
    for name, costs in found.items():
        own = {c.which: c.cycles for c in costs}
        # The first layer's input has no gradient in the step.
        assert {c.which: c.cycles for c in expected[name].passes}.items() <= own.items()


def test_an_order_of_channels_is_advised_if_it_saves_cycles() -> None:
    """Dead channels in lanes 0 to 7 leave half of the lanes idle; between others they do not."""
    masks = {Operand.ACTIVATION: np.ones((1, 32, 8, 8), bool)}
    masks[Operand.ACTIVATION][:, [*range(8), *range(16, 24)]] = False
    shape = LayerShape(1, 32, 16, 8, 8, 3, 3, padding=(1, 1))
    recorded_cycles, best = best_order(shape, masks, [Pass.FORWARD], CHIP)
    assert best < 0.8 * recorded_cycles
    dense = {Operand.ACTIVATION: np.ones((1, 32, 8, 8), bool)}
    assert len({*best_order(shape, dense, [Pass.FORWARD], CHIP)}) == 1
    first = nn.Conv2d(1, 32, 3)
    model = nn.Sequential(first, nn.ReLU(), nn.Conv2d(32, 16, 3), nn.ReLU())
    with torch.no_grad():
        assert first.bias is not None
        first.bias.fill_(100.0)[[*range(8), *range(16, 24)]] = -100.0
    batch = torch.rand(2, 1, 12, 12), torch.zeros(2, 16, 8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    built = build_from((model, batch, functional.mse_loss, optimizer), [], 0, "net")
    step = accelerate(record(built, "sparsity"), CHIP)
    assert any(note.startswith("sorting channels by their zeros saves") for note in step.notes)


def test_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    save(recorded()[0], tmp_path / "run.slipgraph")

    def run(*arguments: str) -> Any:
        assert _command([*arguments, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    (step,) = run("predict", "run.slipgraph", "--hw", "tensordash")
    assert step["compute_speedup"] > 1
    assert step["speedup"] >= 1
    assert set(step["sensitivity"]) >= {"mac", "clock_hz", "dram_per_byte"}
    with pytest.raises(UsageError, match="--hw excludes --rate, --timeline"):
        run("predict", "run.slipgraph", "--hw", "tensordash", "--rate", "4/s", "--timeline", "x")
    (device,) = run("devices", "run.slipgraph", "--device", "tensordash")
    assert device["step_ns"] == pytest.approx(step["step_ns"], rel=1e-6)
    (tmp_path / "space.json").write_text('{"tiles": [4, 8]}')
    assert run("hw", "sweep", "run.slipgraph", "--space", "space.json")["chips"] == 2
    assert run("hw", "sweep", "run.slipgraph", "--space", "space.json", "--zeros")["chips"] == 2
    files = run("hw", "rtl", "--out", "rtl", "--vectors", "100")
    assert [Path(file["file"]).exists() for file in files] == [True] * 3


@pytest.mark.parametrize(
    ("lanes", "front"), [(16, FrontEnd()), (20, FrontEnd(lookahead=1, lookaside=((1, 3),)))]
)
def test_the_verilog_equals_the_model(
    lanes: int, front: FrontEnd, require: Callable[[str, bool, str], None]
) -> None:
    require("verilator", shutil.which("verilator") is not None, "verilator is not installed")
    assert cosimulate(front, lanes, 20_000) == 0


def test_a_file_instead_of_the_folder_for_verilog_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    with pytest.raises(SlipstreamError, match="cannot be written"):
        write_rtl(path, FrontEnd(), 16, 10)


def test_a_step_without_layers_or_on_a_gpu_is_refused() -> None:
    graph = recorded()[0]
    calls = tuple(
        replace(call, op=call.op.replace("conv", "x").replace("mm", "x")) for call in graph.calls
    )
    with pytest.raises(InvalidArgumentError, match="no convolution or linear layer"):
        accelerate(replace(graph, calls=calls), CHIP)
    kernels = replace(graph.tasks, kind=np.full(len(graph), Kind.KERNEL, np.uint8))
    with pytest.raises(InvalidArgumentError, match="recorded on a GPU"):
        accelerate(replace(graph, tasks=kernels), CHIP)


def test_arrays_have_at_most_32_rows() -> None:
    assert Array(rows=32).macs == 16 * 32 * 4 * 16
    for rows in (64, 2.0, "4"):
        with pytest.raises(InvalidArgumentError, match=r"array\.rows"):
            Array(rows=rows)  # type: ignore[arg-type]
