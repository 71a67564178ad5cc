"""Model families of ``slipstream bench truth`` alone, typical ones that no other bench uses.

Each function is a workload as a user would write it: ``(model, batch, loss, optimizer)``, with a
step of 10 to 80 ms on one core.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import (
    binary_cross_entropy_with_logits,
    cross_entropy,
    mse_loss,
    scaled_dot_product_attention,
    silu,
    smooth_l1_loss,
)

_TRAINED = tuple[nn.Module, Any, Any, torch.optim.Optimizer]


class _RotaryBlock(nn.Module):
    """Attention with rotary positions and a gated feed-forward network, each after RMSNorm."""

    cosine: Tensor
    sine: Tensor

    def __init__(self, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.key = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)
        half = width // heads // 2
        angles = torch.outer(torch.arange(context), 1e4 ** (-torch.arange(half) / half))
        self.register_buffer("cosine", angles.cos())
        self.register_buffer("sine", angles.sin())

    def _rotated(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat(
            [a * self.cosine - b * self.sine, a * self.sine + b * self.cosine], -1
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (
            layer(y).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        a = scaled_dot_product_attention(self._rotated(q), self._rotated(k), v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        output: Tensor = x + self.down(silu(self.gate(y)) * self.up(y))
        return output


class _RotaryGPT(nn.Module):
    def __init__(self, vocabulary: int, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*(_RotaryBlock(width, heads, context) for _ in range(layers)))
        self.norm = nn.RMSNorm(width)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.norm(self.blocks(self.tokens(x))) @ self.tokens.weight.T
        return logits.flatten(0, 1)


class _DLRM(nn.Module):
    """Embedding bags and a dense tower; a second tower reads their pairwise dot products."""

    pairs: Tensor

    def __init__(self, tables: int, rows: int, width: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        self.bottom = nn.Sequential(
            nn.Linear(13, 256), nn.ReLU(), nn.Linear(256, width), nn.ReLU()
        )  # fmt: skip
        self.register_buffer("pairs", torch.tril_indices(tables + 1, tables + 1, -1))
        products = tables * (tables + 1) // 2
        self.top = nn.Sequential(
            nn.Linear(width + products, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(),
            nn.Linear(128, 1),
        )  # fmt: skip

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        x = self.bottom(dense)
        every = torch.stack([x] + [table(ids[:, i]) for i, table in enumerate(self.tables)], 1)
        products = torch.bmm(every, every.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        logits: Tensor = self.top(torch.cat([x, products], 1)).squeeze(1)
        return logits


def _twice(channels: int, out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, out, 3, padding=1), nn.GroupNorm(8, out), nn.SiLU(),
        nn.Conv2d(out, out, 3, padding=1), nn.GroupNorm(8, out), nn.SiLU(),
    )  # fmt: skip


class _UNet(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.down1, self.down2 = _twice(3, width), _twice(width, 2 * width)
        self.middle = _twice(2 * width, 4 * width)
        self.raise2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2)
        self.raise1 = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.up2, self.up1 = _twice(4 * width, 2 * width), _twice(2 * width, width)
        self.out, self.pool = nn.Conv2d(width, 3, 1), nn.MaxPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.down1(x)
        coarse = self.down2(self.pool(fine))
        x = self.middle(self.pool(coarse))
        x = self.up2(torch.cat([self.raise2(x), coarse], 1))
        found: Tensor = self.out(self.up1(torch.cat([self.raise1(x), fine], 1)))
        return found


class _Inverted(nn.Module):
    """An inverted residual: expand, filter each channel, project, and add a shortcut."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        wide = 4 * channels
        self.body = nn.Sequential(
            nn.Conv2d(channels, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU6(),
            nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False), nn.BatchNorm2d(wide),
            nn.ReLU6(), nn.Conv2d(wide, out, 1, bias=False), nn.BatchNorm2d(out),
        )  # fmt: skip
        self.skips = stride == 1 and channels == out

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        return x + y if self.skips else y


