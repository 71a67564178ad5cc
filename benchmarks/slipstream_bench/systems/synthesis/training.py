"""Train the learned fitness of guided search on random programs; the fitness to compare it with.

python -m slipstream_bench.systems.synthesis.training src/slipstream/synthesis/fitness.npz
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.synthesis.examples import Examples
from slipstream.synthesis.fitness import Goal, States, distances, features
from slipstream.synthesis.guided import advanced, start
from slipstream.synthesis.kernels import Task, run
from slipstream_bench.systems.synthesis.tasks import random_task

Group = tuple[States, NDArray[np.uint8]]
"""States behind programs of one length; the first is a prefix of the target, the second item."""
_PROGRAMS, _GROUP, _GROUPS = 64, 16, 3
_SHARPNESS = 1.5  # of the preference for a program that shares one more function with the target


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


def edit_distance(states: States, goal: Goal) -> NDArray[np.float32]:
    """Score by edit distance to the outputs; of numbers, by the logarithm of the difference."""
    if goal.is_list:
        found = goal.positions(np.ascontiguousarray(states.last.transpose(2, 1, 0)))
        far = distances(found, states.last_counts.T, goal).astype(np.float32)
    else:
        far = np.log1p(np.abs(np.float32(states.numbers) - goal.values[:, 0]).T)
    return np.asarray(-(far + 2 * (far > 0)).sum(0), np.float32)


def common(programs: NDArray[np.uint8], target: NDArray[np.uint8]) -> list[int]:
    """Return lengths of the longest subsequences that programs have in common with the target."""
    lengths = []
    for program in programs.tolist():
        row = [0] * (len(target) + 1)
        for function in program:
            before = 0
            for at, other in enumerate(target.tolist(), 1):
                length = before + 1 if function == other else max(row[at], row[at - 1])
                before, row[at] = row[at], length
        lengths.append(row[-1])
    return lengths


def train(
    inputs: NDArray[np.float32], shared: NDArray[np.int64], epochs: int = 12
) -> list[NDArray[np.float32]]:
    """Fit a network to states in groups, of which the first is on the way to the goal.

    Half of the target is the first state, the other half prefers programs that share more
    functions with the target.

    Args:
        inputs: [groups, states, features].
        shared: numbers of functions that are shared with the target, [groups, states].
    """
    torch.manual_seed(0)
    targets = torch.softmax(_SHARPNESS * torch.from_numpy(shared).float(), 1) / 2
    targets[:, 0] += 0.5
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
            loss = torch.nn.functional.cross_entropy(net(data[rows])[..., 0], targets[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    with torch.no_grad():
        layers[0].weight /= scale
        layers[0].bias.sub_(layers[0].weight @ mean)
    return [value.detach().numpy() for layer in layers for value in (layer.weight.T, layer.bias)]


def trained(*, is_list: bool, tasks: int = 2000) -> dict[str, NDArray[np.float16]]:
    """Train on random tasks with lists or with numbers as outputs."""
    generator = np.random.default_rng(1000 + is_list)
    pairs = [(features(states, goal), common(states.programs, target)) for _ in range(tasks)
             for goal, (states, target) in groups(generator, is_list=is_list)]  # fmt: skip
    rows, shared = (np.array(values) for values in zip(*pairs, strict=True))
    names = [f"{layer}.{name}" for layer in range(3) for name in ("weight", "bias")]
    kind = "list" if is_list else "number"
    return {
        f"{kind}.{name}": value.astype(np.float16)
        for name, value in zip(names, train(rows, shared), strict=True)
    }


if __name__ == "__main__":
    networks = trained(is_list=True) | trained(is_list=False)
    np.savez_compressed(sys.argv[1], **networks)  # type: ignore[arg-type]
