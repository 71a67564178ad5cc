"""Compare the results of training with and without compression: simulated workers, equal steps.

The tasks are a small convolutional network on scikit-learn's digits, and a language model of two
recurrent layers on the bytes of Python's help texts. Each compressor, and none, trains at the pace
(learning rate and momentum) that is best for it on validation data, with seeds that are not judged.
Its result on other data is given in standard deviations of training without compression over other
seeds. All rates decay linearly to zero, as in practically every training: at a constant rate the
result would depend on how far each training has come. Residuals are in units of gradients, so that
what arrives late is scaled by the rate at its arrival. The mean gradients of the language model are
clipped at a norm of 0.25, as in PyTorch's example of such a model (``word_language_model``): losses
of recurrent layers have cliffs, and without clipping the comparison would be of the rates that they
tolerate, not of compression. Each compressor needs a separate pace: the rate that error feedback
tolerates shrinks with the share that arrives immediately (Stich and Karimireddy, JMLR 2020). The
published experiments with signs use no momentum, at a rate found for them (Karimireddy et al., ICML
2019).
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR

from slipstream.technique import parse
from slipstream.techniques.distributed.compression.compressor import Compressor
from slipstream.techniques.distributed.compression.simulated import SimulatedWorkers
from slipstream_bench.rows import Bar, BenchOptions

# Dense steps first if the method has them: a tenth, as PowerSGD's authors recommend.
_METHODS = (
    "powersgd:4,start={tenth}",
    "acp:4,start={tenth}",
    "topk:0.01",
    "sign",
    "block_int:4",
    "randomk:0.1",
    "cast:bf16",
)
_WORKERS = 2
_SEEDS = 5
_MOST = 2.0
# Seeds of the runs that find a pace, which are not judged.
_FIRST_TUNED = 100


@dataclass(frozen=True)
class Pace:
    """Learning rate and momentum of SGD."""

    lr: float
    momentum: float = 0.0

    def __str__(self) -> str:
        return f"{self.lr:g}, momentum {self.momentum:g}" if self.momentum else f"{self.lr:g}"


@dataclass(frozen=True)
class Run:
    """A training run: its pace, and the seed of weights and batches."""

    pace: Pace
    seed: int


Examples = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Task:
    """A training task.

    Attributes:
        make: builds the model, from torch's seed.
        batch: returns x and y of a worker's step, from a generator.
        validation: x and y by which a pace is chosen.
        held: x and y of the reported result.
        paces: candidates.
        tuned_on: number of seeds that choose.
        steps: number of steps, enough for dense training to be near its end: what error feedback
            retains arrives later, so that its cost shrinks with the steps.
        score: score of outputs and y; higher is better.
        clip: maximum norm of a mean gradient, as it arrives; 0 for no limit.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Examples]
    validation: Examples
    held: Examples
    paces: tuple[Pace, ...]
    tuned_on: int
    steps: int
    score: Callable[[torch.Tensor, torch.Tensor], float]
    unit: str
    clip: float = 0.0

    def reached(self, how: str, runs: Sequence[Run], steps: int, examples: Examples) -> list[float]:
        """Return the score of each run with gradients compressed by `how`; ``none``: uncompressed.

        Runs are independent; their steps are computed together, which takes half as long.
        """
        teams = [_Team(self, how, run, steps) for run in runs]
        gradients = vmap(grad(functools.partial(_loss, self.make())))
        for _ in range(steps):
            batches = [self.batch(team.drawn) for team in teams for _ in range(_WORKERS)]
            x, y = (torch.stack(parts) for parts in zip(*batches, strict=True))
            worker_weights = [team.weights() for team in teams for _ in range(_WORKERS)]
            weights = {
                name: torch.stack([by_name[name] for by_name in worker_weights])
                for name in worker_weights[0]
            }
            found = gradients(weights, x, y)
            for number, team in enumerate(teams):
                turns = range(number * _WORKERS, (number + 1) * _WORKERS)
                team.step([{name: parts[turn] for name, parts in found.items()} for turn in turns])
        with torch.no_grad():
            outs = [team.model(examples[0]).flatten(0, -2) for team in teams]
        scores = [self.score(out, examples[1].flatten()) for out in outs]
        # A diverged run has the worst score.
        return [-math.inf if math.isnan(score) else score for score in scores]

    def tuned(self, how: str, steps: int) -> dict[Pace, float]:
        """Return each pace's mean score on the validation data, the best first."""
        seeds = range(_FIRST_TUNED, _FIRST_TUNED + self.tuned_on)
        runs = [Run(pace, seed) for pace in self.paces for seed in seeds]
        found = self.reached(how, runs, steps, self.validation)
        scores = {
            pace: statistics.mean(
                score for run, score in zip(runs, found, strict=True) if run.pace == pace
            )
            for pace in self.paces
        }
        return dict(sorted(scores.items(), key=lambda item: item[1], reverse=True))


