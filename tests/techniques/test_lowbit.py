"""lowbit: predictions from fitted costs, real modules, and refusals with reasons."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from recorded import build, graph_of, images, inference, mlp
from torch import nn

from slipstream.durations import Ratio, Timing
from slipstream.durations.microbenchmark import run
from slipstream.errors import InvalidArgumentError, WorkloadError
from slipstream.graph import Call, Graph, replay
from slipstream.provenance import Provenance
from slipstream.quant import FakeQuantize
from slipstream.surgery import ModuleSelection
from slipstream.technique import Context, QualityKind, parse
from slipstream.techniques.lowbit import cost
from slipstream.techniques.lowbit import technique as lowbit_technique
from slipstream.techniques.lowbit.cost import Costs, LayerShape, linear, required_timings
from slipstream.techniques.lowbit.eight_bits import TorchInt8
from slipstream.techniques.lowbit.nn import LowBitConv2d, LowBitLinear
from slipstream.techniques.lowbit.technique import LowBit
from slipstream.techniques.lowbit.timing import (
    timer,
    torch_layer_call,
    torch_pool_call,
    torch_sum_call,
)
from slipstream.workload import Workload
from slipstream_bench.rows import Bar, BenchOptions
from slipstream_bench.systems.lowbit import predictions as bench_predictions
from tiny_models import record


class Net(nn.Module):
    """A norm and ReLUs after convolutions, a depthwise convolution, a residual sum, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.inner = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.relu, self.head = nn.ReLU(), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu(self.norm(self.stem(x)))
        x = self.depthwise(self.relu(self.inner(x)) + x)
        return self.head(x.mean((2, 3)))


def net() -> Any:
    return Net().eval(), torch.randn(2, 3, 8, 8)


class Machine:
    """Layers take time by a law that the cost model can express; other calls a microsecond."""

    def __init__(
        self, per_product: dict[tuple[int, int], float], torch_ns: float | None = None
    ) -> None:
        self.per_product, self.torch_ns = per_product, torch_ns
        self.asked: set[str] = set()

    def time(self, layer: LayerShape, wbits: int, abits: int) -> float:
        products = layer.features()[-1]
        return 2000 + 0.3 * layer.rows * layer.k + self.per_product[wbits, abits] * products

    def lookup(self, call: Call) -> Timing | None:
        self.asked.add(call.key)
        nanoseconds = 1000.0
        if call.name == "slipstream::lowbit":
            if str(call.arguments[0]).startswith("torch int8"):
                torch_ns = self.torch_ns
                return torch_ns and Timing(torch_ns, 0.01, Provenance.MICROBENCHMARK)  # type: ignore[return-value]
            if isinstance(call.arguments[0], str):
                return Timing(500.0, 0.01, Provenance.MICROBENCHMARK)
            wbits, abits, image, n, kernel, stride, padding, _, _, depthwise = call.arguments
            layer = LayerShape(image, n, kernel, stride, padding, depthwise=depthwise)
            nanoseconds = self.time(layer, wbits, abits)
        if call.name == "aten::sum":
            nanoseconds = 1.0  # effectively no limit
        return Timing(nanoseconds, 0.01, Provenance.MICROBENCHMARK)

    def ratio(self, old: Call, new: Call) -> Ratio:
        self.lookup(old)
        self.lookup(new)
        return Ratio(0.5, 0.01, Provenance.MICROBENCHMARK)


def predicted(graph: Graph, machine: Machine, technique: LowBit | None = None) -> Graph:
    context = Context(durations=machine)  # type: ignore[arg-type]
    return (technique or LowBit()).predict(graph, context)


EVEN = {(3, 3): 0.01, (8, 8): 0.01}


