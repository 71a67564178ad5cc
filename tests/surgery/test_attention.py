"""Common spellings of attention become one call with the same result."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from slipstream.surgery import NotRewrittenError, callers, with_attention

LENGTH, WIDTH, HEADS = 6, 8, 2
HEAD_WIDTH = WIDTH // HEADS


class Spelling(nn.Module):
    """A module that splits and joins heads around a subclass's attention."""

    def __init__(self, dropout: float = 0.3) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop, self.probability = nn.Dropout(dropout), dropout
        self.softmax = nn.Softmax(dim=-1)
        self.scale = HEAD_WIDTH**-0.5
        self.register_buffer("causal", torch.ones(9, 9).tril())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, t, d = x.shape
        q, k, v = self.qkv(x).view(n, t, 3, HEADS, HEAD_WIDTH).permute(2, 0, 3, 1, 4)
        return self.out(self.attention(q, k, v, t).transpose(1, 2).reshape(n, t, d))

    def attention(self, q: Any, k: Any, v: Any, t: Any) -> Any:
        raise NotImplementedError


class Operators(Spelling):
    def attention(self, q: Any, k: Any, v: Any, t: Any) -> Any:
        scores = q @ k.transpose(-2, -1) * self.scale
        scores = scores.masked_fill(self.causal[:t, :t] == 0, float("-inf"))
        return self.drop(scores.softmax(-1)) @ v


class Functions(Spelling):
    def attention(self, q: Any, k: Any, v: Any, t: Any) -> Any:
        scores = torch.matmul(q, k.permute(0, 1, 3, 2)) / math.sqrt(k.size(-1))
        weights = functional.softmax(scores + (1 - self.causal[:t, :t]) * -1e9, dim=-1)
        weights = functional.dropout(weights, p=self.probability, training=self.training)
        return torch.matmul(weights, v)


class Where(Spelling):
    def attention(self, q: Any, k: Any, v: Any, t: Any) -> Any:
        scores = torch.where(self.causal[:t, :t] > 0, q @ k.mT, -1e9)
        return torch.softmax(scores, dim=-1).matmul(v)


class Flat(Spelling):
    """Attention on three dimensions, with bmm."""

    def attention(self, q: Any, k: Any, v: Any, t: Any) -> Any:
        q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
        weights = self.softmax(torch.bmm(q.mul(self.scale), k.transpose(1, 2)))
        return torch.bmm(weights, v).unflatten(0, (-1, HEADS))


class Plain(Spelling):
    """Attention without mask, scaled before the product."""

    def attention(self, q: Any, k: Any, v: Any, t: Any) -> Any:
        return (0.5 * (q @ k.transpose(2, 3))).softmax(dim=-1) @ v


SPELLINGS = [Operators, Functions, Where, Flat, Plain]


def rewritten(module: nn.Module, **arguments: Any) -> Any:
    return with_attention(module, arguments)


@pytest.mark.parametrize("kind", SPELLINGS)
def test_output_is_unchanged(kind: type[Spelling]) -> None:
    torch.manual_seed(0)
    module, x = kind().eval(), torch.randn(3, LENGTH, WIDTH)
    torch.testing.assert_close(rewritten(module, x=x)(x), module(x))


@pytest.mark.parametrize("kind", SPELLINGS)
def test_gradients_are_unchanged_in_one_fused_call(kind: type[Spelling]) -> None:
    torch.manual_seed(0)
    module, x = kind(0.0), torch.randn(2, LENGTH, WIDTH)
    found = []
    for forward in (module.forward, rewritten(module, x=x)):
        module.zero_grad()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
            forward(x).square().sum().backward()
        found.append([p.grad.clone() for p in module.parameters() if p.grad is not None])
    torch.testing.assert_close(found[1], found[0])
    names = {event.name for event in seen.events()}
    assert "aten::_scaled_dot_product_flash_attention_for_cpu_backward" in names
    assert "aten::_softmax" not in names


