"""Rows of ``slipstream bench lowbit`` on predictions of layers and models outside the fit.

Speed-ups are over float32, predicted and measured, on one thread in CPU time. Layers are those of
well-known networks, with randomly drawn bits; none is in the calibration. Networks are recorded,
predicted, converted and measured, as in ``slipstream prove``. Each case is a separate row, so that
a run resumes where it was stopped; the summary rows depend on them.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from slipstream_bench.harness import one_thread, paired
from slipstream_bench.rows import Bar, BenchOptions, at_least, at_most, not_judged
from slipstream_bench.systems.lowbit.models import QUICK_NETWORKS, bound, torch_int8

if TYPE_CHECKING:
    from slipstream.durations import Durations
    from slipstream.graph import Call
    from slipstream.techniques.lowbit.cost import LayerShape

_CASES = 30
_SEED = 5
_CASE = "predictions: "
_NAMES = (
    "predictions: speed-up over float32, unseen layers and networks",
    "predictions: faster or slower than 8 bits, said right",
    "predictions: faster or slower than torch's own 8 bits, said right",
)
# Within a few percent neither counts as faster.
_EVEN = 0.05


@dataclass(frozen=True)
class _Case:
    """A prediction and the measurement, in seconds."""

    name: str
    float_: float
    eight: float
    lowbit: float
    predicted_float: float
    predicted_eight: float
    predicted_lowbit: float
    torch: float | None = None
    predicted_torch: float | None = None

    @property
    def error(self) -> float:
        """Relative error of the speed-up over float32."""
        predicted = self.predicted_float / self.predicted_lowbit
        return predicted / (self.float_ / self.lowbit) - 1

    @property
    def judged(self) -> bool:
        """Whether low-bit and 8-bit times differ enough to order them."""
        return abs(math.log(self.eight / self.lowbit)) > _EVEN

    @property
    def right(self) -> bool:
        """Whether the faster one was predicted."""
        return (self.eight > self.lowbit) == (self.predicted_eight > self.predicted_lowbit)

    @property
    def right_of_torch(self) -> bool | None:
        """`right` for torch's own int8; None if neither is faster, or it was not run."""
        if self.torch is None or self.predicted_torch is None:
            return None
        if abs(math.log(self.torch / self.lowbit)) <= _EVEN:
            return None
        return (self.torch > self.lowbit) == (self.predicted_torch > self.predicted_lowbit)

    def row(self) -> Bar:
        """Return a row of the error in percent, which holds if the faster one was predicted."""
        detail = (
            f"error of the speed-up over float32, predicted "
            f"{self.predicted_float / self.predicted_lowbit:.2f}x, measured "
            f"{self.float_ / self.lowbit:.2f}x; over 8 bits "
            f"{self.predicted_eight / self.predicted_lowbit:.2f}x and "
            f"{self.eight / self.lowbit:.2f}x"
        )
        holds = self.right if self.judged else None
        if self.torch is not None and self.predicted_torch is not None:
            detail += (
                f"; over torch's own {self.predicted_torch / self.predicted_lowbit:.2f}x and "
                f"{self.torch / self.lowbit:.2f}x"
            )
        data = {**asdict(self), "right of torch": self.right_of_torch}
        return Bar(_CASE + self.name, 100 * self.error, "%", "the faster is named", holds,
                   detail=detail, data=data)  # fmt: skip


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Yield a row per case, then the error of speed-ups, and how often the faster was predicted.

    Quick takes three networks and nine layers; full seven, and 23 layers.
    """
    layers, networks = _planned(options)
    names = [_CASE + name for name in (*layers, *networks)]
    if not any(map(options.wants, (*names, *_NAMES))):
        return
    rows = {name: bar for name, bar in options.recorded.items() if name in names}
    with one_thread(gradients=False):
        for row in _cases(options, layers, networks):
            rows[row.bar] = row
            yield row
    if len(rows) < len(names):
        for name in filter(options.wants, _NAMES):
            yield not_judged(name, "%", "", f"{len(rows)} of {len(names)} cases are measured")
        return
    if options.wants(_NAMES[0]):
        errors = [abs(row.value) for row in rows.values() if row.value is not None]
        detail = (
            f"mean absolute error; median {statistics.median(errors):.0f} %, within 15 %: "
            f"{sum(error <= 15 for error in errors)} of {len(errors)}"
        )
        mean = statistics.mean(errors)
        yield at_most(_NAMES[0], mean, 15, "%", n=len(errors), detail=detail)
    verdicts = (
        [row.holds for row in rows.values()],
        [row.data.get("right of torch") for row in rows.values()],
    )
    for name, every in zip(_NAMES[1:], verdicts, strict=True):
        if not options.wants(name):
            continue
        judged = [verdict for verdict in every if verdict is not None]
        if not judged:
            yield not_judged(name, "%", ">= 95", "no case differs, or none was measured")
            continue
        detail = f"{sum(judged)} of {len(judged)} that differ by more than {100 * _EVEN:.0f} %"
        share = 100 * sum(judged) / len(judged)
        yield at_least(name, share, 95, "%", n=len(judged), detail=detail)


def _planned(
    options: BenchOptions,
) -> tuple[dict[str, tuple[LayerShape, tuple[int, int]]], dict[str, Callable[[], Any]]]:
    """Return the layers and networks of a run, by the names of their cases."""
    from slipstream_bench.systems.lowbit.networks import NETWORKS

    layers = unseen_layers(_CASES - len(NETWORKS) if options.full else 9)
    named = {
        f"{layer.rows} x {layer.k} x {layer.n} w{bits[0]}a{bits[1]}": (layer, bits)
        for layer, bits in layers
    }
    names = list(NETWORKS) if options.full else list(QUICK_NETWORKS)
    return named, {name: NETWORKS[name] for name in names}


def _cases(
    options: BenchOptions,
    layers: Mapping[str, tuple[LayerShape, tuple[int, int]]],
    networks: Mapping[str, Callable[[], Any]],
) -> Iterator[Bar]:
    from slipstream.durations import Durations
    from slipstream.techniques.lowbit.cost import Costs, required_timings

    durations = Durations(threads=1)

    def measure(calls: Iterable[Call]) -> None:
        durations.measure(calls, lambda line: options.progress(_CASE + line))

    selected = {name: layer for name, layer in layers.items() if options.wants(_CASE + name)}
    pairs = sorted({(8, 8), *(bits for _, bits in selected.values())})
    if selected:
        measure(call for bits in pairs for call in required_timings(*bits))
        measure(_torch_call(layer) for layer, _ in selected.values())
    for name, (layer, bits) in selected.items():
        options.progress(_CASE + name)
        cost, other = (Costs.fitted(durations, *widths) for widths in (bits, (8, 8)))
        if cost is None or other is None:
            yield not_judged(_CASE + name, "%", "", "a layer of the fit cannot be measured")
            continue
        float_, eight, lowbit, torch = _measured_layer(layer, bits)
        theirs = durations.lookup(_torch_call(layer))
        # The float32 time is not predicted, since the recorded step contains it.
        yield _Case(
            name, float_, eight, lowbit, float_, other.nanoseconds(layer) / 1e9,
            cost.nanoseconds(layer) / 1e9, torch, theirs.nanoseconds / 1e9 if theirs else None,
        ).row()  # fmt: skip
    for name, make in networks.items():
        if options.wants(_CASE + name):
            options.progress(_CASE + name)
            yield _network(name, make, durations, measure, 9 if options.full else 8).row()


def unseen_layers(count: int) -> list[tuple[LayerShape, tuple[int, int]]]:
    """Return layers of well-known networks outside the fit, with randomly drawn bits."""
    import torch
    from torch import nn

    from slipstream.techniques.lowbit.cost import CALIBRATED, LayerShape, linear
    from slipstream.techniques.lowbit.layer import is_depthwise, why_unsupported
    from slipstream.techniques.lowbit.nn import padding_of
    from slipstream_bench.systems.lowbit.networks import NETWORKS, SIZE

    # Layers of a transformer of width 768 on 128 tokens, and of a recurrent network.
    found = [
        linear(128, 768, 768), linear(128, 3072, 768), linear(128, 768, 3072),
        linear(1, 4096, 1024), linear(4, 2048, 512),
    ]  # fmt: skip

    def note(module: Any, args: Any, output: Any) -> None:
        # Depthwise layers have other costs and bits; a network shows whether these are right.
        if why_unsupported(module) is not None or is_depthwise(module):
            return
        x = args[0]
        if isinstance(module, nn.Linear):
            found.append(linear(x.shape[0], *module.weight.shape))
            return
        image = (x.shape[0], x.shape[2], x.shape[3], x.shape[1])
        kernel, stride = tuple(module.kernel_size), tuple(module.stride)
        found.append(LayerShape(image, module.out_channels, kernel, stride, padding_of(module)))

    with torch.device("meta"):
        for make in NETWORKS.values():
            model = make().eval()
            for module in model.modules():
                if isinstance(module, (nn.Conv2d, nn.Linear)):
                    module.register_forward_hook(note)
            model(torch.empty(1, 3, SIZE, SIZE))
    unseen = sorted(set(found) - set(CALIBRATED), key=str)
    drawn = random.Random(_SEED)
    return [
        (layer, (drawn.randint(2, 7), drawn.randint(2, 8)))
        for layer in drawn.sample(unseen, count)
    ]  # fmt: skip


def _torch_call(layer: LayerShape) -> Call:
    """Return the call of the layer in torch's own int8, from floats."""
    from slipstream.techniques.lowbit.timing import torch_layer_call

    images, height, width, channels = layer.image
    if height == 1 and layer.kernel == (1, 1):
        return torch_layer_call((layer.rows, layer.k), (layer.n, layer.k))
    window = (layer.stride, layer.padding, (1, 1), 1)
    weight = (layer.n, channels, *layer.kernel)
    return torch_layer_call((images, channels, height, width), weight, window, floats=True)