def test_layers_take_the_modelled_time_and_fused_successors_disappear(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph, machine = graph_of(net), Machine(EVEN)
    requested: list[float] = []
    monkeypatch.setattr(lowbit_technique, "exceed_cache", requested.append)
    edited = predicted(graph, machine)
    # Weights by their bits: stem, head and depthwise layers in eight, others in three.
    assert requested == [8 * 27 + 4 * 8 + 8 * 9 + 8 * 72 * 3 / 8]
    edited.check()
    names = [edited.string(int(name)) for name in edited.tasks.name]
    before = [graph.string(int(name)) for name in graph.tasks.name]
    assert not any("batch_norm" in name for name in names)
    assert sum("relu" in name or "clamp_min" in name for name in before) == 2
    assert not any("relu" in name or "clamp_min" in name for name in names)
    found = [
        edited.calls[c].arguments
        for c in edited.tasks.call
        if c >= 0 and edited.calls[c].name == "slipstream::lowbit"
    ]
    # The first and the last in eight bits, and the depthwise one.
    assert [(*call[:4], call[9]) for call in found] == [
        (8, 8, (2, 8, 8, 3), 8, False), (3, 3, (2, 8, 8, 8), 8, False),
        (8, 8, (2, 8, 8, 8), 8, True), (8, 8, (1, 1, 2, 8), 4, False),
    ]  # fmt: skip
    assert re.search(r"\b4\b.*\bw3a3\b.*\b1\.0x\b.*\b8 bits", edited.edits[-1].what)


def test_it_reports_where_few_bits_are_faster_or_slower() -> None:
    graph = graph_of(net)
    faster = predicted(graph, Machine({(3, 3): 0.001, (8, 8): 0.5}))
    assert re.search(r"; [1-9]\d*\.\dx .*8 bits", faster.edits[-1].what)
    slower = predicted(graph, Machine({(3, 3): 1.0, (8, 8): 0.01}))
    assert "use w8a8" in slower.edits[-1].what


@pytest.mark.parametrize(
    ("bits", "costs", "torch_ns", "words"),
    [
        # Torch's own int8 is faster than ours in any bits.
        ("w3a3", EVEN, 1.0, ("torch's int8", "cheaper choice", "no training", "OpenVINO")),
        ("w8a8", EVEN, 1.0, ("torch's int8", "cheaper choice", "OpenVINO")),
        # Our eight bits are as fast, and torch's slower or unknown.
        ("w3a3", EVEN, 1e6, ("as fast", "lowbit:w8a8", "cheaper choice", "torch's int8")),
        ("w3a3", EVEN, None, ("as fast", "lowbit:w8a8", "cheaper choice")),
        # Three bits are worth it.
        ("w3a3", {(3, 3): 0.01, (8, 8): 50.0}, 1e9, ("8 bits are slower", "lowbit:w8a8")),
    ],
)
def test_a_note_names_the_cheaper_choice(
    bits: str, costs: dict[tuple[int, int], float], torch_ns: float | None, words: tuple[str, ...]
) -> None:
    edited = predicted(graph_of(net), Machine(costs, torch_ns), LowBit(bits))
    note = edited.edits[-1].note
    assert all(word in note for word in words), note
    assert ("cheaper" in note) is ("cheaper choice" in words)
    assert ("no training" in note) is (bits == "w3a3" and "cheaper choice" in words)


def test_eight_bits_that_are_not_faster_are_not_recommended() -> None:
    edited = predicted(graph_of(net), Machine(EVEN, 1e6), LowBit("w8a8"))
    assert "cheaper" not in edited.edits[-1].note
    assert predicted(graph_of(net), Machine(EVEN), LowBit("w8a8")).edits[-1].note == ""


def test_torchs_own_int8_includes_grouped_convolutions_sums_and_maxima() -> None:
    graph = graph_of(net)
    theirs = TorchInt8.of(graph, LowBit().sites(graph), ModuleSelection())
    layers = [call.arguments for call in theirs.calls.values()]
    # Image, weight, stride, padding, dilation, groups; whether it rounds floats. Sums are small.
    once = ((1, 1), (1, 1), (1, 1))
    assert layers == [
        ("torch int8", (2, 3, 8, 8), (8, 3, 3, 3), (*once, 1), True),
        ("torch int8", (2, 8, 8, 8), (8, 8, 3, 3), (*once, 1), False),
        ("torch int8", (2, 8, 8, 8), (8, 1, 3, 3), (*once, 8), False),
        ("torch int8", (2, 8), (4, 8), None, False),
    ]
    # Four layers of 10 us; without norms and ReLUs, with an unchanged sum and mean.
    step = theirs.step_ns(graph, Machine(EVEN, 1e4), 1.0)  # type: ignore[arg-type]
    rest = [
        float(graph.tasks.duration_ns[t] + graph.tasks.gap_ns[t])
        for t in range(len(graph))
        if t not in theirs.calls and t not in theirs.around.gone
    ]
    assert step == pytest.approx(4e4 + sum(rest), rel=0.02)
    assert theirs.step_ns(graph, Machine(EVEN), 1.0) is None  # type: ignore[arg-type]


def test_the_time_of_torchs_own_int8_is_measured(require: Any) -> None:
    engines = torch.backends.quantized.supported_engines
    require("native", "x86" in engines, "this torch has no engine x86")
    window = ((2, 2), (1, 1), (1, 1), 4)
    shapes = [
        (torch_layer_call((2, 8, 9, 9), (16, 2, 3, 3), window), (2, 16, 5, 5)),
        (torch_layer_call((2, 8, 9, 9), (16, 2, 3, 3), window, floats=True), (2, 16, 5, 5)),
        (torch_layer_call((3, 8), (4, 8)), (3, 4)), (torch_sum_call((2, 8, 5, 5)), (2, 8, 5, 5)),
        (torch_pool_call((2, 8, 9, 9), ((3, 3), (2, 2), (1, 1), (1, 1)), False), (2, 8, 5, 5)),
    ]  # fmt: skip
    for call, shape in shapes:
        y: Any = timer(call)()
        assert tuple(y.shape) == shape
        # Codes between layers; a linear layer goes from floats to floats.
        assert y.dtype is (torch.float32 if len(shape) == 2 else torch.quint8)
    answers = run([call.to_json() for call, _ in shapes], 1)
    assert all(answer["nanoseconds"] > 0 for answer in answers)


class Sums(nn.Module):
    """A block with a sum after a stem; then branches, a maximum over windows, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.pool = nn.Conv2d(3, 8, 3, padding=1), nn.MaxPool2d(3, 2, 1)
        self.first, self.second = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.left, self.right = nn.Conv2d(8, 4, 1), nn.Conv2d(8, 6, 3, padding=1)
        self.next, self.head = nn.Conv2d(10, 8, 1), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(self.stem(x).relu())
        x = (self.second(self.first(x).relu()) + x).relu()
        x = self.pool(torch.cat([self.left(x).relu(), self.right(x).relu()], 1))
        return self.head(self.next(x).mean((2, 3)))


def sums() -> Any:
    return Sums().eval(), torch.randn(2, 3, 16, 16)


def test_it_predicts_which_outputs_are_passed_as_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    from slipstream.techniques.lowbit.qat import quantise_model

    monkeypatch.setattr(cost, "MIN_SUM_ELEMS", 1)

    graph, machine = graph_of(sums), Machine(EVEN)
    edited = predicted(graph, machine)
    found = [edited.calls[c].arguments for c in edited.tasks.call
             if c >= 0 and edited.calls[c].name == "slipstream::lowbit"]  # fmt: skip
    assert [call[7:9] if isinstance(call[0], int) else call[0] for call in found] == [
        ("planes", "floats"), ("floats", "codes"), ("codes", "sum"), ("codes", "codes"),
        ("codes", "codes"), "concat", "pool", ("codes", "floats"), ("floats", "floats"),
    ]  # fmt: skip
    # The stem's maximum is of floats in another layout now; the block's sum is gone.
    names = [edited.string(int(name)) for name in edited.tasks.name]
    assert sum("max_pool" in name for name in names) == 2
    assert not any("add" in name and "mm" not in name for name in names)
    # The model itself does the same.
    model, x = sums()
    quantise_model(model, [x], wbits=3, abits=3)
    handed = [
        layer.output_codes is not None for layer in model.children() if hasattr(layer, "wbits")
    ]
    assert handed == [False, True, False, True, True, False, False]
    assert model.second.after_sum.relu
    assert model.second.after_sum.codes == model.left.input_codes


class Mobile(nn.Module):
    """A block of mobile networks, and a maximum over windows, between a stem and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU6(inplace=True),
            nn.Conv2d(8, 48, 1, bias=False), nn.BatchNorm2d(48), nn.ReLU6(inplace=True),
            nn.Conv2d(48, 48, 3, padding=1, groups=48), nn.BatchNorm2d(48), nn.ReLU6(),
            nn.Conv2d(48, 16, 1), nn.MaxPool2d(2), nn.Conv2d(16, 32, 1),
        )  # fmt: skip
        self.head = nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).mean((2, 3)))


