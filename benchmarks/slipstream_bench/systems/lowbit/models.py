"""Rows of ``slipstream bench lowbit`` on whole models: speed, size, accuracy.

Everything runs on one thread, in CPU time.
"""

from __future__ import annotations

import copy
import io
import math
import statistics
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from slipstream_bench.harness import Paired, Ratio, guarded, one_thread, paired
from slipstream_bench.rows import Bar, BenchOptions, at_least, at_most, not_judged

QUICK_NETWORKS = ("ResNet-18", "SqueezeNet", "MobileNetV2")


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Yield rows on seven networks, weight-bound layers, a small call, a checkpoint and accuracy.

    Quick takes about a minute: three of the seven networks, fewer runs.
    """
    import torch

    with one_thread(gradients=False):
        yield from _network_rows(options)
        yield from _weight_bound_row(options)
        yield from _small_call_row(options)
        yield from _size_row(options)
        with torch.enable_grad():
            yield from _digits_row(options)


def _network_rows(options: BenchOptions) -> Iterator[Bar]:
    from slipstream_bench.systems.lowbit.networks import NETWORKS

    names = list(NETWORKS) if options.full else list(QUICK_NETWORKS)
    of = f"geomean of {len(names)} networks, batch 1"
    rows = (
        ("models: w3a3 against fp32 eager", (3, 3), "fp32", 3.9),
        ("models: w3a3 against torch int8", (3, 3), "int8", 1.0),
        ("models: w2a2 against torch int8", (2, 2), "int8", 1.2),
    )
    selected = [row for row in rows if options.wants(row[0])]
    if not selected:
        return
    found: dict[str, dict[str, Ratio]] = {row[0]: {} for row in selected}
    for name in names:
        options.progress(f"models: {name}")
        taken = _network_times(NETWORKS[name], 9 if options.full else 8)
        for bar, bits, peer, _ in selected:
            found[bar][name] = taken.ratio(peer, f"w{bits[0]}a{bits[1]}")
    for bar, _, _, target in selected:
        mean = math.exp(statistics.mean(math.log(ratio.value) for ratio in found[bar].values()))
        each = "; ".join(f"{name} {ratio}" for name, ratio in found[bar].items())
        row = at_least(bar, mean, target, "x", n=len(names), detail=f"{of}: {each}")
        yield guarded(row, found[bar])


def _network_times(make: Callable[[], Any], blocks: int) -> Paired:
    import torch

    torch.manual_seed(0)
    model = make().eval()
    x = torch.randn(1, 3, 224, 224)
    arms: dict[str, Callable[[], object]] = {
        "fp32": lambda: model(x),
        "int8": bound(torch_int8(model, x), x),
    }
    for bits in ((3, 3), (2, 2)):
        arms[f"w{bits[0]}a{bits[1]}"] = bound(low_bit(model, x, *bits), x)
    return paired(arms, blocks=blocks)


def bound(model: Any, x: Any) -> Callable[[], object]:
    """Return a call of `model`."""
    return lambda: model(x)


def low_bit(model: Any, x: Any, wbits: int, abits: int) -> Any:
    """Return a copy of `model` in few bits, calibrated on `x`."""
    from torch.fx.experimental.optimization import fuse

    from slipstream.techniques.lowbit.qat import quantise_model

    # Norms after layers that stay in float are folded, as torch does.
    lowbit = fuse(copy.deepcopy(model))
    quantise_model(lowbit, [x], wbits=wbits, abits=abits, least_error=False)
    return lowbit


def torch_int8(model: Any, x: Any) -> Any:
    """Return `model` as torch quantises it for x86, calibrated on `x`."""
    import torch
    from torch.ao.quantization import get_default_qconfig_mapping
    from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

    engine = torch.backends.quantized.engine
    torch.backends.quantized.engine = "x86"
    try:
        with warnings.catch_warnings():
            # It is deprecated in favour of a package that is not one of our dependencies.
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
    taken = paired({"int8": bound(int8, x), "w3a3": bound(model, x)})
    detail = "four linear layers of 4096 x 4096, one row, ours from floats to floats"
    yield taken.ratio("int8", "w3a3").at_least(bar, 2.0, detail=detail)


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

    taken = paired({"float": bound(module, x), "lowbit": bound(layer, x)})
    micro = 1e6 * taken.median_s("lowbit")
    detail = f"{micro:.1f} us with Python, over torch's float32 layer"
    yield taken.ratio("lowbit", "float").at_most(bar, 1.3, detail=detail)


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
    lost = [trained.float_ - trained.lowbit for trained in found]
    detail = (
        f"worst of {len(lost)} seeds, 597 held-out images; float32 "
        f"{statistics.mean(trained.float_ for trained in found):.2f} %, three bits "
        f"{statistics.mean(trained.lowbit for trained in found):.2f} % on average"
    )
    yield at_most(bar, max(lost), 1.5, "points", n=len(lost), detail=detail)
