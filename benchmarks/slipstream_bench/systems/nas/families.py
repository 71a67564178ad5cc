"""Small models of the families that architecture search must handle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn


class Basic(nn.Module):
    def __init__(self, i: int, o: int, stride: int, middle: int = 0) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(i, middle or o, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(middle or o)
        self.conv2 = nn.Conv2d(middle or o, o, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(o)
        self.down = nn.Sequential(nn.Conv2d(i, o, 1, stride, bias=False), nn.BatchNorm2d(o))
        self.has_down = i != o or stride > 1
        if not self.has_down:
            del self.down

    def forward(self, x: torch.Tensor) -> Any:
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = self.bn2(self.conv2(y))
        y += self.down(x) if self.has_down else x
        return F.relu(y, inplace=True)


def resnet() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(True),
        nn.Sequential(Basic(16, 16, 1), Basic(16, 16, 1)),
        nn.Sequential(Basic(16, 32, 2), Basic(32, 32, 1)),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip


class Inverted(nn.Module):
    """MobileNetV2 block, with squeeze and excitation as in V3."""

    def __init__(self, i: int, o: int, k: int, *, excite: bool) -> None:
        super().__init__()
        e = 4 * i
        self.body = nn.Sequential(
            nn.Conv2d(i, e, 1, bias=False), nn.BatchNorm2d(e), nn.Hardswish(),
            nn.Conv2d(e, e, k, 1, k // 2, groups=e, bias=False), nn.BatchNorm2d(e), nn.ReLU6(),
        )  # fmt: skip
        self.squeeze = nn.Sequential(nn.Conv2d(e, i, 1), nn.PReLU(i), nn.Conv2d(i, e, 1))
        self.excite, self.shortcut = excite, i == o
        self.last = nn.Sequential(nn.Conv2d(e, o, 1, bias=False), nn.BatchNorm2d(o))

    def forward(self, x: torch.Tensor) -> Any:
        y = self.body(x)
        if self.excite:
            y = y * F.hardsigmoid(self.squeeze(y.mean((2, 3), keepdim=True)))
        y = self.last(y)
        return x + y if self.shortcut else y


def mobilenet(excite: bool = False) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1), nn.Sequential(
            Inverted(16, 16, 5, excite=excite), Inverted(16, 24, 3, excite=excite),
            Inverted(24, 24, 3, excite=excite)),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(24, 10),
    )  # fmt: skip


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(16 + 8 * n), nn.ReLU(), nn.Conv2d(16 + 8 * n, 8, 3, 1, 1))
            for n in range(3)
        )
        self.stem, self.head = nn.Conv2d(3, 16, 3, 1, 1), nn.Linear(40, 10)

    def forward(self, x: torch.Tensor) -> Any:
        features = [self.stem(x)]
        for layer in self.layers:
            features.append(layer(torch.cat(features, 1)))
        return self.head(torch.cat(features, 1).mean((2, 3)))


class Shuffle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 32, 3, 1, 1), nn.Linear(32, 10)
        self.branch = nn.Sequential(
            nn.Conv2d(16, 16, 1), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Conv2d(16, 16, 3, 1, 1, groups=16), nn.Conv2d(16, 16, 1),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> Any:
        a, b = self.stem(x).chunk(2, dim=1)
        y = torch.cat([a, self.branch(b)], 1)
        n, c, h, w = y.shape
        y = y.view(n, 2, c // 2, h, w).transpose(1, 2).contiguous().view(n, -1, h, w)
        return self.head(y.mean((2, 3)))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(3, 16, 3, 1, 1), nn.Conv2d(16, 32, 3, 2, 1)
        self.up = nn.ConvTranspose2d(32, 16, 2, 2)
        self.norm, self.last = nn.GroupNorm(4, 32), nn.Conv2d(32, 2, 1)

    def forward(self, x: torch.Tensor) -> Any:
        a = F.relu(self.down1(x))
        b = F.interpolate(F.max_pool2d(F.relu(self.down2(a)), 2), scale_factor=2.0)
        return self.last(self.norm(torch.cat([a, self.up(b)], 1)))


class ConvNext(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 24, 4, 4)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({
                "dw": nn.Conv2d(24, 24, 7, 1, 3, groups=24), "norm": nn.LayerNorm(24),
                "up": nn.Linear(24, 96), "down": nn.Linear(96, 24),
            })
            for _ in range(2)
        )  # fmt: skip
        self.scale, self.head = nn.Parameter(torch.rand(24)), nn.Linear(24, 10)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.stem(x)
        for block in self.blocks:
            b: Any = block
            y = b["norm"](b["dw"](x).permute(0, 2, 3, 1))
            x = x + (self.scale * b["down"](F.gelu(b["up"](y)))).permute(0, 3, 1, 2)
        return self.head(x.mean((-2, -1)))


class Attention(nn.Module):
    """Attention over packed or grouped projections, with four heads of eight channels."""

    def __init__(
        self, *, groups: int = 4, packed: bool = True, causal: bool = False, bias: int = 0
    ) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(4, 1, bias)) if bias else None
        self.groups, self.packed, self.causal = groups, packed, causal
        self.qkv = nn.Linear(32, 96 if packed else 32)
        self.kv = nn.Linear(32, 16 * groups)
        self.out = nn.Linear(32, 32)
        if packed:
            del self.kv

    def forward(self, x: torch.Tensor) -> Any:
        b, t, c = x.shape
        if self.packed:
            q, k, v = self.qkv(x).reshape(b, t, 3, 4, 8).permute(2, 0, 3, 1, 4).unbind(0)
        else:
            q = self.qkv(x).view(b, t, 4, 8).transpose(1, 2)
            k, v = self.kv(x).chunk(2, dim=-1)
            k, v = (
                y.view(b, t, self.groups, 8).transpose(1, 2).repeat_interleave(4 // self.groups, 1)
                for y in (k, v)
            )
        y = F.scaled_dot_product_attention(q, k, v, self.bias, is_causal=self.causal)
        return self.out(y.transpose(1, 2).reshape(b, t, c))


class Layer(nn.Module):
    def __init__(self, **options: object) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(32), nn.LayerNorm(32)
        self.attention = Attention(**options)  # type: ignore[arg-type]
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(), nn.Linear(64, 32))

    def forward(self, x: torch.Tensor) -> Any:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 32, 4, 4)
        self.token = nn.Parameter(torch.randn(1, 1, 32))
        self.position = nn.Parameter(torch.randn(1, 17, 32))
        self.layers = nn.Sequential(Layer(), Layer(bias=17))
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.patch(x).flatten(2).transpose(1, 2)
        y = torch.cat([self.token.expand(y.shape[0], -1, -1), y], 1) + self.position
        return self.head(self.layers(y)[:, 0])


class Gpt(nn.Module):
    """Decoder with grouped queries and an output layer that is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.position = nn.Parameter(torch.randn(10, 32))
        self.layers = nn.ModuleList(Layer(groups=2, packed=False, causal=True) for _ in range(2))
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> Any:
        y = self.embedding(x) + self.position[: x.shape[1]]
        for layer in self.layers:
            y = layer(y)
        return self.head(y)


