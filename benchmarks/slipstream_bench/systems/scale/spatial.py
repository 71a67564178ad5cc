"""Tiles of images, and evaluation during training, on real ranks against one process."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from slipstream_bench.lab import on_ranks
from slipstream_bench.rows import Bar, BenchOptions, at_least, at_most

_TILES = ((2, 1), (1, 3), (2, 2))
_KERNELS = ((1, 1, 1), (3, 1, 1), (5, 2, 1), (7, 2, 1), (3, 1, 2))
_SIZE = 61, 75
_EXAMPLES, _BATCH = 203, 16
_RESAMPLES = 20_000
_TRAINING_S = 6.0


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Yield the rows; see `slipstream_bench.systems.scale.bars`."""
    error = "tiles: largest difference from one process, relative to the largest value"
    halo = "tiles: bytes of halos against the formula"
    same, overlap = "evaluation: metrics of one process", "evaluation: metric during training"
    if options.wants(error) or options.wants(halo):
        options.progress(error)
        errors, ratios = [], []
        for rows, columns in _TILES:
            for each in on_ranks(rows * columns, tiled, rows=rows, columns=columns):
                errors.append(each["error"])
                ratios += each["bytes"]
        note = (
            "float32, one process in float64; kernels of 1 to 7, strides, dilation; 2x1, 1x3, 2x2"
        )
        yield at_most(error, max(errors), 1e-5, "", n=len(errors), detail=note)
        exact = set(ratios) == {1.0}
        yield Bar(halo, max(ratios), "x", "= 1", exact, len(ratios), "payload of each rank")
    if options.wants(same) or options.wants(overlap):
        options.progress(same)
        (alone,) = on_ranks(1, evaluated)
        found = on_ranks(3, evaluated)
        equal = all(rank["metrics"] == alone["metrics"] for rank in found)
        note = f"{_EXAMPLES} examples in batches of {_BATCH} on 3 ranks, 3 evaluations"
        yield Bar(same, float(equal), "", "= 1", equal, 3, note)
        shares = [share for rank in found for share in rank["overlapped"]]
        note = f"share of the metric's {max(rank['seconds'] for rank in found):.1f} s not awaited"
        yield at_least(overlap, 100 * min(shares), 90.0, "%", n=len(shares), detail=note)


def tiled(rows: int, columns: int) -> dict[str, Any]:
    """Return the largest relative error of a step on tiles, and bytes of halos per formula."""
    import torch
    import torch.distributed as dist
    from torch import nn

    from slipstream.ranks.group import process_group
    from slipstream.techniques.spatial import Window, partition

    def model(kernel: int, stride: int, dilation: int) -> nn.Sequential:
        torch.manual_seed(0)
        padding = dilation * (kernel - 1) // 2
        return nn.Sequential(
            nn.Conv2d(3, 8, kernel, stride, padding, dilation), nn.BatchNorm2d(8), nn.ReLU(),
            nn.MaxPool2d(3, 2, 1), nn.Conv2d(8, 8, 3, padding=1), nn.AvgPool2d(3, 1, 1),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
        )  # fmt: skip

    worst, ratios = 0.0, []
    for settings in _KERNELS:
        torch.manual_seed(1)
        images = torch.randn(4, 3, *_SIZE)
        # One process in float32 rounds as much itself.
        whole, parts = model(*settings).double(), partition(model(*settings), images, rows, columns)
        outputs = whole(images.double()), parts(images)
        for output in outputs:
            (output * torch.linspace(-1, 1, 4)).sum().backward()
        pairs = [tuple(output.detach() for output in outputs)]
        for reference, ours in zip(whole.parameters(), parts.parameters(), strict=True):
            assert ours.grad is not None
            assert reference.grad is not None
            dist.all_reduce(ours.grad)
            pairs.append((reference.grad, ours.grad / (rows * columns)))
        largest = max(float(gradient.abs().max()) for gradient, _ in pairs[1:])
        worst = max(
            worst,
            float((pairs[0][0] - pairs[0][1]).abs().max() / pairs[0][0].abs().max()),
            *(float((reference - ours).abs().max()) / largest for reference, ours in pairs[1:]),
        )
        layer: Any = parts.get_submodule("0")
        wire = process_group(None).wire
        window = Window(settings[0], settings[1], settings[2] * (settings[0] - 1) // 2, settings[2])
        before = wire.payload_bytes
        height, width = layer.tiles.own(_SIZE)
        layer.on_tile(images[..., height, width], _SIZE)
        row, column = layer.tiles.place
        low, high = window.needs(_SIZE[0], rows)[row]
        formula = 4 * 3 * 4 * (
            window.halo(_SIZE[0], rows, row) * (width.stop - width.start)
            + window.halo(_SIZE[1], columns, column) * (high - low)
        )  # fmt: skip
        sent = wire.payload_bytes - before
        ratios.append(sent / formula if formula else 1.0 + sent)
    return {"error": worst, "bytes": ratios}


def resampled(scores: Any) -> list[float]:
    """Return a 90 % interval of the mean score, by resampling: a metric that takes its time."""
    rng = np.random.default_rng(0)
    means = [float(rng.choice(scores, scores.size).mean()) for _ in range(_RESAMPLES)]
    return [float(quantile) for quantile in np.quantile(means, (0.05, 0.95))]


def evaluated() -> dict[str, Any]:
    """Return metrics, and for those of this rank the share that training hid."""
    import torch
    from torch import nn

    from slipstream.techniques.spatial import Evaluation

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))
    x, targets = torch.randn(_EXAMPLES, 32), torch.randint(0, 4, (_EXAMPLES,))

    def score(model: Any, indices: Sequence[int]) -> Any:
        chosen = list(indices)
        losses = nn.functional.cross_entropy(model(x[chosen]), targets[chosen], reduction="none")
        return losses.detach()

    metrics: list[list[float]] = []
    shares, seconds = [], [0.0]
    with Evaluation(score, _EXAMPLES, _BATCH, resampled) as evaluation:
        for _ in range(3):
            pending = evaluation.start(model)
            # Steps that mostly wait, as those of a model on a device.
            time.sleep(_TRAINING_S)
            metrics.append(pending.result())
            if pending.seconds:
                shares.append(1.0 - pending.waited_s / pending.seconds)
                seconds.append(pending.seconds)
    return {"metrics": metrics, "overlapped": shares, "seconds": max(seconds)}
