"""Small masked-language models, plain and of Hugging Face, with padded batches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY, WIDTH, HEADS, LENGTH, BATCH = 61, 32, 2, 12, 5
LENGTHS = (12, 3, 7, 1, 9)


def tokens(seed: int = 0) -> dict[str, Tensor]:
    """Return a batch of Hugging Face: ids, mask of padding, and labels of some tokens."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.arange(LENGTH)[None] < torch.tensor(LENGTHS)[:, None]
    ids = torch.randint(4, VOCABULARY, (BATCH, LENGTH), generator=generator) * mask
    chosen = (torch.rand(ids.shape, generator=generator) < 0.3) & mask
    labels = ids.masked_fill(~chosen, -100)
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": labels}


class Encoder(nn.Module):
    """A plain encoder with a tied decoder, which is a function and not a module."""

    def __init__(self, norm_first: bool = False) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.first, self.second, self.last = (nn.LayerNorm(WIDTH) for _ in range(3))
        self.head, self.bias = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.zeros(VOCABULARY))
        self.norm_first = norm_first

    def attention(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (p.unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in self.qkv(x).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(q, k, v, mask[:, None, None, :] != 0)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        if self.norm_first:
            x = x + self.attention(self.first(x), mask)
            x = self.second(x + self.down(functional.gelu(self.up(x))))
        else:
            x = self.first(x + self.attention(x, mask))
            x = self.second(x + self.down(functional.gelu(self.up(x))))
        x = self.last(functional.gelu(self.head(x)))
        return functional.linear(x, self.words.weight, self.bias)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy at labelled tokens."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def plain() -> Any:
    """The plain encoder, as a workload."""
    torch.manual_seed(0)
    batch, model = tokens(), Encoder()
    inputs = (batch["input_ids"], batch["attention_mask"])
    return model, (inputs, batch["labels"]), loss_of, torch.optim.SGD(model.parameters(), 0.1)


def bert(**settings: Any) -> Any:
    """``BertForMaskedLM``, as a workload."""
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    shape = {"intermediate_size": 2 * WIDTH, "max_position_embeddings": LENGTH} | settings
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=HEADS,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **shape,
    )  # fmt: skip
    model = BertForMaskedLM(config)
    return model, tokens(), None, torch.optim.SGD(model.parameters(), 0.1)


def roberta() -> Any:
    """``RobertaForMaskedLM``, whose positions begin after that of padding, as a workload."""
    from transformers import RobertaConfig, RobertaForMaskedLM

    torch.manual_seed(0)
    config = RobertaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=HEADS,
        intermediate_size=2 * WIDTH, max_position_embeddings=LENGTH + 2, pad_token_id=1,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model, batch = RobertaForMaskedLM(config), tokens()
    batch["input_ids"] += 1 - batch["attention_mask"]
    return model, batch, None, torch.optim.SGD(model.parameters(), 0.1)
