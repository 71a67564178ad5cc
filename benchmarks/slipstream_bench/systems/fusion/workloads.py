"""Six models of different families whose fused steps are compared with torch.compile.

Each is a module of one tensor, with the tensor, sized for one core; a step is its forward and
backward pass.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from slipstream_bench.models import Block, Residual
from slipstream_bench.systems.movement.layers import EncoderLayer

_DROPPED = 0.1


class _GptBlock(nn.Module):
    """A GPT-2 block: x [batch, length, width], pre-norm, tanh GELU, dropout."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.first, self.second = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, t, d = x.shape
        qkv = self.qkv(self.norm1(x)).view(n, t, 3, self.heads, d // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        a = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + functional.dropout(self.out(a.transpose(1, 2).reshape(n, t, d)), _DROPPED)
        hidden = functional.gelu(self.first(self.norm2(x)), approximate="tanh")
        return x + functional.dropout(self.second(hidden), _DROPPED)


class _LlamaBlock(nn.Module):
    """A Llama block: RMS norms, rotary positions, a gated SiLU."""

    cos: Tensor
    sin: Tensor

    def __init__(self, width: int, heads: int, hidden: int, length: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)
        size = width // heads
        angle = torch.arange(length)[:, None] * 10000 ** (-torch.arange(0, size, 2) / size)
        self.register_buffer("cos", torch.cat((angle, angle), 1).cos())
        self.register_buffer("sin", torch.cat((angle, angle), 1).sin())

    def _rotated(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        rotated: Tensor = x * self.cos + torch.cat((-b, a), -1) * self.sin
        return rotated

    def forward(self, x: Tensor) -> Tensor:
        n, t, d = x.shape
        y = self.norm1(x)
        q, k, v = (
            layer(y).view(n, t, self.heads, d // self.heads).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        a = functional.scaled_dot_product_attention(
            self._rotated(q), self._rotated(k), v, is_causal=True
        )
        x = x + self.out(a.transpose(1, 2).reshape(n, t, d))
        y = self.norm2(x)
        output: Tensor = x + self.down(functional.silu(self.gate(y)) * self.up(y))
        return output


class _MixerBlock(nn.Module):
    """An MLP-Mixer block: x [batch, patches, width], over patches, then over channels."""

    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(
            nn.Linear(patches, 4 * patches), nn.GELU(), nn.Linear(4 * patches, patches)
        )
        self.channels = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        y: Tensor = x + self.channels(self.norm2(x))
        return y


def _bert() -> tuple[nn.Module, Tensor]:
    return EncoderLayer(768, 12, 4 * 768), torch.randn(4, 128, 768)


def _gpt() -> tuple[nn.Module, Tensor]:
    return _GptBlock(384, 6), torch.randn(4, 128, 384)


def _vit() -> tuple[nn.Module, Tensor]:
    return Block(384, 6, causal=False), torch.randn(2, 196, 384)


def _llama() -> tuple[nn.Module, Tensor]:
    return _LlamaBlock(384, 6, 1024, 128), torch.randn(4, 128, 384)


def _mixer() -> tuple[nn.Module, Tensor]:
    return _MixerBlock(196, 256), torch.randn(4, 196, 256)


def _conv() -> tuple[nn.Module, Tensor]:
    return Residual(64, 64, 1), torch.randn(16, 64, 16, 16)


WORKLOADS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "BERT": _bert, "GPT": _gpt, "ViT": _vit, "Llama": _llama, "Mixer": _mixer,
    "conv-norm net": _conv,
}  # fmt: skip