@pytest.mark.parametrize("kind", [Operators, Functions])
def test_dropout_follows_the_module_mode(kind: type[Spelling]) -> None:
    module, x = kind(0.5).eval(), torch.randn(3, LENGTH, WIDTH)
    forward = rewritten(module, x=x)
    assert torch.equal(forward(x), forward(x))
    module.train()
    assert not torch.equal(forward(x), forward(x))
    module.eval()
    torch.testing.assert_close(forward(x), module(x))


def test_uses_current_parameters_and_buffers() -> None:
    module, x = Operators(0.0).eval(), torch.randn(2, LENGTH, WIDTH)
    forward = rewritten(module, x=x)
    module.double()
    module.causal = torch.ones(9, 9, dtype=torch.float64)
    torch.testing.assert_close(forward(x.double()), module(x.double()))


def test_refuses_another_value_of_a_constant_argument() -> None:
    class Optional(Operators):
        def forward(self, x: torch.Tensor, mask: Any = None) -> torch.Tensor:
            return super().forward(x if mask is None else x * mask)

    module, x = Optional(0.0).eval(), torch.randn(2, LENGTH, WIDTH)
    forward = rewritten(module, x=x, mask=None)
    torch.testing.assert_close(forward(x), module(x))
    torch.testing.assert_close(forward(x, mask=None), module(x))
    with pytest.raises(AssertionError, match="mask"):
        forward(x, torch.ones(WIDTH))


class WeightsUsed(Spelling):
    def attention(self, q: Any, k: Any, v: Any, t: Any) -> Any:
        weights = (q @ k.transpose(-2, -1)).softmax(-1)
        return weights @ v + weights.mean()


class ScoresUsed(Spelling):
    def attention(self, q: Any, k: Any, v: Any, t: Any) -> Any:
        scores = q @ k.transpose(-2, -1)
        return scores.softmax(-1) @ v + scores.mean()


class OtherFill(Spelling):
    def attention(self, q: Any, k: Any, v: Any, t: Any) -> Any:
        scores = (q @ k.transpose(-2, -1)).masked_fill(self.causal[:t, :t] == 0, 0.0)
        return scores.softmax(-1) @ v


class MaskThenScale(Spelling):
    def attention(self, q: Any, k: Any, v: Any, t: Any) -> Any:
        return ((q @ k.transpose(-2, -1) + self.causal[:t, :t]) * 0.5).softmax(-1) @ v


class Capped(Spelling):
    def attention(self, q: Any, k: Any, v: Any, t: Any) -> Any:
        return (q @ k.transpose(-2, -1)).tanh().softmax(-1) @ v


class DependsOnData(Spelling):
    def attention(self, q: Any, k: Any, v: Any, t: Any) -> Any:
        return (q @ k.transpose(-2, -1)).softmax(-1) @ (v if q.sum() > 0 else -v)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (WeightsUsed, "weights"),
        (ScoresUsed, "scores"),
        (OtherFill, "other than -inf"),
        (MaskThenScale, "mask is scaled"),
        (Capped, "tanh"),
        (DependsOnData, "cannot be traced"),
    ],
)
def test_refuses_unsupported_attention(kind: type[Spelling], reason: str) -> None:
    with pytest.raises(NotRewrittenError, match=reason):
        rewritten(kind(), x=torch.randn(2, LENGTH, WIDTH))


def test_refuses_a_module_without_softmax() -> None:
    with pytest.raises(NotRewrittenError, match="softmax"):
        rewritten(nn.Sequential(nn.ReLU()), input=torch.randn(2))


def test_finds_innermost_callers_and_their_arguments() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Operators(), Flat()).eval()
    x = torch.randn(2, LENGTH, WIDTH)
    sites = callers(model, lambda: model(x), ("softmax",))
    assert [site.name for site in sites] == ["1", "2"]
    assert [list(site.arguments) for site in sites] == [["x"], ["x"]]
    assert not any(m._forward_hooks for m in model.modules())
