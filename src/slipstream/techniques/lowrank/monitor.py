"""Ranks of layers, estimated from their weights' spectra during dense training.

The *stable rank* ``sum of squared singular values / the largest squared`` is a smooth approximation
of the rank. It is scaled so that the initial weights have the full rank. Once the ranks of all
layers hardly change, the dense phase can end.

Source: Wang, Agarwal, U-chupala, Tanaka, Xing and Papailiopoulos, "Cuttlefish: Low-Rank Model
Training without All the Tuning", MLSys 2023.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.techniques.lowrank.factors import stable_rank
from slipstream.techniques.lowrank.layers import candidates, why_dense

_SMOOTHING = 0.5


class RankMonitor:
    """Ranks of a model's layers during training, and whether they have converged.

    Args:
        model: before its first training step.
        names: layers to monitor; all plain linear layers and convolutions by default.
        window: number of calls of `measure` over which ranks must be stable.
        slope: maximum mean change of a stable rank per call of `measure`, relative to the full
            rank.
    """

    def __init__(
        self, model: nn.Module, names: Iterable[str] | None = None, *, window: int = 4,
        slope: float = 0.01,
    ) -> None:  # fmt: skip
        monitored: dict[str, Any] = {
            name: module
            for name, module in candidates(model)
            if isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d))
            and why_dense(model, module) is None
        }
        self._layers = (
            monitored if names is None else {n: monitored[n] for n in names if n in monitored}
        )
        self.window, self.slope = window, slope
        self._vectors: dict[str, Tensor] = {}
        self._scale: dict[str, float] = {}
        self.history: dict[str, list[float]] = {name: [] for name in self._layers}
        for name, layer in self._layers.items():
            weight = layer.weight.detach().flatten(1)
            stable, self._vectors[name] = stable_rank(weight)
            self._scale[name] = min(weight.shape) / stable if stable else 1.0

    @torch.no_grad()
    def measure(self) -> dict[str, int]:
        """Measure the current ranks and add them to the history."""
        for name, layer in self._layers.items():
            weight = layer.weight.detach().flatten(1)
            stable, self._vectors[name] = stable_rank(weight, self._vectors[name])
            rank = min(self._scale[name] * stable, float(min(weight.shape)))
            past = self.history[name]
            past.append(_SMOOTHING * past[-1] + (1 - _SMOOTHING) * rank if past else rank)
        return self.ranks

    @property
    def ranks(self) -> dict[str, int]:
        """Rank by layer, of the last call of `measure`; the full rank before the first."""
        return {
            name: max(1, math.ceil(past[-1])) if past else min(layer.weight.flatten(1).shape)
            for (name, past), layer in zip(self.history.items(), self._layers.values(), strict=True)
        }

    @property
    def has_converged(self) -> bool:
        """Whether the ranks of all layers were stable over the last `window` calls of `measure`."""
        for name, layer in self._layers.items():
            past = self.history[name][-self.window - 1 :]
            full = min(layer.weight.flatten(1).shape)
            if len(past) <= self.window:
                return False
            if abs(past[-1] - past[0]) / self.window > self.slope * full:
                return False
        return bool(self._layers)