class _Seq2Seq(nn.Module):
    """A GRU encoder, a GRU decoder, and attention from the decoder to the encoder."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.source, self.target = (nn.Embedding(vocabulary, width) for _ in range(2))
        self.encoder = nn.GRU(width, width // 2, batch_first=True, bidirectional=True)
        self.decoder = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(2 * width, vocabulary)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        read, _ = self.encoder(self.source(source))
        written, _ = self.decoder(self.target(target))
        weight = torch.softmax(written @ read.transpose(1, 2) / read.shape[-1] ** 0.5, -1)
        logits: Tensor = self.head(torch.cat([written, weight @ read], -1))
        return logits.flatten(0, 1)


class _GraphNetwork(nn.Module):
    """Three rounds of message passing along edges, with means over neighbours."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        widths = [features, width, width]
        self.own = nn.ModuleList(nn.Linear(inputs, width) for inputs in widths)
        self.others = nn.ModuleList(nn.Linear(inputs, width, bias=False) for inputs in widths)
        self.head = nn.Linear(width, 16)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        degree = torch.zeros(len(x)).index_add_(0, target, torch.ones(len(target)))
        for own, others in zip(self.own, self.others, strict=True):
            total = torch.zeros_like(x).index_add_(0, target, x[source])
            x = torch.relu(own(x) + others(total / degree.clamp(min=1).unsqueeze(1)))
        logits: Tensor = self.head(x)
        return logits


class _ClassToken(nn.Module):
    """A vision transformer of torch's layers, with a class token and dropout."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, 8)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, 65, width))
        layer = nn.TransformerEncoderLayer(
            width, 4, 3 * width, 0.1, "gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 100)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        logits: Tensor = self.head(self.encoder(x)[:, 0])
        return logits


class _Detector(nn.Module):
    """A backbone, two feature levels, and heads for classes and boxes at each position."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()

        def shrink(channels: int, out: int) -> nn.Sequential:
            return nn.Sequential(
                nn.Conv2d(channels, out, 3, 2, 1, bias=False), nn.BatchNorm2d(out), nn.LeakyReLU()
            )

        self.stem = nn.Sequential(shrink(3, width), shrink(width, 2 * width))
        self.coarse = shrink(2 * width, 4 * width)
        self.lateral = nn.Conv2d(4 * width, 2 * width, 1)
        self.raised = nn.Upsample(scale_factor=2)
        self.head = nn.Sequential(nn.Conv2d(2 * width, 2 * width, 3, 1, 1), nn.ReLU())
        self.classes = nn.Conv2d(2 * width, classes, 3, 1, 1)
        self.boxes = nn.Conv2d(2 * width, 4, 3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.stem(x)
        coarse = self.lateral(self.coarse(fine))
        found = []
        for level in (fine + self.raised(coarse), coarse):
            y = self.head(level)
            found.append(torch.cat([self.classes(y), self.boxes(y)], 1).flatten(2))
        return torch.cat(found, 2)


class _TemporalConv(nn.Module):
    """Gated dilated convolutions over a signal, as in audio models."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.stem = nn.Conv1d(1, width, 1)
        self.layers = nn.ModuleList(
            nn.Conv1d(width, 2 * width, 3, padding=2**i, dilation=2**i) for i in range(layers)
        )
        self.mix = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in range(layers))
        self.head = nn.Conv1d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer, mix in zip(self.layers, self.mix, strict=True):
            value, gate = layer(x).chunk(2, 1)
            x = x + mix(torch.tanh(value) * torch.sigmoid(gate))
        found: Tensor = self.head(x)
        return found


class _Logits(nn.Module):
    """A model of transformers as a module that returns its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=ids).logits
        return logits.flatten(0, 1) if logits.dim() == 3 else logits


def rotary_gpt(batch_size: int = 4) -> _TRAINED:
    """Build a causal transformer with rotary positions, RMSNorm, SwiGLU and tied embeddings."""
    model = _RotaryGPT(2048, 192, 4, 4, 96)
    return _next_token(model, 2048, batch_size, 96)


def dlrm(batch_size: int = 512) -> _TRAINED:
    """Build click prediction with pairwise dot products of embeddings, updated by plain SGD."""
    model = _DLRM(12, 10_000, 32)
    batch = torch.randn(batch_size, 13), torch.randint(0, 10_000, (batch_size, 12, 2))
    clicked = torch.randint(0, 2, (batch_size,)).float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, (batch, clicked), binary_cross_entropy_with_logits, optimizer


def unet(batch_size: int = 8) -> _TRAINED:
    """Build a U-Net that removes noise from 32 x 32 images."""
    images = torch.randn(batch_size, 3, 32, 32)
    return _fitted(_UNet(24), images, torch.randn_like(images))


def depthwise_net(batch_size: int = 16) -> _TRAINED:
    """Build inverted residuals with channel-wise convolutions on 48 x 48 images."""
    rows = ((16, 24, 2), (24, 24, 1), (24, 32, 2), (32, 32, 1), (32, 64, 2), (64, 64, 1))
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU6(),
        *(_Inverted(*row) for row in rows),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(64, 10),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    batch = torch.randn(batch_size, 3, 48, 48), torch.randint(0, 10, (batch_size,))
    return model, batch, cross_entropy, optimizer


