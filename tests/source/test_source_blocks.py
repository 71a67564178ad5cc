"""Checkpointing by an edit of the model's forward: what is recomputed, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.source import (
    AlreadyAppliedError,
    EditLocationError,
    Source,
    checkpoint_blocks,
    locate,
)
from slipstream.techniques.checkpointing import Checkpointing
from slipstream.workload import Workload, build_from

FILE = """\
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x, scale=1.0):
        return x + scale * self.down(self.drop(torch.relu(self.up(x))))


class Net(nn.Module):
    def __init__(self, width=8, layers=3):
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(layers)])
        self.row = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.head = nn.Linear(width, 11)
        for block in self.blocks:
            nn.init.zeros_(block.up.bias)

    def forward(self, tokens):
        x = self.embed(tokens)
        for i, block in enumerate(self.blocks):
            x = block(x, scale=0.5)  # one
        y = self.row(x * 2)
        return self.head(y)


def make():
    model = Net().train()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    tokens = torch.arange(24).reshape(4, 6) % 11
    return model, (tokens, tokens), loss, optimizer


def loss(output, tokens):
    return nn.functional.cross_entropy(output.flatten(0, 1), tokens.flatten())
"""


def edited(text: str) -> Source:
    return checkpoint_blocks(locate(Source.of(text.encode(), Path("model.py")), "make"))


def losses(text: str, *techniques: Any) -> tuple[list[float], int]:
    """Return the losses of the first steps, and how often blocks ran."""
    found: dict[str, Any] = {"__name__": "model"}
    exec(compile(text, "model.py", "exec"), found)
    torch.manual_seed(0)
    built = build_from(found["make"](), techniques, 0, "model")
    calls = []
    for module in built.model.modules():
        if type(module).__name__ == "Block":
            module.up.register_forward_hook(lambda *_: calls.append(1))
    return [float(built.step()) for _ in range(3)], len(calls)


def test_only_the_call_is_edited() -> None:
    lines = edited(FILE).diff().splitlines()
    assert [line for line in lines if line[:1] in "+-" and line[:3] not in ("---", "+++")] == [
        "-            x = block(x, scale=0.5)  # one",
        "-        y = self.row(x * 2)",
        "+            x = torch.utils.checkpoint.checkpoint("
        "block, x, scale=0.5, use_reentrant=False)  # one",
        "+        y = x * 2",
        "+        for layer in self.row:",
        "+            y = torch.utils.checkpoint.checkpoint(layer, y, use_reentrant=False)",
    ]


def test_it_computes_the_same_as_the_technique() -> None:
    plain, once = losses(FILE)
    by_hand, twice = losses(edited(FILE).text)
    applied, technique_calls = losses(FILE, Checkpointing())
    assert by_hand == plain == applied
    assert (once, twice, technique_calls) == (18, 36, 36)


def test_only_the_outermost_blocks_are_checkpointed() -> None:
    text = FILE.replace("self.drop = nn.Dropout(0.1)\n", """self.drop = nn.Dropout(0.1)
        self.parts = nn.ModuleList([Part() for _ in range(2)])
""").replace("        return x + scale", """        for part in self.parts:
            x = part(x)
        return x + scale""")  # fmt: skip
    part = "class Part(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    part += "        self.layer = nn.Linear(8, 8)\n\n    def forward(self, x):\n"
    part += "        return self.layer(x)\n\n\n"
    text = text.replace("class Block", part + "class Block", 1)
    assert "x = part(x)" in edited(text).text
    assert edited(text).text.count("checkpoint(") == 2


@pytest.mark.parametrize(
    ("old", "new", "message", "line"),
    [
        ("x = block(x, scale=0.5)", "x = block(x) + block.down.bias", "only call 'block'", 28),
        ("x = block(x, scale=0.5)", "x = block(*[x])", "arguments cannot", 28),
        ("x = block(x, scale=0.5)", "x = block(**{'x': x})", "arguments cannot", 28),
        ("x = block(x, scale=0.5)", "x = block(x, debug=1)", "checkpoint also takes", 28),
        ("in enumerate(self.blocks)", "in zip(x, self.blocks)", r"self\.blocks", 27),
        ("in enumerate(self.blocks)", "in enumerate(self.blocks[1:])", r"self\.blocks", 27),
        ("y = self.row(x * 2)", "y = -self.row(x * 2)", r"self\.row", 29),
        ("y = self.row(x * 2)", "y = self.row(self.row(x))", r"self\.row", 15),
        ("return self.head(y)", "return self.head(y + len(self.blocks))", r"self\.blocks", 15),
        ("model = Net().train()", "model = nn.Sequential(Net())", "class", 34),
        ("[Block(width) for", "[make_block(width) for", r"self\.blocks", 19),
        ("        self.head = ", "        self.a = Block(width)\n        self.b = Block(width)\n"
         "        self.head = ", r"\bNet\b.*\bBlock\b", 22),
    ],
)  # fmt: skip
def test_uncertain_code_is_refused(old: str, new: str, message: str, line: int) -> None:
    assert old in FILE
    with pytest.raises(EditLocationError, match=message) as error:
        edited(FILE.replace(old, new, 1))
    assert str(error.value.where) == f"model.py:{line}"


def test_a_model_without_blocks_is_refused() -> None:
    text = FILE.replace("nn.ModuleList([Block(width) for", "list([Block(width) for")
    text = text.replace("nn.Sequential(*(Block(width)", "tuple((Block(width)")
    with pytest.raises(EditLocationError, match=r"nn\.ModuleList"):
        edited(text)


def test_editing_twice_equals_editing_once() -> None:
    with pytest.raises(AlreadyAppliedError, match="checkpointed"):
        edited(edited(FILE).text.replace("for layer in self.row:", "for layer in self.blocks:"))


def test_the_technique_gives_the_diff_or_the_lines(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(FILE)
    workload = Workload.parse(f"{tmp_path / 'model.py'}:make")
    change = Checkpointing().code(workload)
    assert change is not None
    assert "checkpoint(block, x" in change.diff
    change = Checkpointing(only="blocks.*").code(workload)
    assert change is not None
    assert not change.diff
    assert "does not determine which modules" in change.note
    assert "checkpoint(block, x, use_reentrant=False)" in change.note
