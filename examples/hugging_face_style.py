"""A loop in the style of Hugging Face: batches are dictionaries, the model returns its own loss.

    python examples/hugging_face_style.py --steps 100
    slipstream advise examples/hugging_face_style.py
    slipstream advise examples/hugging_face_style.py:make_workload

The model is called as ``model(**batch)`` and its output has ``.loss``, as models of the
transformers package do; that package is not needed. It learns whether a text has more kind words
than unkind ones.
"""

import argparse
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import cross_entropy

WORDS, PADDING = 100, 0
# Of every ten words the first is kind and the second unkind; the others are neutral.
KIND, UNKIND = 1, 2


@dataclass
class ClassifierOutput:
    """The model's output; `loss` is None without labels."""

    logits: torch.Tensor
    loss: torch.Tensor | None = None


class TextClassifier(nn.Module):
    """An encoder of two layers, the average over the words, one linear layer."""

    def __init__(self, width=64, heads=4, layers=2, length=32):
        super().__init__()
        self.words = nn.Embedding(WORDS, width, padding_idx=PADDING)
        self.positions = nn.Parameter(0.02 * torch.randn(length, width))
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 2)

    def forward(self, input_ids, attention_mask, labels=None):
        """[batch, time] int64, [batch, time] bool, [batch] int64."""
        x = self.words(input_ids) + self.positions
        x = self.encoder(x, src_key_padding_mask=~attention_mask)
        mask = attention_mask.unsqueeze(-1)
        logits = self.head((x * mask).sum(1) / mask.sum(1))
        loss = None if labels is None else cross_entropy(logits, labels)
        return ClassifierOutput(logits, loss)


def draw(batch_size, length=32):
    """A batch as a tokenizer and a collator would make it."""
    ids = torch.randint(1, WORDS, (batch_size, length))
    lengths = torch.randint(length // 2, length + 1, (batch_size, 1))
    mask = torch.arange(length) < lengths
    ids = ids * mask
    balance = (ids % 10 == KIND).sum(1) - (ids % 10 == UNKIND).sum(1)
    return {"input_ids": ids, "attention_mask": mask, "labels": (balance > 0).long()}


def make_workload(batch_size=16):
    """The model, one batch, no loss of our own, and the optimizer."""
    model = TextClassifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, draw(batch_size), None, optimizer


def main():
    parser = argparse.ArgumentParser(description="Is a text kind?")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=16)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = TextClassifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 20))
    for step in range(1, options.steps + 1):
        outputs = model(**draw(options.batch_size))
        outputs.loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step == 1 or step % 20 == 0:
            print(f"step {step:4d}  loss {outputs.loss.item():.3f}")


if __name__ == "__main__":
    main()