def mobile() -> Any:
    return Mobile().eval(), torch.randn(1, 3, 96, 96)


@pytest.mark.parametrize("bits", ["w8a8", "w3a3"])
def test_tensor_memory_is_predicted(bits: str) -> None:
    graph, technique = graph_of(mobile), LowBit(bits)
    edited = predicted(graph, Machine(EVEN), technique)
    edited.check()
    now, then, real = (
        replay(step).peak_bytes
        for step in (graph, edited, record(build(mobile, technique), steps=2))
    )
    # The expanded image in float32, twice, against one byte per value.
    assert then < 0.4 * now
    assert then == pytest.approx(real, rel=0.1)


def test_every_lookup_was_requested() -> None:
    graph, machine = graph_of(net), Machine(EVEN, 1e6)
    predicted(graph, machine)
    assert machine.asked == {call.key for call in LowBit().required_timings(graph)}


def test_without_timings_no_claim_is_made() -> None:
    class Nothing(Machine):
        def lookup(self, call: Call) -> Timing | None:
            return None

    graph = graph_of(net)
    edited = predicted(graph, Nothing(EVEN))
    assert edited.tasks.duration_ns.sum() <= graph.tasks.duration_ns.sum()
    assert edited.edits[-1].what == "4 layers in w3a3"
    training = predicted(graph, Nothing(EVEN), LowBit(train=True))
    assert training.tasks.duration_ns.tolist() == graph.tasks.duration_ns.tolist()


