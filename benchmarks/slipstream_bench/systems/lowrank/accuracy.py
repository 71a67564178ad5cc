"""Accuracy of dense networks, hybrids after a warm-up, and factors from the first step."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from slipstream.techniques.lowrank import LowRankLinear, Start, factorize

Kind = Literal["dense", "hybrid", "scratch", "spectral"]
EPOCHS, WARM = 6, 1
_TRAINED, _TESTED = 20_000, 10_000


@cache
def _data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from slipstream.data import get

    images = get("fashion_mnist")
    x = torch.from_numpy(images.images).float().unsqueeze(1) / 255
    y = torch.from_numpy(images.labels)
    test = slice(60_000 - _TESTED, 60_000)
    return x[:_TRAINED], y[:_TRAINED], x[test], y[test]


def mlp() -> nn.Sequential:
    """Return an MLP of three hidden layers of 400."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 400), nn.ReLU(), nn.Linear(400, 400), nn.ReLU(),
        nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 10),
    )  # fmt: skip


def cnn() -> nn.Sequential:
    """Return four convolutions of 32 to 64 channels."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 64, 3, 2, 1), nn.ReLU(),
        nn.Conv2d(64, 64, 3, 1, 1), nn.ReLU(), nn.Conv2d(64, 64, 3, 1, 1), nn.ReLU(),
        nn.Flatten(), nn.Linear(64 * 49, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


MODELS: dict[str, Callable[[], nn.Sequential]] = {"MLP": mlp, "CNN": cnn}


def percent(model: str, kind: Kind, ratio: float, seed: int, epochs: int = EPOCHS) -> float:
    """Return test accuracy in percent after `epochs`, with the same order of data for every kind.

    Kinds: ``dense``; ``hybrid``: factors after a warm-up, the first and last layer dense;
        ``scratch``: randomly initialised factors from the first step, in all layers but the last;
        ``spectral``: factors of the initial dense weights from the first step, as `Start.keep_norm`
        starts them.
    """
    x, y, test_x, test_y = _data()
    torch.manual_seed(seed)
    net: Any = MODELS[model]()
    if kind == "scratch":
        _drawn(net, ratio)
    elif kind == "spectral":
        factorize(net, ratio, keep="none", except_=_last(net), start=Start(keep_norm=True))
    optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9, weight_decay=1e-4)
    order = torch.Generator().manual_seed(seed)
    for epoch in range(epochs):
        if kind == "hybrid" and epoch == WARM:
            factorize(net, ratio, optimizer=optimizer)
        for group in optimizer.param_groups:
            group["lr"] = 0.05 if epoch < epochs - 2 else 0.005
        for chosen in torch.randperm(len(x), generator=order).split(128)[:-1]:
            optimizer.zero_grad()
            cross_entropy(net(x[chosen]), y[chosen]).backward()
            optimizer.step()
    with torch.no_grad():
        batches = zip(test_x.split(1000), test_y.split(1000), strict=True)
        right = [net(a).argmax(1).eq(b).sum() for a, b in batches]
    return 100 * float(sum(map(float, right))) / len(test_y)


def _last(net: nn.Sequential) -> str:
    return str(len(net) - 1)


def _drawn(net: Any, ratio: float) -> None:
    """Replace layers by factors with torch's own initialisation, each drawn independently."""
    for at, layer in list(enumerate(net))[:-1]:
        if isinstance(layer, nn.Linear):
            rank = max(1, int(ratio * min(layer.weight.shape)))
            factors = LowRankLinear(layer.in_features, layer.out_features, rank)
            for half in factors:
                half.reset_parameters()  # type: ignore[operator]
            net[at] = factors
        elif isinstance(layer, nn.Conv2d):
            rank = max(1, int(ratio * min(layer.weight.flatten(1).shape)))
            net[at] = nn.Sequential(
                nn.Conv2d(layer.in_channels, rank, 3, layer.stride, 1, bias=False),  # type: ignore[arg-type]
                nn.Conv2d(rank, layer.out_channels, 1),
            )
