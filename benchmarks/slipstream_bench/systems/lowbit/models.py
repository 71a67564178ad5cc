"""Rows of ``slipstream bench lowbit`` about whole models: speed, prediction, size, accuracy.

All on one thread and in CPU time, arms in turns, as ratios of neighbouring runs.
"""

from __future__ import annotations

import copy
import io
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream_bench.rows import Bar, BenchOptions, at_least, at_most, not_judged

QUICK_NETWORKS = ("ResNet-18", "SqueezeNet", "MobileNetV2")


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Speed of seven networks, of layers bound by their weights, and of one small call; size of a
    checkpoint; accuracy after training.

    Quick takes about a minute: three of the seven networks, fewer runs.
    """
    import torch

    threads, grad = torch.get_num_threads(), torch.is_grad_enabled()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    try:
        yield from _network_rows(options)
        yield from _weight_bound_row(options)
        yield from _small_call_row(options)
        yield from _size_row(options)
        with torch.enable_grad():
            yield from _digits_row(options)
    finally:
        torch.set_num_threads(threads)
        torch.set_grad_enabled(grad)


@dataclass(frozen=True)
class _Ratios:
    """Of paired runs: the median, and the middle half around it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, slow: Sequence[float], fast: Sequence[float]) -> _Ratios:
        ordered = sorted(a / b for a, b in zip(slow, fast, strict=True))
        quarter = len(ordered) // 4
        return cls(statistics.median(ordered), ordered[quarter], ordered[-1 - quarter])

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


def paired(arms: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """CPU seconds of each arm, one run of each after the other."""
    for work in arms.values():
        work()
        work()
    times: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(rounds):
        for name, work in arms.items():
            began = time.thread_time()
            work()
            times[name].append(max(time.thread_time() - began, 1e-9))
    return times


def _network_rows(options: BenchOptions) -> Iterator[Bar]:
    from slipstream_bench.systems.lowbit.networks import NETWORKS

    names = list(NETWORKS) if options.full else list(QUICK_NETWORKS)
    of = f"geomean of {len(names)} networks, batch 1"
    rows = (
        ("models: w3a3 against fp32 eager", (3, 3), "fp32", 3.9),
        ("models: w3a3 against torch int8", (3, 3), "int8", 1.0),
        ("models: w2a2 against torch int8", (2, 2), "int8", 1.2),
    )
    wanted = [row for row in rows if options.wants(row[0])]
    if not wanted:
        return
    found: dict[str, list[tuple[str, _Ratios]]] = {row[0]: [] for row in wanted}
    for name in names:
        options.progress(f"models: {name}")
        times = _network_times(NETWORKS[name], 9 if options.full else 5)
        for bar, bits, peer, _ in wanted:
            found[bar].append((name, _Ratios.of(times[peer], times[f"w{bits[0]}a{bits[1]}"])))
    for bar, _, _, target in wanted:
        mean = math.exp(statistics.mean(math.log(ratio.median) for _, ratio in found[bar]))
        each = "; ".join(f"{name} {ratio}" for name, ratio in found[bar])
        yield at_least(bar, mean, target, "x", n=len(names), detail=f"{of}: {each}")


def _network_times(make: Callable[[], Any], rounds: int) -> dict[str, list[float]]:
    import torch
    from torch.fx.experimental.optimization import fuse

    from slipstream.techniques.lowbit.qat import quantise_model

    torch.manual_seed(0)
    model = make().eval()
    x = torch.randn(1, 3, 224, 224)
    arms: dict[str, Callable[[], object]] = {
        "fp32": lambda: model(x),
        "int8": _bound(_torch_int8(model, x), x),
    }
    for bits in ((3, 3), (2, 2)):
        # Norms behind layers that stay in float are folded for us as torch folds them for itself.
        lowbit = fuse(copy.deepcopy(model))
        quantise_model(lowbit, [x], wbits=bits[0], abits=bits[1], least_error=False)
        arms[f"w{bits[0]}a{bits[1]}"] = _bound(lowbit, x)
    return paired(arms, rounds)


def _bound(model: Any, x: Any) -> Callable[[], object]:
    return lambda: model(x)


def _torch_int8(model: Any, x: Any) -> Any:
    """`model` as torch quantises it for x86, calibrated on `x`."""
    import torch
    from torch.ao.quantization import get_default_qconfig_mapping
    from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

    engine = torch.backends.quantized.engine
    torch.backends.quantized.engine = "x86"
    try:
        with warnings.catch_warnings():
            # It is deprecated in favour of a package that is not a dependency of ours.
            warnings.simplefilter("ignore")
            prepared = prepare_fx(copy.deepcopy(model), get_default_qconfig_mapping("x86"), (x,))
            prepared(x)
            return convert_fx(prepared)
    finally:
        torch.backends.quantized.engine = engine


def _weight_bound_row(options: BenchOptions) -> Iterator[Bar]:
    bar = "models: weight-bound w3a3 against torch int8"
    if not options.wants(bar):
        return
    import torch
    from torch import nn

    from slipstream.techniques.lowbit.qat import quantise_model

    options.progress(bar)
    torch.manual_seed(0)
    wide = 4096
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(wide, wide), nn.ReLU()]
    model = nn.Sequential(*layers).eval()
    x = torch.randn(1, wide)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantised: Any = torch.ao.quantization.quantize_dynamic
        int8 = quantised(model, {nn.Linear})
    quantise_model(model, [x], wbits=3, abits=3, edge_bits=3, least_error=False)
    times = paired({"int8": _bound(int8, x), "w3a3": _bound(model, x)}, 15)
    ratio = _Ratios.of(times["int8"], times["w3a3"])
    detail = f"four linear layers of 4096 x 4096, one row, ours from floats to floats: {ratio}"
    yield at_least(bar, ratio.median, 2.0, "x", n=15, detail=detail)


