"""Train the learned fitness of guided search on random programs; writes its file.

python -m slipstream_bench.systems.synthesis.training src/slipstream/synthesis/fitness.npz
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.synthesis.examples import Examples
from slipstream.synthesis.fitness import Goal, States, features
from slipstream.synthesis.guided import advanced, start
from slipstream.synthesis.kernels import Task, run
from slipstream_bench.systems.synthesis.tasks import random_task

Group = tuple[States, NDArray[np.uint8]]
"""States behind programs of one length; the first is a prefix of the target, the second item."""
_PROGRAMS, _GROUP, _GROUPS = 64, 16, 3


def groups(generator: np.random.Generator, *, is_list: bool) -> Iterator[tuple[Goal, Group]]:
    """Yield goals with groups of states, the first of each on the way to the goal."""
    length = int(generator.integers(4, 11))
    task = random_task(length, generator, is_list=is_list)
    target = np.array(task.truth.functions, np.uint8)
    examples = Examples.of(task.pairs)
    native, goal = Task(examples.inputs, examples.outputs), Goal(examples.outputs)
    programs = generator.integers(41, size=(_PROGRAMS, length), dtype=np.uint8)
    same = np.arange(length) < generator.integers(length, size=(_PROGRAMS, 1))
    programs = np.where(same | (generator.random(same.shape) < 0.15), target, programs)
    programs[0] = target
    states = start(examples).rows(np.zeros(_PROGRAMS, np.intp))
    used = generator.permutation(np.arange(1, length))[:_GROUPS]
    for step in range(1, length):
        results = run(native, programs[:, :step])
        states = advanced(states, programs[:, :step], results, np.arange(len(programs)))
        states, programs = states.rows(results.valid), programs[results.valid]
        others = np.flatnonzero((programs[:, :step] != target[:step]).any(1))
        if step in used and len(others) >= 4:
            chosen = generator.choice(others, _GROUP - 1)
            yield goal, (states.rows(np.concatenate([[0], chosen])), target)


def train(inputs: NDArray[np.float32], epochs: int = 12) -> list[NDArray[np.float32]]:
    """Fit a network to pick the first state of groups [groups, states, features]."""
    torch.manual_seed(0)
    data = torch.from_numpy(inputs)
    mean, scale = data.mean((0, 1)), data.std((0, 1)) + 1e-2
    data.sub_(mean).div_(scale)
    sizes = (data.shape[-1], 64, 32, 1)
    layers = [torch.nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
    net = torch.nn.Sequential(
        layers[0], torch.nn.ReLU(), torch.nn.Dropout(0.1), layers[1], torch.nn.ReLU(), layers[2]
    )
    steps = epochs * (len(data) // 64)
    optimizer = torch.optim.AdamW(net.parameters(), 4e-3, weight_decay=0.02)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps)
    for _ in range(epochs):
        for rows in torch.randperm(len(data))[: len(data) // 64 * 64].split(64):
            scores = net(data[rows])[..., 0]
            first = torch.zeros(64, dtype=torch.long)
            loss = torch.nn.functional.cross_entropy(scores, first)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    with torch.no_grad():
        layers[0].weight /= scale
        layers[0].bias.sub_(layers[0].weight @ mean)
    return [value.detach().numpy() for layer in layers for value in (layer.weight.T, layer.bias)]


def main(path: Path, tasks: int = 4000) -> None:
    """Train on random tasks, half of them with lists as outputs."""
    arrays = {}
    for is_list in (True, False):
        generator = np.random.default_rng(1000 + is_list)
        rows = [features(states, goal) for _ in range(tasks)
                for goal, (states, _) in groups(generator, is_list=is_list)]  # fmt: skip
        names = [f"{layer}.{name}" for layer in range(3) for name in ("weight", "bias")]
        for name, value in zip(names, train(np.stack(rows)), strict=True):
            arrays[f"{'list' if is_list else 'number'}.{name}"] = value.astype(np.float16)
    np.savez_compressed(path, **arrays)  # type: ignore[arg-type]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
