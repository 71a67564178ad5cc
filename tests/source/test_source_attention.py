"""Attention written out in a forward becomes one call with the same result, or is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.source import EditLocationError, Source, fuse_attention, locate
from slipstream.techniques.sdpa import Sdpa
from slipstream.workload import Workload

FILE = """\
import math
import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self, width=8, heads=2):
        super().__init__()
        self.heads, self.scale = heads, (width // heads) ** -0.5
        self.factor = (width // heads) ** -0.5
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.drop = nn.Dropout(0.25)
        self.learned = nn.Parameter(torch.ones(1))

    def forward(self, x, mask=None):
        n, t, d = x.shape
        q, k, v = self.qkv(x).view(n, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        causal = torch.ones(t, t).tril()
        # BEGIN
        scores = q @ k.transpose(-2, -1) / math.sqrt(d // self.heads)  # [n, heads, t, t]
        scores = scores.masked_fill(causal == 0, float("-inf"))
        weights = F.softmax(scores, dim=-1)
        weights = self.drop(weights)
        mixed = weights @ v
        # END
        return self.out(mixed.transpose(1, 2).reshape(n, t, d))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Attention(), Attention()])

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x.softmax(-1)


def make():
    model = Net()
    x = torch.randn(3, 5, 8)
    return model, (x, x), F.mse_loss, torch.optim.SGD(model.parameters(), 0.1)
"""
BEGIN, END = FILE.index("        # BEGIN"), FILE.index("        # END")


def written(*lines: str) -> str:
    body = "".join(f"        {line}\n" for line in ("# BEGIN", *lines))
    return FILE[:BEGIN] + body + FILE[END:]


def edited(text: str) -> Source:
    return fuse_attention(locate(Source.of(text.encode(), Path("model.py")), "make"))


def output_of(text: str, *, training: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the model's output, and a gradient of it."""
    found: dict[str, Any] = {"__name__": "model"}
    exec(compile(text, "model.py", "exec"), found)
    torch.manual_seed(0)
    model, (x, _), _, _ = found["make"]()
    model.train(training)
    torch.manual_seed(1)
    output = model(x)
    output.square().sum().backward()
    return output.detach(), model.layers[0].qkv.weight.grad


SPELLINGS = {
    "statements": FILE,
    "one expression": written("mixed = (q @ k.transpose(-1, -2) * self.factor).softmax(-1) @ v"),
    "functions": written(
        "att = torch.softmax(torch.matmul(q, k.transpose(2, 3)) * 0.5, -1)",
        "mixed = torch.matmul(F.dropout(att, 0.25, training=self.training), v)",
    ),
    "no scale, queries scaled": written(
        "att = (q * self.factor) @ k.mT", "att = att.softmax(dim=-1)", "mixed = att @ v"
    ),
    "a boolean mask": written(
        "hidden = causal == 0",
        "att = (q @ k.transpose(-2, -1)).masked_fill(hidden, -1e9)",
        "mixed = F.dropout(F.softmax(att, dim=-1), p=0.5, training=self.training) @ v",
    ),
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("text", SPELLINGS.values(), ids=SPELLINGS)
def test_the_edited_model_computes_the_same_result(text: str, training: bool) -> None:
    after = edited(text).text
    assert after.count("scaled_dot_product_attention(") == 1
    forward = after[after.index("# BEGIN") : after.index("# END")]
    assert "softmax" not in forward
    for ours, theirs in zip(
        output_of(after, training=training), output_of(text, training=training), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_the_edit_changes_only_the_lines_of_attention() -> None:
    diff = edited(FILE).diff().splitlines()
    added = [line for line in diff if line.startswith("+") and not line.startswith("+++")]
    assert added == [
        "+        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, "
        "attn_mask=causal != 0, dropout_p=self.drop.p if self.drop.training else 0.0, "
        "scale=1 / math.sqrt(d // self.heads))"
    ]
    removed = [line for line in diff if line.startswith("-") and not line.startswith("---")]
    assert len(removed) == 5
    assert len([line for line in diff if line.startswith("@@")]) == 1


@pytest.mark.parametrize(
    ("lines", "message", "line"),
    [
        (("w = (q @ k.mT).softmax(-1)", "mixed = w @ v + w.mean()"), "'w'", 22),
        (("w = (q @ k.mT).softmax(-1)", "self.seen = w", "mixed = w @ v"), "'w'", 23),
        (("s = q @ k.mT", "s += causal", "mixed = s.softmax(-1) @ v"), "'s'", 23),
        (("mixed = (q @ k.mT + causal).softmax(-1) @ v",), "'q @ k.mT + causal'", 21),
        (("mixed = (q @ k.mT).tanh().softmax(-1) @ v",), "'(q @ k.mT).tanh()'", 21),
        (("mixed = (q @ k.mT * self.learned).softmax(-1) @ v",), "'self.learned'", 21),
        (("mixed = (q @ k.mT).masked_fill(causal == 0, -1).softmax(-1) @ v",), ".masked_fill", 21),
        (("mixed = (q @ k).softmax(-1) @ v",), "'k'", 21),
        (("mixed = (q @ self.drop(k).mT).softmax(-1) @ v",), "'self.drop(k)'", 21),
        (("w = (q @ k.mT).softmax(-1)", "q = q * 2", "mixed = w @ v"), "'q'", 22),
        (("w = (q @ k.mT).softmax(-1)", "k.mul_(2)", "mixed = w @ v"), "'k.mul_'", 22),
        (("w = (q @ k.mT).softmax(-1)", "w = F.dropout(w, .1)", "mixed = w @ v"), "'F.dropout", 22),
        (("n = 3; w = (q @ k.mT).softmax(-1)", "mixed = w @ v"), "one line", 21),
        (("if t:", "    w = (q @ k.mT).softmax(-1)", "mixed = w @ v"), "'w'", 23),
        (("for _ in d:", "    w = (q @ k.mT).softmax(-1)", "    mixed = w @ v"), "'w'", 23),
        (("mixed = q + k + v",), "no written-out attention", 26),
        (("mixed = (q @ k.mT).softmax(-2) @ v",), "no written-out attention", 26),
    ],
)  # fmt: skip
def test_uncertain_code_is_refused(lines: tuple[str, ...], message: str, line: int) -> None:
    with pytest.raises(EditLocationError, match=re.escape(message)) as error:
        edited(written(*lines))
    assert str(error.value.where) == f"model.py:{line}"


def test_the_technique_gives_the_diff_or_the_line(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(FILE)
    change = Sdpa().code(Workload.parse(f"{path}:make"))
    assert change is not None
    assert "+        mixed = torch.nn.functional.scaled_dot_product_attention" in change.diff
    path.write_text(written("mixed = (q @ k.mT + causal).softmax(-1) @ v"))
    change = Sdpa().code(Workload.parse(f"{path}:make"))
    assert change is not None
    assert not change.diff
    assert "F.scaled_dot_product_attention(q, k, v, attn_mask=mask" in change.note
