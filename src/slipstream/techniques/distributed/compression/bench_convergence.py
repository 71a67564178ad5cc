"""Does training end where it would without compression? Simulated workers, equal steps, seeds.

A small convolutional network on scikit-learn's digits, and a language model of two recurrent layers
on the bytes of Python's help texts. What a way to compress reaches is told in standard deviations
of what training without compression reaches from other seeds.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from slipstream.bars import Bar, BenchOptions
from slipstream.technique import parse
from slipstream.techniques.distributed.compression.compressor import Compressor
from slipstream.techniques.distributed.compression.simulated import SimulatedWorkers

# Dense steps first where the method takes them: a tenth, as PowerSGD's authors advise.
_METHODS = ("powersgd:4,start=30", "topk:0.01", "sign", "block_int:4", "randomk:0.1", "cast:bf16")
_STEPS = 300
_WORKERS = 2
_SEEDS = 5
_MOST = 2.0


@dataclass(frozen=True)
class Task:
    """What is trained.

    Attributes:
        make: the model, from torch's seed.
        batch: x and y of a worker's step, from a generator.
        held: x and y that count.
        lr: of SGD with momentum 0.9.
        score: of outputs and y; more is better.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], tuple[torch.Tensor, torch.Tensor]]
    held: tuple[torch.Tensor, torch.Tensor]
    lr: float
    score: Callable[[torch.Tensor, torch.Tensor], float]
    unit: str

    def reached(self, how: str, seed: int, steps: int) -> float:
        """The score after training with gradients that are compressed so; ``none``: not."""
        torch.manual_seed(seed)
        model = self.make()
        settings = None if how == "none" else parse(how)[0]
        assert settings is None or isinstance(settings, Compressor)
        team = SimulatedWorkers(model, settings, _WORKERS)
        optimizer = torch.optim.SGD(model.parameters(), lr=self.lr, momentum=0.9)
        drawn = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            optimizer.zero_grad()
            for _ in range(_WORKERS):
                x, y = self.batch(drawn)
                loss = cross_entropy(model(x).flatten(0, -2), y.flatten())
                torch.autograd.backward(loss)
                team.collect()
            team.reduce()
            optimizer.step()
        with torch.no_grad():
            return self.score(model(self.held[0]).flatten(0, -2), self.held[1].flatten())


def bars(options: BenchOptions) -> Iterator[Bar]:
    """A row a task. Quick: two seeds, fewer steps, and no verdict."""
    for name, task in (("digits, conv net", _digits), ("help texts, 2-layer LM", _texts)):
        bar = f"trained as far as without, {name}"
        if options.wants(bar):
            options.progress(bar)
            yield _row(bar, task(), options.full)


def _row(bar: str, task: Task, full: bool) -> Bar:
    seeds, steps = range(_SEEDS if full else 2), _STEPS if full else _STEPS // 10
    dense = [task.reached("none", seed, steps) for seed in seeds]
    middle, spread = statistics.mean(dense), statistics.stdev(dense)
    said, behind = [], []
    for how in _METHODS:
        found = statistics.mean(task.reached(how, seed, steps) for seed in seeds)
        behind.append((middle - found) / spread)
        said.append(f"{how} {found:.3f}")
    worst = max(behind)
    return Bar(
        bar, worst, "standard deviations behind", f"<= {_MOST:g}", worst <= _MOST if full else None,
        len(seeds),
        f"{task.unit}: none {middle:.3f} (deviation {spread:.3f}), {', '.join(said)}; "
        f"{_WORKERS} workers, {steps} steps",
    )  # fmt: skip


class _Pictures(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10),
        )  # fmt: skip


class _Bytes(nn.Module):
    """The next byte, of every byte: [batch, time] to [batch, time, 128]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, 48)
        self.layers = nn.GRU(48, 64, num_layers=2, batch_first=True)
        self.head = nn.Linear(64, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.layers(self.embedding(x))[0])
        return found


@functools.cache
def _digits() -> Task:
    from slipstream import data

    found = data.get("digits")
    order = np.random.default_rng(0).permutation(len(found.images))
    images = torch.from_numpy(found.images[order]).float().view(-1, 1, 8, 8) / 16.0
    labels = torch.from_numpy(found.labels[order]).long()
    held = 500

    def batch(drawn: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = torch.randint(0, len(images) - held, (16,), generator=drawn)
        return images[chosen], labels[chosen]

    def right(out: torch.Tensor, y: torch.Tensor) -> float:
        return 100.0 * float((out.argmax(1) == y).float().mean())

    return Task(_Pictures, batch, (images[-held:], labels[-held:]), 0.02, right, "% right")


@functools.cache
def _texts() -> Task:
    from slipstream import data

    text = data.get("python_topics")
    train, held = (
        torch.from_numpy(np.minimum(text.as_bytes(split), 127)).long()
        for split in ("train", "validation")
    )
    time = 32

    def cut(numbers: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.stack([numbers[a : a + time + 1] for a in at.tolist()])
        return rows[:, :-1], rows[:, 1:]

    def batch(drawn: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        return cut(train, torch.randint(0, len(train) - time - 1, (16,), generator=drawn))

    def bits(out: torch.Tensor, y: torch.Tensor) -> float:
        return -float(cross_entropy(out, y)) / math.log(2.0)

    held_at = torch.arange(0, min(len(held), 20_000) - time - 1, time)
    return Task(_Bytes, batch, cut(held, held_at), 0.2, bits, "bits a byte, less than 0")