@pytest.mark.parametrize(
    "layer",
    [linear(1, 700, 300), linear(5, 64, 64), linear(77, 90, 800),
     LayerShape((1, 20, 20, 48), 96, (3, 3), padding=(1, 1)),
     LayerShape((1, 20, 20, 48), 48, (3, 3), padding=(1, 1), depthwise=True)],
)  # fmt: skip
def test_the_model_recovers_a_law_it_can_express(layer: LayerShape) -> None:
    machine = Machine({(3, 3): 0.004, (8, 8): 0.01})
    for bits in machine.per_product:
        if layer.depthwise:
            bits = (8, 8)
        costs = Costs.fitted(machine, *bits, layer.depthwise)  # type: ignore[arg-type]
        assert costs is not None
        assert costs.nanoseconds(layer) == pytest.approx(machine.time(layer, *bits), rel=0.02)


def test_operations_around_matmuls_are_timed_once_for_all_bits() -> None:
    three, two = ({call.key for call in required_timings(*bits)} for bits in ((3, 3), (2, 2)))
    assert len(two - three) == len(cost.PRODUCTS)
    assert {call.key for call in required_timings(8, 8)} < three
    assert len({call.key for call in required_timings(3, 3, depthwise=True)} - three) == len(
        cost.DEPTHWISE
    )


def test_memory_bounds_layers_of_few_rows() -> None:
    few, many = linear(1, 8192, 8192), linear(64, 8192, 8192)
    constants = [[0.0] * (len(layer.features()) - 1) + [1e-9] for layer in (few, many)]
    costs = Costs(tuple(constants[0]), tuple(constants[1]), (), 10.0, 0.1, 3)
    assert costs.nanoseconds(few) == pytest.approx(8192 * 8192 * 3 / 8 / 10)
    # Up to the number of rows that the same weights serve, further rows cost no bytes.
    assert costs.nanoseconds(many) == pytest.approx(8192 * 8192 * 3 / 8 / 10)
    # Fewer weights stay in a cache, unless there are others.
    small = linear(1, 1024, 1024)
    assert costs.nanoseconds(small) < costs.nanoseconds(small, cold=True)


def test_the_summary_of_predictions_uses_recorded_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        bench_predictions, "unseen_layers",
        lambda count: [(linear(1 + i, 8, 8), (3, 3)) for i in range(count)],
    )  # fmt: skip
    layers, networks = bench_predictions._planned(BenchOptions(full=True))
    assert (len(layers), len(networks)) == (23, 7)
    names = [f"predictions: {name}" for name in (*layers, *networks)]
    errors = [(-1) ** i * (10.0 + i % 2) for i in range(30)]
    cases = {
        name: Bar(
            name,
            error,
            "%",
            "",
            (None, False, *[True] * 28)[i],
            # Torch's own was measured for some cases only.
            data={"right of torch": (None, False, True)[i]} if i < 3 else {},
        )
        for i, (name, error) in enumerate(zip(names, errors, strict=True))
    }
    # Only requested cases are measured.
    options = BenchOptions(full=True, only="predictions: speed-up", recorded=cases)
    (error,) = bench_predictions.bars(options)
    assert (error.value, error.n, error.holds) == (10.5, 30, True)
    sign, torchs = bench_predictions.bars(replace(options, only="predictions: faster"))
    assert (round(sign.value or 0, 2), sign.n, sign.holds) == (96.55, 29, True)
    assert (torchs.value, torchs.n) == (50.0, 2)
    cases.pop(names[7])
    (open_,) = bench_predictions.bars(options)
    assert open_.value is None
    assert re.search(r"\b29\b.*\b30\b", open_.detail)


