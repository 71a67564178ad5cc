"""Encoders of ``slipstream bench pretraining``, as a user of Hugging Face would train them.

Each function is a workload: ``(model, batch, loss, optimizer)``.
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from slipstream.data import get

LENGTH, BATCH, VOCABULARY = 128, 16, 8192
_PADDING, _UNKNOWN, _MASK, _FIRST, _LAST = range(5)
_MASKED_SHARE = 0.15


class LAMB(torch.optim.Optimizer):
    """You et al., "Large Batch Optimization for Deep Learning", with operators per tensor."""

    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 0.01) -> None:
        super().__init__(
            params, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": weight_decay}
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update all parameters."""
        for group in self.param_groups:
            (beta1, beta2), eps = group["betas"], group["eps"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(
                        step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p)
                    )
                state["step"] += 1
                m, v = state["exp_avg"], state["exp_avg_sq"]
                m.mul_(beta1).add_(p.grad, alpha=1 - beta1)
                v.mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                root = (v / (1 - beta2 ** state["step"])).sqrt().add_(eps)
                u = (m / (1 - beta1 ** state["step"])) / root
                ratio = 1.0
                if group["weight_decay"]:
                    u.add_(p, alpha=group["weight_decay"])
                    w_norm, u_norm = float(p.norm()), float(u.norm())
                    ratio = w_norm / u_norm if w_norm > 0 and u_norm > 0 else 1.0
                p.add_(u, alpha=-group["lr"] * ratio)


@functools.cache
def sequences(length: int = LENGTH, vocabulary: int = VOCABULARY) -> tuple[tuple[int, ...], ...]:
    """Return tokens of WikiText-2: whole sentences of a paragraph, up to `length` tokens."""
    lines = [line.split() for line in get("wikitext2").train.splitlines()]
    common = Counter(word for line in lines for word in line).most_common(vocabulary - 5)
    numbers = {word: number for number, (word, _) in enumerate(common, start=5)}
    found: list[tuple[int, ...]] = []
    for line in lines:
        if not line or line[0] == "=":
            continue
        current: list[int] = []
        for sentence in " ".join(line).split(" . "):
            words = [numbers.get(word, _UNKNOWN) for word in (*sentence.split(), ".")]
            if current and len(current) + len(words) > length - 2:
                found.append((_FIRST, *current, _LAST))
                current = []
            current = (current + words)[: length - 2]
        found.append((_FIRST, *current, _LAST))
    return tuple(found)


def batch_of(
    number: int, rows: int = BATCH, length: int = LENGTH, vocabulary: int = VOCABULARY
) -> dict[str, Tensor]:
    """Return batch `number`, padded to its longest sequence, with 15 % of the tokens masked."""
    texts = sequences(length, vocabulary)
    generator = torch.Generator().manual_seed(number)
    chosen = torch.randint(len(texts), (rows,), generator=generator).tolist()
    ids = torch.full((rows, max(len(texts[row]) for row in chosen)), _PADDING)
    for at, row in enumerate(chosen):
        ids[at, : len(texts[row])] = torch.tensor(texts[row])
    masked = (torch.rand(ids.shape, generator=generator) < _MASKED_SHARE) & (ids > _LAST)
    return {
        "input_ids": ids.masked_fill(masked, _MASK),
        "attention_mask": (ids != _PADDING).long(),
        "labels": ids.masked_fill(~masked, -100),
    }


def encoder(
    layers: int, width: int, seed: int = 0, length: int = LENGTH, vocabulary: int = VOCABULARY
) -> Any:
    """Return ``BertForMaskedLM`` with heads of 64, without dropout, from a seed."""
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(seed)
    return BertForMaskedLM(
        BertConfig(
            vocab_size=vocabulary, hidden_size=width, num_hidden_layers=layers,
            num_attention_heads=width // 64, intermediate_size=4 * width,
            max_position_embeddings=length, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


def groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Return parameter groups without weight decay of biases and norms."""
    weights = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    return [{"params": weights, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]


def _workload(layers: int, width: int, seed: int = 0) -> Any:
    model = encoder(layers, width, seed)
    return model, batch_of(0), None, LAMB(groups(model), lr=1e-3)


def mini(seed: int = 0) -> Any:
    """Four layers of width 256."""
    return _workload(4, 256, seed)


def small() -> Any:
    """Eight layers of width 384."""
    return _workload(8, 384)


def wide() -> Any:
    """Two layers of width 768."""
    return _workload(2, 768)