def _small_call_row(options: BenchOptions) -> Iterator[Bar]:
    bar = "models: a call of LowBitLinear 64 x 64, one row"
    if not options.wants(bar):
        return
    import torch
    from torch import nn

    from slipstream.techniques.lowbit.nn import LowBitLinear

    module = nn.Linear(64, 64).eval()
    layer = LowBitLinear.from_float(module, 3, 3, (-3.0, 3.0)).eval()
    x = torch.randn(1, 64)

    def many(one: Any) -> Callable[[], None]:
        def work() -> None:
            for _ in range(1000):
                one(x)

        return work

    times = paired({"float": many(module), "lowbit": many(layer)}, 15)
    ratio = _Ratios.of(times["lowbit"], times["float"])
    micro = 1e3 * statistics.median(times["lowbit"])
    detail = f"{micro:.1f} us, Python included, of torch's float32 layer: {ratio}"
    yield at_most(bar, ratio.median, 1.3, "x", n=15, detail=detail)


def _size_row(options: BenchOptions) -> Iterator[Bar]:
    bar = "models: checkpoint of w3 weights, share of float32"
    if not options.wants(bar):
        return
    import torch

    from slipstream.techniques.lowbit.qat import quantise_model
    from slipstream_bench.systems.lowbit.networks import resnet18

    model = resnet18().eval()
    x = torch.randn(1, 3, 64, 64)
    before = _checkpoint_bytes(model)
    quantise_model(model, [x], wbits=3, abits=3, edge_bits=3, least_error=False)
    share = 100 * _checkpoint_bytes(model) / before
    target = 100 * 3 / 32 + 3
    detail = "ResNet-18, all layers in 3 bits, as torch.save writes it"
    yield at_most(bar, share, target, "%", detail=detail)


def _checkpoint_bytes(model: Any) -> int:
    import torch

    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    return len(file.getvalue())


def _digits_row(options: BenchOptions) -> Iterator[Bar]:
    bar = "models: w3a3 trained on digits, points lost to float32"
    if not options.wants(bar):
        return
    from slipstream.errors import MissingExtraError
    from slipstream_bench.systems.lowbit.digits import run

    seeds = range(5 if options.full else 1)
    try:
        options.progress(bar)
        found = [run(3, 3, seed) for seed in seeds]
    except MissingExtraError as error:
        yield not_judged(bar, "points", "<= 1.5", error.what)
        return
    lost = [one.float_ - one.lowbit for one in found]
    detail = (
        f"worst of {len(lost)} seeds, 597 held-out images; float32 "
        f"{statistics.mean(one.float_ for one in found):.2f} %, three bits "
        f"{statistics.mean(one.lowbit for one in found):.2f} % in the mean"
    )
    yield at_most(bar, max(lost), 1.5, "points", n=len(lost), detail=detail)
