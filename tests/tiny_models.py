"""Models of common kinds, small enough to be captured in a second."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from slipstream.capture import CaptureSettings, capture
from slipstream.graph import Graph, StepPhase
from slipstream.verbs.profiling import profile
from slipstream.workload import BuiltWorkload, Workload

_VOCABULARY, _WIDTH, _LENGTH, _BATCH = 53, 24, 10, 3


class Block(nn.Module):
    """A transformer block: one fused or three separate projections, norm before or after."""

    def __init__(self, fused: bool, norm_first: bool) -> None:
        super().__init__()
        self.heads, self.fused, self.norm_first = 2, fused, norm_first
        if fused:
            self.qkv = nn.Linear(_WIDTH, 3 * _WIDTH)
        else:
            self.query, self.key, self.value = (nn.Linear(_WIDTH, _WIDTH) for _ in range(3))
        self.out = nn.Linear(_WIDTH, _WIDTH)
        self.up, self.down = nn.Linear(_WIDTH, 2 * _WIDTH), nn.Linear(2 * _WIDTH, _WIDTH)
        self.first_norm, self.second_norm = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        if self.fused:
            parts = self.qkv(x).chunk(3, dim=-1)
        else:
            parts = (self.query(x), self.key(x), self.value(x))
        split = [part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts]
        mixed = functional.scaled_dot_product_attention(*split, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.norm_first:
            x = x + self.attention(self.first_norm(x))
            return x + self.down(functional.gelu(self.up(self.second_norm(x))))
        x = self.first_norm(x + self.attention(x))
        return self.second_norm(x + self.down(functional.gelu(self.up(x))))


class Transformer(nn.Module):
    def __init__(self, fused: bool = True, norm_first: bool = True, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(_VOCABULARY, _WIDTH)
        self.place = nn.Parameter(torch.zeros(_LENGTH, _WIDTH))
        self.blocks = nn.ModuleList(Block(fused, norm_first) for _ in range(layers))
        self.head = nn.Linear(_WIDTH, _VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.place
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class ConvNet(nn.Module):
    """Convolutions, batch norm, a residual connection, an in-place activation."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8))
        self.inner = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.SiLU())
        self.act = nn.ReLU(inplace=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.act(self.stem(x))
        return self.head((x + self.inner(x)).mean((2, 3)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(_VOCABULARY, 16)
        self.layers = nn.LSTM(16, 16, 2, batch_first=True)
        self.head = nn.Linear(16, _VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embed(tokens))[0])


class Dropped(nn.Module):
    """Attention written out, with dropout, and a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(_VOCABULARY, _WIDTH)
        self.query, self.value = nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(_WIDTH, _VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        score = (self.query(x) @ x.transpose(1, 2)).softmax(-1)
        return self.head(x + self.drop(score @ self.value(x)))


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4)
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "transformer": Transformer,
    "transformer, separate projections": lambda: Transformer(fused=False),
    "transformer, norm after": lambda: Transformer(fused=False, norm_first=False),
    "conv": ConvNet,
    "embedding": lambda: nn.Sequential(nn.Embedding(_VOCABULARY, 8), nn.Linear(8, _VOCABULARY)),
    "lstm": Recurrent,
    "dropout": Dropped,
}


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output.flatten(0, -2), target.flatten())


def parts(name: str) -> tuple[Any, ...]:
    """Return (model, batch, loss, optimizer) by name; (model, input) for "NAME inference"."""
    kind = name.removesuffix(" inference")
    torch.manual_seed(0)
    model = MODELS[kind]()
    if kind == "mlp":
        inputs, targets = torch.randn(6, 12), torch.randint(0, 4, (6,))
    elif kind == "conv":
        inputs, targets = torch.randn(3, 3, 8, 8), torch.randint(0, 4, (3,))
    else:
        inputs, targets = torch.randint(0, _VOCABULARY, (2, _BATCH, _LENGTH))
    if kind != name:
        return model, inputs
    return model, (inputs, targets), loss, torch.optim.Adam(model.parameters(), 1e-3)


def workload(name: str) -> Workload:
    return Workload.of(*parts(name))


@cache
def captured(name: str) -> Graph:
    """Return the graph of one of the models; captured once per test run."""
    return profile(workload(name), warmup=1, steps=3, threads=1)


def record(built: BuiltWorkload, *needs: str, steps: int = 3) -> Graph:
    """Return one recorded step of a built workload, with the statistics in `needs`.

    Without the page faults it has here and today, as the process goes on.
    """
    settings = CaptureSettings(warmup=1, steps=steps, threads=1, needs=needs, own_process=False)
    running = capture(settings)(built)
    value = None
    while True:
        try:
            running.send(value)
        except StopIteration as end:
            graph: Graph = end.value
            return graph
        value = built.step()


def in_phase(graph: Graph, phase: StepPhase) -> list[int]:
    return [t for t in range(len(graph)) if graph.tasks.phase[t] == phase]


def name_of(graph: Graph, task: int) -> str:
    return graph.string(int(graph.tasks.name[task]))


def module_of(graph: Graph, task: int) -> str:
    return graph.string(int(graph.tasks.module[task]))