def _measured_layer(layer: LayerShape, bits: tuple[int, int]) -> tuple[float, ...]:
    """Time the layer in float32, 8 bits, `bits` and torch's int8, in seconds, with Python."""
    from slipstream.techniques.lowbit.timing import float_layer, timer

    module, x = float_layer(layer.call(*bits))
    arms: dict[str, Callable[[], object]] = {
        "float": lambda: module(x),
        "eight": timer(layer.call(8, 8)),
        "lowbit": timer(layer.call(*bits)),
        "torch": timer(_torch_call(layer)),
    }
    taken = paired(arms, blocks=11, budget_s=10.0)
    return tuple(taken.minimum_s(arm) for arm in arms)


def _network(
    name: str,
    make: Callable[[], Any],
    durations: Durations,
    measure: Callable[[Iterable[Call]], None],
    blocks: int,
) -> _Case:
    """Predict and measure a network in three bits and in eight."""
    import torch

    from slipstream.capture import CaptureSettings, capture
    from slipstream.durations import pace
    from slipstream.graph import replay
    from slipstream.surgery import ModuleSelection
    from slipstream.technique import Context
    from slipstream.techniques.lowbit.eight_bits import TorchInt8
    from slipstream.techniques.lowbit.technique import LowBit
    from slipstream.workload import Workload, drive
    from slipstream_bench.systems.lowbit.networks import SIZE

    torch.manual_seed(0)
    model, x = make().eval(), torch.randn(1, 3, SIZE, SIZE)
    workload = Workload.of(model, x)
    recording = capture(CaptureSettings(threads=1, own_process=False))
    graph = drive(workload, recording, _never, keep_in=Path())
    arms: dict[str, Callable[[], object]] = {"float": workload.build(0).step}
    predicted = {"float": replay(graph).step_ns / 1e9}
    for arm, technique in (("eight", LowBit("w8a8")), ("lowbit", LowBit("w3a3"))):
        measure(technique.required_timings(graph))
        edited = technique.predict(graph, Context(durations=durations))
        predicted[arm] = replay(edited).step_ns / 1e9
        built = workload.build(0)
        technique.apply(built)
        arms[arm] = built.step
    arms["torch"] = bound(torch_int8(model, x), x)
    sites = LowBit().sites(graph)
    in_step = pace(graph, [site.task for site in sites], durations)
    torch_ns = TorchInt8.of(graph, sites, ModuleSelection()).step_ns(graph, durations, in_step)
    taken = paired(arms, blocks=blocks)
    measured = {arm: taken.median_s(arm) for arm in arms}
    return _Case(
        name, measured["float"], measured["eight"], measured["lowbit"],
        predicted["float"], predicted["eight"], predicted["lowbit"], measured["torch"],
        None if torch_ns is None else torch_ns / 1e9,
    )  # fmt: skip


def _never(graph: Any) -> NoReturn:
    raise AssertionError("a workload of live objects is not a script")