class _Team:
    """A model in training, and its workers."""

    def __init__(self, task: Task, how: str, run: Run, steps: int) -> None:
        torch.manual_seed(run.seed)
        self.model = task.make()
        self.drawn = torch.Generator().manual_seed(run.seed)
        settings = None if how == "none" else parse(how)[0]
        assert settings is None or isinstance(settings, Compressor)
        self._workers = SimulatedWorkers(self.model, settings, _WORKERS)
        self._optimizer = torch.optim.SGD(
            self.model.parameters(), lr=run.pace.lr, momentum=run.pace.momentum
        )
        self._falling = LambdaLR(self._optimizer, lambda step: 1.0 - step / steps)
        self._clip = task.clip

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the weights by name, detached."""
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    def step(self, turns: Sequence[dict[str, torch.Tensor]]) -> None:
        """Make one step, from every worker's gradients."""
        self._optimizer.zero_grad()
        for gradients in turns:
            for name, parameter in self.model.named_parameters():
                parameter.grad = gradients[name]
            self._workers.collect()
        self._workers.reduce()
        if self._clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), self._clip)
        self._optimizer.step()
        self._falling.step()


def _loss(
    model: nn.Module, weights: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor
) -> torch.Tensor:
    return cross_entropy(functional_call(model, weights, (x,)).flatten(0, -2), y.flatten())


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Yield a row per task. Quick: two seeds, fewer steps, and no verdict."""
    for name, task in (("digits, conv net", _digits), ("help texts, 2-layer LM", _texts)):
        bar = f"trained as far as without, {name}"
        if options.wants(bar):
            yield judged(bar, task(), options)


def judged(bar: str, task: Task, options: BenchOptions) -> Bar:
    """Return a row of the worst compressor's distance from none, each at its best pace."""
    steps = task.steps if options.full else task.steps // 10
    seeds = range(_SEEDS if options.full else 2)
    reached: dict[str, list[float]] = {}
    notes = []
    for how in ("none", *(method.format(tenth=steps // 10) for method in _METHODS)):
        options.progress(f"{bar}: {how}")
        tuned = task.tuned(how, steps)
        pace = next(iter(tuned))
        if how == "none":
            usual = pace
        reached[how] = task.reached(how, [Run(pace, seed) for seed in seeds], steps, task.held)
        notes.append(f"{how} {statistics.mean(reached[how]):.3f} at {pace}")
        if pace != usual:
            notes[-1] += f" (validation {tuned[pace]:.3f}, at none's pace {tuned[usual]:.3f})"
    dense = reached.pop("none")
    middle, spread = statistics.mean(dense), statistics.stdev(dense)
    behind = {how: (middle - statistics.mean(scores)) / spread for how, scores in reached.items()}
    worst = max(behind, key=lambda how: behind[how])
    clipped = f"; gradients clipped at a norm of {task.clip:g}" if task.clip else ""
    within = [how for how, distance in behind.items() if distance <= _MOST]
    return Bar(
        bar, behind[worst], "standard deviations behind", f"<= {_MOST:g}",
        behind[worst] <= _MOST if options.full else None, len(seeds),
        f"{task.unit}: {'; '.join(notes)}; deviation of none {spread:.3f}; {len(within)} of "
        f"{len(behind)} within, the worst is {worst}; {_WORKERS} workers, {steps} steps, each at "
        f"the best of {len(task.paces)} paces, which fall linearly to 0{clipped}",
    )  # fmt: skip


class _Images(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10),
        )  # fmt: skip


class _Bytes(nn.Module):
    """Predict the next byte for every byte: [batch, time] to [batch, time, 128]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, 48)
        self.layers = nn.RNN(48, 64, num_layers=2, batch_first=True)
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
    validation, held = slice(-800, -500), slice(-500, None)
    train = len(images) - 800

    def batch(drawn: torch.Generator) -> Examples:
        chosen = torch.randint(0, train, (16,), generator=drawn)
        return images[chosen], labels[chosen]

    def right(out: torch.Tensor, y: torch.Tensor) -> float:
        return 100.0 * float((out.argmax(1) == y).float().mean())

    paces = (
        *(Pace(lr) for lr in (0.05, 0.1, 0.2, 0.4)),
        *(Pace(lr, 0.9) for lr in (0.005, 0.01, 0.02, 0.04)),
    )
    chosen, judged_on = ((images[part], labels[part]) for part in (validation, held))
    return Task(_Images, batch, chosen, judged_on, paces, 3, 900, right, "% right")


@functools.cache
def _texts() -> Task:
    from slipstream import data

    text = data.get("python_topics")
    train, held = (
        torch.from_numpy(np.minimum(text.as_bytes(split), 127)).long()
        for split in ("train", "validation")
    )
    time = 16

    def cut(numbers: torch.Tensor, at: torch.Tensor) -> Examples:
        rows = torch.stack([numbers[a : a + time + 1] for a in at.tolist()])
        return rows[:, :-1], rows[:, 1:]

    def batch(drawn: torch.Generator) -> Examples:
        return cut(train, torch.randint(0, len(train) - time - 1, (16,), generator=drawn))

    def bits(out: torch.Tensor, y: torch.Tensor) -> float:
        return -float(cross_entropy(out, y)) / math.log(2.0)

    half = len(held) // 2
    chosen, judged_on = (
        cut(part, torch.arange(0, min(len(part), 12_000) - time - 1, time))
        for part in (held[:half], held[half:])
    )
    paces = (
        *(Pace(lr) for lr in (2.0, 4.0, 5.6, 8.0, 11.0)),
        *(Pace(lr, 0.9) for lr in (0.25, 0.5, 1.0)),
    )
    unit = "negative bits per byte"
    return Task(_Bytes, batch, chosen, judged_on, paces, 1, 4500, bits, unit, clip=0.25)
