"""A classifier of handwritten digits, made smaller by a search, trained again and proved.

slipstream nas space examples/architecture_search.py:make_inference
"""

from __future__ import annotations

import copy
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import slipstream as ss
from slipstream.search import Budget

digits = ss.data.get("digits")
images = torch.from_numpy(digits.images).float()[:, None] / 255
classes = torch.from_numpy(digits.labels)
TRAIN, VALID, TEST = slice(0, 1000), slice(1000, 1400), slice(1400, None)


def network() -> nn.Module:
    """Return a small convolutional network for images [n, 1, 8, 8]."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 64, 3, 2, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


def make_inference() -> tuple[nn.Module, Tensor]:
    """Return the network in eval mode and 64 images."""
    return network().eval(), images[VALID][:64]


def batches() -> list[tuple[Tensor, Tensor]]:
    """Return the batches of an epoch in random order."""
    return [(images[TRAIN][n], classes[TRAIN][n]) for n in torch.randperm(1000).split(50)]


def train(model: nn.Module, epochs: int) -> None:
    """Train a network in place, from its present weights."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model.train()
    for _ in range(epochs):
        for x, y in batches():
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
    model.eval()


def is_right(model: nn.Module, part: slice) -> Tensor:
    """Return whether the class of each image of one part is predicted, bool [images]."""
    with torch.no_grad():
        right: Tensor = model(images[part]).argmax(1) == classes[part]
    return right


def make_smaller(
    whole: nn.Module, limits: dict[str, str], *, epochs: int = 8, trials: int = 40
) -> nn.Module:
    """Return the most accurate part of a network within limits, trained again."""

    def accuracy(module: nn.Module) -> float:
        return float(is_right(module, VALID).float().mean())

    net = ss.nas.Supernet(ss.nas.derive_space(whole, images[VALID][:64]))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    ss.nas.fit(net, batches, cross_entropy, optimizer, epochs=epochs // 2)
    study = ss.nas.search(net, accuracy, constraints=limits, calibration=images[TRAIN][:256])
    best = study.run(budget=Budget(trials=trials)).best()
    assert best is not None, "no trial was scored"
    small = net.export(best.candidate)
    print("searched:", dict(best.candidate.values), ss.nas.estimate(net, best.candidate))
    train(small, epochs)
    return small


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    whole = network()
    train(whole, epochs=8)
    small = make_smaller(copy.deepcopy(whole), {"latency": "<= 0.5x"})
    train(whole, epochs=8)  # as many as the smaller one had
    x, models = images[TEST][:64], {"whole": whole, "small": small}
    with torch.inference_mode():
        proof = ss.measure.compare(
            {name: partial(model, x) for name, model in models.items()},
            budget="10s", changes_numerics=["small"],
            quality={name: is_right(model, TEST).numpy() for name, model in models.items()},
        )  # fmt: skip
    print(proof)