def graph_network(nodes: int = 4000) -> _TRAINED:
    """Build node classification on a random graph with eight edges per node."""
    model = _GraphNetwork(64, 128)
    batch = torch.randn(nodes, 64), torch.randint(0, nodes, (2, 8 * nodes))
    labels = torch.randint(0, 16, (nodes,))
    return model, (batch, labels), cross_entropy, torch.optim.Adam(model.parameters(), lr=1e-3)


def class_token_transformer(batch_size: int = 8) -> _TRAINED:
    """Build a vision transformer of torch's encoder layers on 64 x 64 images."""
    model = _ClassToken(160, 4)
    batch = torch.randn(batch_size, 3, 64, 64), torch.randint(0, 100, (batch_size,))
    return model, batch, cross_entropy, torch.optim.AdamW(model.parameters(), lr=1e-4)


def autoencoder(batch_size: int = 256) -> _TRAINED:
    """Build dense layers down to 8 units and up again, each with batch normalisation."""
    widths = [640, 256, 128, 128, 8, 128, 128, 256]
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.BatchNorm1d(after), nn.ReLU()]
    images = torch.randn(batch_size, 640)
    return _fitted(nn.Sequential(*layers, nn.Linear(256, 640)), images, images)


def bert_classifier(batch_size: int = 8) -> _TRAINED:
    """Build a small BERT of transformers that classifies sentences of 64 words."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=4000, hidden_size=192, num_hidden_layers=4, num_attention_heads=4,
        intermediate_size=768,
    )  # fmt: skip
    model = _Logits(BertForSequenceClassification(config)).train()
    batch = torch.randint(0, 4000, (batch_size, 64)), torch.randint(0, 2, (batch_size,))
    return model, batch, cross_entropy, torch.optim.AdamW(model.parameters(), lr=5e-5)


def seq2seq(batch_size: int = 16) -> _TRAINED:
    """Build translation with two GRUs and attention, 24 words to 24."""
    model = _Seq2Seq(2000, 192)
    source, target = torch.randint(0, 2000, (2, batch_size, 24))
    labels = torch.randint(0, 2000, (batch_size * 24,))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return model, ((source, target), labels), cross_entropy, optimizer


def llama(batch_size: int = 4) -> _TRAINED:
    """Build a small Llama of transformers, with grouped keys and values."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=2000, hidden_size=192, intermediate_size=512, num_hidden_layers=4,
        num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=128, use_cache=False,
    )  # fmt: skip
    return _next_token(_Logits(LlamaForCausalLM(config)).train(), 2000, batch_size, 96)


def detector(batch_size: int = 8) -> _TRAINED:
    """Build a detector: classes and boxes at every position of two feature levels, 96 x 96."""
    classes = 12

    def loss(found: Tensor, targets: Tensor) -> Tensor:
        names = binary_cross_entropy_with_logits(found[:, :classes], targets[:, :classes])
        return names + smooth_l1_loss(found[:, classes:], targets[:, classes:])

    images, places = torch.randn(batch_size, 3, 96, 96), 24 * 24 + 12 * 12
    targets = torch.rand(batch_size, classes + 4, places).round()
    model = _Detector(24, classes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return model, (images, targets), loss, optimizer


def temporal_conv(batch_size: int = 4) -> _TRAINED:
    """Build gated dilated convolutions over 2048 samples of audio."""
    signal = torch.randn(batch_size, 1, 2048)
    return _fitted(_TemporalConv(32, 6), signal, signal.roll(-1, -1))


def _fitted(model: nn.Module, x: Tensor, target: Tensor) -> _TRAINED:
    return model, (x, target), mse_loss, torch.optim.Adam(model.parameters(), lr=1e-3)


def _next_token(model: nn.Module, vocabulary: int, batch: int, context: int) -> _TRAINED:
    tokens = torch.randint(0, vocabulary, (batch, context + 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    return model, (tokens[:, :-1], tokens[:, 1:].reshape(-1)), cross_entropy, optimizer


TUNED_ON = (
    rotary_gpt, dlrm, unet, depthwise_net, graph_network, class_token_transformer, autoencoder,
    bert_classifier,
)  # fmt: skip
HELD_OUT = (seq2seq, llama, detector, temporal_conv)
FAMILIES = TUNED_ON + HELD_OUT