def test_its_requested_calls_can_be_timed() -> None:
    training = LowBit(train=True).required_timings(graph_of(mlp))[-2:]
    layers, depthwise = required_timings(3, 3), required_timings(3, 3, depthwise=True)[-4:-1]
    calls = [*layers[:2], layers[-6], *depthwise, *training]
    answers = run([call.to_json() for call in calls], 1)
    assert all(answer["nanoseconds"] > 0 for answer in answers)
    unknown = run([Call("slipstream::nobody()", ()).to_json()], 1)
    assert "error" in unknown[0]


def test_real_layers_are_inserted() -> None:
    plain, made = build(net), build(net, LowBit("w8a8"))
    assert isinstance(made.model.stem, LowBitConv2d)
    assert isinstance(made.model.head, LowBitLinear)
    assert isinstance(made.model.norm, nn.Identity)
    assert made.model.depthwise.groups == 8
    assert isinstance(made.model.depthwise, LowBitConv2d)
    error = (made.step() - plain.step()).norm() / plain.step().norm()
    assert float(error) < 0.1
    assert build(net, LowBit("w3a2")).model.depthwise.wbits == 8
    few = build(net, LowBit("w3a2", only="i*"))
    assert (few.model.inner.wbits, few.model.inner.abits) == (3, 2)
    assert type(few.model.stem) is nn.Conv2d


def test_training_is_prepared_on_request() -> None:
    assert "train=yes" in str(LowBit().why_not(graph_of(images)))
    with pytest.raises(WorkloadError, match="the step trains"):
        build(images, LowBit())
    technique = LowBit("w3a3", train=True)
    assert technique.why_not(graph_of(images)) is None
    assert "does not train" in str(technique.why_not(graph_of(net)))
    built = build(images, technique)
    fakes = [module for module in built.model.modules() if isinstance(module, FakeQuantize)]
    assert len(fakes) == 6
    before = [quantizer.log_scale.flatten()[0].item() for quantizer in fakes]
    first = float(built.step())
    for _ in range(20):
        last = float(built.step())
    assert last < first
    assert [quantizer.log_scale.flatten()[0].item() for quantizer in fakes] != before
    edited = predicted(graph_of(images), _Rounding(EVEN), technique)
    edited.check()
    assert len(edited) == len(graph_of(images)) + 6


class _Rounding(Machine):
    def lookup(self, call: Call) -> Timing | None:
        return Timing(1000.0, 0.01, Provenance.MICROBENCHMARK)


def test_refusals_have_reasons() -> None:
    class Own(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(x)

    def nothing() -> Any:
        return Own(), torch.randn(2, 2)

    assert "no linear layer" in str(LowBit().why_not(graph_of(nothing)))
    with pytest.raises(WorkloadError, match="modules"):
        build(nothing, LowBit())
    # A model that is itself a layer.
    assert "no linear layer" in str(LowBit().why_not(graph_of(inference)))
    with pytest.raises(WorkloadError, match="no layer"):
        build(inference, LowBit())
    assert LowBit().why_not(graph_of(net)) is None
    with pytest.raises(WorkloadError, match="hides it"):
        build(lambda: lambda: None, LowBit())
    with pytest.raises(WorkloadError, match=r"only=nobody\b.*\bstem\b"):
        build(net, LowBit(only="nobody"))


def test_grammar_and_quality() -> None:
    (technique,) = parse("lowbit:w2a4,scales=block64,except=head*")
    assert technique == LowBit("w2a4", "block64", except_="head*")
    assert str(technique) == "lowbit:w2a4,scales=block64,except=head*"
    assert [parse(text) for text in LowBit.traits.variants] == [
        (LowBit("w3a3"),),
        (LowBit("w8a8"),),
    ]
    for bad in ("lowbit:3", "lowbit:w9a3", "lowbit:w3a0", "lowbit:w3a3,scales=block16"):
        with pytest.raises(InvalidArgumentError):
            parse(bad)
    assert LowBit().quality().kind is QualityKind.NEEDS_TRAINING
    assert LowBit("w8a8").quality().kind is QualityKind.ROUNDING


def test_the_source_edit_is_equivalent(tmp_path: Path) -> None:
    script = tmp_path / "infer.py"
    script.write_text(
        "import torch\nfrom torch import nn\n\n\ndef make():\n"
        "    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()\n"
        "    x = torch.randn(4, 8)\n    return model, x\n"
    )
    change = LowBit("w4a8").code(Workload(f"{script}:make"))
    assert change is not None
    assert "+    slipstream.lowbit.quantise_model(model, [x], wbits=4, abits=8)" in change.diff


def test_predicting_needs_no_torch() -> None:
    code = (
        "import sys; from slipstream.technique import parse; parse('lowbit:w3a3'); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
