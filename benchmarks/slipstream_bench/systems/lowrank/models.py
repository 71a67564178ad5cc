"""The six architectures of the Pufferfish paper, and their low-rank layers.

They follow the published sizes: a test counts the same parameters as the paper's code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

from slipstream_bench.models import Residual

_Ranks = dict[str, float]


class ResNet18(nn.Module):
    """ResNet-18 for images of 32 x 32; the published one has no norm after the stem."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 3, 1, 1, bias=False)
        layers: list[nn.Module] = []
        channels = 64
        for out, stride in ((64, 1), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2),
                            (512, 1)):  # fmt: skip
            layers.append(Residual(channels, out, stride))
            channels = out
        self.blocks = nn.Sequential(*layers)
        self.head = nn.Linear(512, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(relu(self.stem(x))).mean((2, 3)))
        return logits


def resnet18_ranks(model: nn.Module, ratio: float = 0.25) -> _Ranks:
    """Return the ranks of all blocks but the first, without shortcuts."""
    return {
        name: ratio
        for name, module in model.named_modules()
        if isinstance(module, nn.Conv2d)
        and name.startswith("blocks.")
        and not name.startswith("blocks.0.")
        and ".skip." not in name
    }


class Vgg19(nn.Module):
    """VGG-19: 16 convolutions with norms and three linear layers of 512, for images of 32 x 32."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for size in (64, 64, 0, 128, 128, 0, *[256] * 4, 0, *[512] * 4, 0, *[512] * 4, 0):
            if not size:
                layers.append(nn.MaxPool2d(2))
                continue
            convolution = nn.Conv2d(channels, size, 3, padding=1, bias=False)
            layers += [convolution, nn.BatchNorm2d(size), nn.ReLU()]
            channels = size
        self.features = nn.Sequential(*layers)
        self.head = nn.Sequential(
            nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
        )

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(x).flatten(1))
        return logits


def vgg19_ranks(model: nn.Module) -> _Ranks:
    """Return the ranks of convolutions 10 to 16 and the two hidden linear layers."""
    convolutions = [n for n, m in model.named_modules() if isinstance(m, nn.Conv2d)]
    return dict.fromkeys([*convolutions[9:], "head.0", "head.2"], 0.25)


class Bottleneck(nn.Module):
    """A bottleneck block: 1 x 1, 3 x 3, 1 x 1, and a shortcut."""

    def __init__(self, channels: int, width: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, out, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(out)
        self.skip: nn.Module = nn.Identity()
        if stride != 1 or channels != out:
            self.skip = nn.Sequential(
                nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = relu(self.norm2(self.conv2(relu(self.norm1(self.conv1(x))))))
        return relu(self.norm3(self.conv3(y)) + self.skip(x))


class ResNet50(nn.Module):
    """ResNet-50 for images of 224 x 224; with ``wide=2`` twice as wide inside its blocks."""

    def __init__(self, wide: int = 1) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
        )  # fmt: skip
        stages: list[nn.Module] = []
        channels = 64
        for width, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            layers = []
            for number in range(blocks):
                step = stride if number == 0 else 1
                layers.append(Bottleneck(channels, width * wide, 4 * width, step))
                channels = 4 * width
            stages.append(nn.Sequential(*layers))
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(2048, 1000)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.stages(self.stem(x)).mean((2, 3)))
        return logits


def resnet50_ranks(model: nn.Module) -> _Ranks:
    """Return the ranks of the last stage, with its shortcut."""
    return {
        name: 0.25
        for name, module in model.named_modules()
        if isinstance(module, nn.Conv2d) and name.startswith("stages.3.")
    }


class WordModel(nn.Module):
    """A language model of two LSTM layers of 1500 with tied embeddings."""

    def __init__(self, words: int = 33_278) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, 1500)
        self.lstm1, self.lstm2 = nn.LSTM(1500, 1500), nn.LSTM(1500, 1500)
        self.out = nn.Linear(1500, words)
        self.out.weight = self.embed.weight
        for lstm in (self.lstm1, self.lstm2):
            # The published cell has one bias where torch adds two.
            bias: Any = lstm.bias_hh_l0
            nn.init.zeros_(bias).requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        y, _ = self.lstm1(self.embed(ids))
        y, _ = self.lstm2(y)
        logits: Tensor = self.out(y)
        return logits


class _Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )  # fmt: skip
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, memory: Tensor, causal: bool) -> Tensor:
        n, t, d = x.shape
        q, k, v = (
            layer(inputs).view(n, inputs.shape[1], 8, d // 8).transpose(1, 2)
            for layer, inputs in ((self.q, x), (self.k, memory), (self.v, memory))
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        normed: Tensor = self.norm(x + self.out(y.transpose(1, 2).reshape(n, t, d)))
        return normed


class _Feed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = self.norm(x + self.narrow(relu(self.wide(x))))
        return normed


class Translator(nn.Module):
    """A Transformer of 6 + 6 layers of 512 with shared embeddings."""

    def __init__(self, words: int = 9521, width: int = 512, layers: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.encoder = nn.ModuleList(
            nn.ModuleList([_Attention(width), _Feed(width)]) for _ in range(layers)
        )
        self.decoder = nn.ModuleList(
            nn.ModuleList([_Attention(width), _Attention(width), _Feed(width)])
            for _ in range(layers)
        )

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory = self.norm1(self.embed(source))
        layers: Any = self.encoder
        for attention, feed in layers:
            memory = feed(attention(memory, memory, False))
        x = self.norm2(self.embed(target))
        layers = self.decoder
        for attention, across, feed in layers:
            x = feed(across(attention(x, x, True), memory, False))
        logits: Tensor = x @ self.embed.weight.T
        return logits


def translator_ranks(model: nn.Module) -> _Ranks:
    """Return the ranks of every linear layer outside the first layers."""
    return {
        name: 0.25
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and not name.startswith(("encoder.0.", "decoder.0."))
    }


def _lstms(model: nn.Module) -> _Ranks:
    return {"lstm1": 0.25, "lstm2": 0.25}


PUBLISHED: dict[
    str, tuple[Callable[[], nn.Module], Callable[[Any], _Ranks], int, int, float, float]
] = {
    "ResNet-18": (ResNet18, resnet18_ranks, 11_173_834, 3_336_138, 0.555, 0.216),
    "VGG-19": (Vgg19, vgg19_ranks, 20_560_330, 8_370_634, 0.399, 0.289),
    "ResNet-50": (ResNet50, resnet50_ranks, 25_557_032, 15_202_344, 4.09, 3.57),
    "WideResNet-50-2": (
        lambda: ResNet50(2), resnet50_ranks, 68_883_240, 40_047_400, 11.40, 9.95
    ),
    "LSTM": (WordModel, _lstms, 85_962_278, 67_962_278, 0.0, 0.0),
    "Transformer": (Translator, translator_ranks, 48_978_432, 26_696_192, 0.0, 0.0),
}  # fmt: skip
"""By name: the model, its low-rank layers, parameters before and after, GMACs before and after."""


def trained(model: nn.Module) -> int:
    """Return the number of trained parameters."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def resnet18_step(batch: int = 16) -> Any:
    """Return a training step on images of 32 x 32, as a workload."""
    model = ResNet18()
    data = torch.randn(batch, 3, 32, 32), torch.randint(0, 10, (batch,))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    return model, data, nn.functional.cross_entropy, optimizer
