"""only=GLOB and except=GLOB select the same modules in predictions and models."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from slipstream.durations import Durations
from slipstream.errors import InvalidArgumentError, WorkloadError
from slipstream.surgery import ModuleSelection
from slipstream.technique import Context, parse
from slipstream.workload import BuiltWorkload, build_from
from tiny_models import record


def test_selects_included_names_without_excluded_ones() -> None:
    selection = ModuleSelection("blocks.*", "*.norm")
    assert "blocks.0.linear" in selection
    assert "blocks.0.norm" not in selection
    assert "head" not in selection


def test_selects_a_model_that_is_itself_the_module() -> None:
    assert "" in ModuleSelection()
    assert "" in ModuleSelection(except_="*.norm")
    assert ModuleSelection().no_match_reason([""]) is None
    table = nn.EmbeddingBag(30_000, 8)
    batch = torch.randint(0, 30_000, (64, 4)), torch.zeros(64, 8)
    optimizer = torch.optim.SGD(table.parameters(), 0.1)
    built = build_from((table, batch, nn.functional.mse_loss, optimizer), (), 0, "a table")
    graph = record(built)
    (technique,) = parse("tt_embedding:4")
    assert technique.why_not(graph) is None


def test_refuses_patterns_without_match_and_suggests_names() -> None:
    names = ["blocks.0.drop", "blocks.1.drop", "head"]
    assert ModuleSelection().no_match_reason(names) is None
    assert ModuleSelection("blocks.*").no_match_reason(names) is None
    assert "near: blocks.0.drop" in str(ModuleSelection("block.0.drop").no_match_reason(names))
    assert re.search(
        r"\bexcept=hed\b.*\bnone\b", str(ModuleSelection(except_="hed").no_match_reason(names))
    )
    assert "leaves none" in str(ModuleSelection("head", "h*").no_match_reason(names))


class Several(nn.Module):
    """Two modules of every kind that techniques replace."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.user, self.item = nn.Embedding(3000, 16), nn.Embedding(3000, 16)
        self.first, self.last = self._block(), self._block()

    def _block(self) -> nn.Sequential:
        if self.kind == "dropout":
            return nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5))
        if self.kind == "conv_bn_fold":
            return nn.Sequential(nn.Conv1d(16, 16, 1), nn.BatchNorm1d(16))
        return nn.Sequential(nn.Linear(16, 16))

    def forward(self, ids: torch.Tensor) -> Any:
        x = self.user(ids) + self.item(ids)
        x = x.unsqueeze(-1) if self.kind == "conv_bn_fold" else x
        return self.last(self.first(x))


def parts(kind: str) -> Any:
    torch.manual_seed(0)
    model, ids = Several(kind), torch.randint(0, 3000, (32,))
    if kind in ("conv_bn_fold", "lowbit"):
        return model.eval(), ids
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return model, ids, lambda out: out.square().mean(), optimizer


CASES = [
    ("dropout", "dropout", "first.1", "last.1"),
    ("conv_bn_fold", "conv_bn_fold", "first.1", "last.1"),
    ("embedding", "robe_embedding:10,rows=1000", "user", "item"),
    ("embedding", "tt_embedding:2,rows=1000", "user", "item"),
    ("embedding", "embedding_plan:10,rows=1000", "user", "item"),
]


def with_settings(text: str, settings: str) -> str:
    return f"{text}{',' if ':' in text else ':'}{settings}"


@pytest.mark.parametrize(("kind", "text", "included", "excluded"), CASES)
@pytest.mark.parametrize("setting", ["only={included}", "except={excluded}"])
def test_predict_and_apply_agree(
    kind: str, text: str, included: str, excluded: str, setting: str, tmp_path: Path
) -> None:
    (technique,) = parse(with_settings(text, setting.format(included=included, excluded=excluded)))
    before: BuiltWorkload = build_from(parts(kind), (), 0, kind)
    graph = record(before)
    classes = {name: type(module) for name, module in before.model.named_modules()}
    assert technique.why_not(graph) is None
    (every,) = parse(text)
    context = Context(Durations(threads=1, path=tmp_path / "none.db"))
    some, all_ = (t.predict(graph, context).edits[-1].what for t in (technique, every))
    assert some != all_
    after: BuiltWorkload = build_from(parts(kind), (technique,), 0, kind)
    changed = {n for n, m in after.model.named_modules() if classes.get(n) is not type(m)}
    assert included in changed
    assert excluded not in changed


@pytest.mark.parametrize(("kind", "text", "included", "excluded"), CASES)
def test_predict_and_apply_refuse_patterns_without_match(
    kind: str, text: str, included: str, excluded: str
) -> None:
    (technique,) = parse(with_settings(text, f"only={included}x"))
    reason = str(technique.why_not(record(build_from(parts(kind), (), 0, kind))))
    assert f"only={included}x matches none" in reason
    assert included in reason
    with pytest.raises(WorkloadError, match=f"only={included}x"):
        build_from(parts(kind), (technique,), 0, kind)


def test_low_bit_layers_follow_the_selection() -> None:
    graph = record(build_from(parts("lowbit"), (), 0, "lowbit"))
    (missing,) = parse("lowbit:w8a8,only=frist.*")
    assert "near: first.0" in str(missing.why_not(graph))
    with pytest.raises((InvalidArgumentError, WorkloadError), match="frist"):
        build_from(parts("lowbit"), (missing,), 0, "lowbit")


def test_spec_omits_defaults() -> None:
    assert str(parse("dropout")[0]) == "dropout"
    (some,) = parse("dropout:only=first.*")
    assert str(some) == "dropout:only=first.*"
    assert parse(str(some)) == (some,)
