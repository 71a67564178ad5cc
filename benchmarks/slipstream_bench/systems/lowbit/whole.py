"""Rows of ``slipstream bench lowbit`` about whole networks beside ONNX Runtime and OpenVINO.

Every arm computes the same network on the same input, on one thread, its ranges calibrated on that
input; weights have a grid a channel. An arm whose output is far from float32's is not judged: it
computes something else.
"""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from slipstream_bench.harness import Paired, one_thread, paired
from slipstream_bench.rows import Bar, BenchOptions, not_judged
from slipstream_bench.systems.lowbit import peers
from slipstream_bench.systems.lowbit.models import bound, low_bit, torch_int8
from slipstream_bench.systems.lowbit.networks import SIZE, mobilenet_v2, resnet18
from slipstream_bench.systems.lowbit.peers import Peer, Run

# By the length of what is off over the length of float32's output. Of networks of other weights it
# is 1.4; eight bits cost up to a quarter in fifty layers of random weights.
_SAME = 0.5
_PEERS = ("ONNX Runtime int8", "OpenVINO int8", "ONNX Runtime float32", "OpenVINO float32")
_FLOAT, _EIGHT, _THREE, _TORCH = "float32", "w8a8", "w3a3", "torch int8"


def small() -> nn.Sequential:
    """Three convolutions on 32 x 32 pixels: 29 M products, 56 thousand weights."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


_NETWORKS: Mapping[str, tuple[Callable[[], nn.Module], int]] = {
    "ResNet-18": (resnet18, SIZE),
    "MobileNetV2": (mobilenet_v2, SIZE),
    "small CNN": (small, 32),
}


def bars(options: BenchOptions) -> Iterator[Bar]:
    """A row a network and a peer: how many times as long it takes as ours in eight bits."""
    for name, (make, size) in _NETWORKS.items():
        rows = {f"whole: {name} in w8a8, times {peer}": peer for peer in _PEERS}
        wanted = {bar: peer for bar, peer in rows.items() if options.wants(bar)}
        if not wanted:
            continue
        options.progress(f"whole: {name}")
        with one_thread(gradients=False), tempfile.TemporaryDirectory() as folder:
            yield from _rows(name, make, size, wanted, Path(folder), options.full)


def _rows(
    name: str,
    make: Callable[[], nn.Module],
    size: int,
    wanted: Mapping[str, str],
    folder: Path,
    full: bool,
) -> Iterator[Bar]:
    torch.manual_seed(0)
    x = torch.rand(1, 3, size, size)
    model = _alive(make(), size)
    others = _others(model, x, folder)
    arms: dict[str, Run] = {
        _FLOAT: bound(model, x),
        _EIGHT: bound(low_bit(model, x, 8, 8), x),
        _THREE: bound(low_bit(model, x, 3, 3), x),
        _TORCH: bound(torch_int8(model, x), x),
        **{peer: run for peer, run in others.items() if not isinstance(run, str)},
    }
    off = {arm: _off(run(), arms[_FLOAT]()) for arm, run in arms.items()}
    taken = paired(arms, blocks=15 if full else 8, budget_s=40.0 if full else 15.0)
    detail = _told(taken, off)
    for bar, peer in wanted.items():
        other = others[peer]
        if isinstance(other, str):
            yield not_judged(bar, "x", ">= 1", other)
        elif max(off[peer], off[_EIGHT]) > _SAME:
            yield not_judged(bar, "x", ">= 1", f"the two compute something else: {detail}")
        else:
            yield taken.ratio(peer, _EIGHT).at_least(bar, 1.0, detail=detail)


def _alive(model: nn.Module, size: int) -> nn.Module:
    """Norms know the statistics of what they get: else signals die, and all outputs are alike."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None
    model.train()
    model(torch.rand(4, 3, size, size))
    return model.eval()


def _others(model: nn.Module, x: torch.Tensor, folder: Path) -> dict[str, Peer]:
    """The four peers, each a run or the reason why there is none."""
    try:
        file, coded = _files(model, x, folder)
    except ImportError as error:
        return dict.fromkeys(_PEERS, f"no {error.name} (the extra onnx)")
    runs = (
        peers.onnxruntime_network(coded, x), peers.openvino_network(coded, x),
        peers.onnxruntime_network(file, x), peers.openvino_network(file, x),
    )  # fmt: skip
    return dict(zip(_PEERS, runs, strict=True))


def _files(model: nn.Module, x: torch.Tensor, folder: Path) -> tuple[Path, Path]:
    """The network as ONNX in float32, and in int8 as ONNX Runtime's quantiser makes it."""
    from onnxruntime.quantization.shape_inference import quant_pre_process

    from slipstream_bench.systems.stability.models import int8_by_onnxruntime

    written, file = folder / "written.onnx", folder / "network.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            copy.deepcopy(model), (x,), str(written), dynamo=False, opset_version=18,
            input_names=["x"], output_names=["y"],
        )  # fmt: skip
        # Without it, the quantiser does not see which layers it can fuse.
        quant_pre_process(str(written), str(file))
        return file, int8_by_onnxruntime(file, x.numpy(), per_channel=True)


def _off(output: Any, floats: Any) -> float:
    """The length of the difference over the length of `floats`."""
    given, right = torch.as_tensor(output).flatten(), torch.as_tensor(floats).flatten()
    return float((given - right).norm() / right.norm())


def _told(taken: Paired, off: Mapping[str, float]) -> str:
    each = [f"{arm} {1e3 * taken.median_s(arm):.3g} ({off[arm]:.1%})" for arm in taken.arms]
    return f"ms, and how far outputs are from float32's: {', '.join(each)}"