class Swin(nn.Module):
    """Attention in windows, with a table of relative positions."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.qkv, self.out = (
            nn.Conv2d(3, 32, 4, 4),
            nn.Linear(32, 96),
            nn.Linear(32, 10),
        )
        self.table = nn.Parameter(torch.randn(7, 4))
        self.index: torch.Tensor
        self.register_buffer("index", torch.randint(0, 7, (16,)))

    def forward(self, x: torch.Tensor) -> Any:
        y = torch.roll(self.patch(x).permute(0, 2, 3, 1), (1, 1), (1, 2))
        b, h, w, c = y.shape
        y = y.view(b, h // 2, 2, w // 2, 2, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, c)
        q, k, v = self.qkv(y).reshape(-1, 4, 3, 4, c // 4).permute(2, 0, 3, 1, 4).unbind(0)
        bias = self.table[self.index].view(4, 4, 4).permute(2, 0, 1)
        y = (((q * 0.35) @ k.transpose(-2, -1) + bias).softmax(-1) @ v).transpose(1, 2)
        return self.out(y.reshape(b, -1, c).mean(1))


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch, self.head = nn.Conv2d(3, 32, 4, 4), nn.Linear(32, 10)
        self.tokens = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16))
        self.channels = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(),
                                      nn.Linear(64, 32))  # fmt: skip

    def forward(self, x: torch.Tensor) -> Any:
        y = self.patch(x).flatten(2).transpose(1, 2)
        y = y + self.tokens(y.transpose(1, 2)).transpose(1, 2)
        return self.head((y + self.channels(y)).mean(1))


class Recurrent(nn.Module):
    def __init__(self, kind: Any = nn.LSTM) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.lstm = kind(16, 24, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(48, 5)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.lstm(self.embedding(x))[0][:, -1])


class Bert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(50, 32), nn.Embedding(6, 32)
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2, enable_nested_tensor=False
        )
        self.head = nn.Linear(32, 3)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.embedding(x) + self.position(torch.arange(x.shape[1]))
        return self.head(self.encoder(y).mean(1))


def image() -> torch.Tensor:
    return torch.randn(2, 3, 16, 16)


def tokens() -> torch.Tensor:
    return torch.randint(0, 50, (2, 6))


FAMILIES: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "resnet": (resnet, image), "mobilenet_v2": (mobilenet, image),
    "efficientnet": (lambda: mobilenet(excite=True), image), "densenet": (Dense, image),
    "shufflenet": (Shuffle, image), "unet": (UNet, image), "convnext": (ConvNext, image),
    "vit": (ViT, image), "gpt": (Gpt, tokens), "swin": (Swin, image), "mixer": (Mixer, image),
    "lstm": (Recurrent, tokens), "rnn": (lambda: Recurrent(nn.RNN), tokens), "bert": (Bert, tokens),
    "bottleneck": (lambda: nn.Sequential(nn.Conv2d(3, 32, 3), Basic(32, 32, 1, middle=8),
                                         nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                                         nn.Linear(32, 10)), image),
}  # fmt: skip
