"""Rows of ``slipstream bench lowbit`` on whole networks compared with ONNX Runtime and OpenVINO.

Every arm computes the same network on the same input, on one thread, with ranges calibrated on that
input and weights quantised per channel. An arm whose output is far from float32's is not judged,
because it computes something else.
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

# Norm of the error over the norm of float32's output. For a network with other weights it is 1.4;
# eight bits cost up to a quarter in fifty layers of random weights.
_SAME = 0.5
_PEERS = ("ONNX Runtime int8", "OpenVINO int8", "ONNX Runtime float32", "OpenVINO float32")
_FLOAT, _EIGHT, _THREE, _TORCH = "float32", "w8a8", "w3a3", "torch int8"


def small() -> nn.Sequential:
    """Return three convolutions on 32 x 32 pixels: 29 M multiply-adds, 56 thousand weights."""
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
    """Yield a row per network and peer: its time over ours in eight bits."""
    for name, (make, size) in _NETWORKS.items():
        rows = {f"whole: {name} in w8a8, times {peer}": peer for peer in _PEERS}
        selected = {bar: peer for bar, peer in rows.items() if options.wants(bar)}
        if not selected:
            continue
        options.progress(f"whole: {name}")
        with one_thread(gradients=False), tempfile.TemporaryDirectory() as folder:
            yield from _rows(name, make, size, selected, Path(folder), options.full)


def _rows(
    name: str,
    make: Callable[[], nn.Module],
    size: int,
    selected: Mapping[str, str],
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
    detail = _describe(taken, off)
    for bar, peer in selected.items():
        other = others[peer]
        if isinstance(other, str):
            yield not_judged(bar, "x", ">= 1", other)
        elif max(off[peer], off[_EIGHT]) > _SAME:
            yield not_judged(bar, "x", ">= 1", f"the two compute something else: {detail}")
        else:
            yield taken.ratio(peer, _EIGHT).at_least(bar, 1.0, detail=detail)


def _alive(model: nn.Module, size: int) -> nn.Module:
    """Set the norms' statistics from data: otherwise activations vanish and outputs are equal."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None
    model.train()
    model(torch.rand(4, 3, size, size))
    return model.eval()


def _others(model: nn.Module, x: torch.Tensor, folder: Path) -> dict[str, Peer]:
    """Return the four peers, each a call or the reason why it cannot run."""
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
    """Return the network as ONNX files: float32, and int8 from ONNX Runtime's quantiser."""
    from onnxruntime.quantization.shape_inference import quant_pre_process

    from slipstream_bench.systems.stability.models import int8_by_onnxruntime

    written, file = folder / "written.onnx", folder / "network.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            copy.deepcopy(model), (x,), str(written), dynamo=False, opset_version=18,
            input_names=["x"], output_names=["y"],
        )  # fmt: skip
        # Without it, the quantiser does not recognise layers that it can fuse.
        quant_pre_process(str(written), str(file))
        return file, int8_by_onnxruntime(file, x.numpy(), per_channel=True)


def _off(output: Any, floats: Any) -> float:
    """Return the norm of the difference over the norm of `floats`."""
    values, expected = torch.as_tensor(output).flatten(), torch.as_tensor(floats).flatten()
    return float((values - expected).norm() / expected.norm())


def _describe(taken: Paired, off: Mapping[str, float]) -> str:
    each = [f"{arm} {1e3 * taken.median_s(arm):.3g} ({off[arm]:.1%})" for arm in taken.arms]
    return f"ms, and error of the outputs against float32's: {', '.join(each)}"
