"""The choice of a method for each table: within the budget, with measured or assumed losses."""

from __future__ import annotations

import copy
import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import slipstream as ss
from slipstream.errors import InvalidArgumentError, SlipstreamError, UnknownNameError
from slipstream.graph import Statistics, TableIds
from slipstream.provenance import Provenance
from slipstream.techniques.embedding.allocate import allocate, lower_hull
from slipstream.techniques.embedding.facts import shares_of
from slipstream.techniques.embedding.formats import FORMATS
from slipstream.techniques.embedding.formats.format import Choice, TableFacts, sizes, with_errors
from slipstream.techniques.embedding.modules import CompressedEmbedding
from slipstream.techniques.embedding.planning import MIN_ROWS, plan
from slipstream.techniques.embedding.tt_init import MIN_STD
from slipstream.techniques.embedding.weighting import relative_error


class Two(nn.Module):
    """A table whose rows have rank three, one of independent rows, and a small one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.item = nn.Embedding(400, 16, padding_idx=3)
        self.seen = nn.EmbeddingBag(300, 8, mode="sum")
        self.day = nn.Embedding(7, 8)
        self.top = nn.Linear(32, 1)
        with torch.no_grad():
            self.item.weight.copy_(torch.randn(400, 3) @ torch.randn(3, 16))

    def forward(self, item: Any, seen: Any, day: Any) -> torch.Tensor:
        made: torch.Tensor = self.top(
            torch.cat([self.item(item), self.seen(seen), self.day(day)], 1)
        )
        return made


def counts() -> dict[str, torch.Tensor]:
    return {"item": 1000 / torch.arange(1, 401), "seen": torch.ones(300)}


DENSE = (400 * 16 + 300 * 8) * 4


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("ratio", [2, 6, 40])
def test_a_plan_fits_its_budget_and_reports_its_size(trained: bool, ratio: float) -> None:
    model = Two()
    made = plan(model, counts(), ratio=ratio, trained=trained, least_rows=100)
    assert made.dense_bytes == DENSE
    assert made.nbytes <= made.budget == int(DENSE / ratio)
    assert made.basis is (Provenance.MEASURED if trained else Provenance.ASSUMED)
    fitting = [alternative for alternative in made.alternatives if alternative.error is not None]
    # Assumed losses are avoided: a plain smaller dimension is chosen first.
    plain_first = not trained and "lowdim" in {alternative.method for alternative in fitting}
    assert not plain_first or fitting[0].method == "lowdim"
    errors = [
        alternative.error for alternative in fitting[plain_first:] if alternative.error is not None
    ]
    assert errors == sorted(errors)
    assert made.method == fitting[0].method
    assert {alternative.method for alternative in made.alternatives} == {*FORMATS, "mixed"} - {
        "dense"
    }
    if not trained:
        assert {c.format for c in made.tables.values()}.isdisjoint(
            {"int8", "int4", "lowdim_int8", "lowdim_int4"}
        )
    new = made.apply(copy.deepcopy(model))
    assert isinstance(new.day, nn.Embedding)
    total = 0
    for name, choice in made.tables.items():
        module = new.get_submodule(name)
        if choice.format == "dense":
            continue
        assert isinstance(module, CompressedEmbedding)
        if choice.format != "robe":
            assert abs(module.nbytes - choice.nbytes) <= 8
            total += module.nbytes
    assert new(torch.arange(5), torch.arange(10).view(5, 2), torch.arange(5)).shape == (5, 1)


def test_predicted_losses_equal_those_of_the_modules() -> None:
    model, lookups = Two(), counts()
    for name in (
        "int8",
        "int4",
        "lowdim",
        "lowdim_int8",
        "lowdim_int4",
        "hash",
        "hot_hash",
        "tt",
        "hot_tt",
        "robe",
    ):
        made = plan(model, lookups, ratio=3, methods=[name], trained=True, least_rows=350)
        choice = made.tables["item"]
        if choice.format == "dense":
            made = plan(model, lookups, ratio=2.5, methods=[name], trained=True, least_rows=350)
            choice = made.tables["item"]
        assert choice.format == name
        written = made.apply(copy.deepcopy(model)).item.to_dense()  # type: ignore[operator, union-attr]
        error = relative_error(model.item.weight, written, lookups["item"])
        # Sizes between measured ones are interpolated linearly.
        assert error == pytest.approx(choice.error, rel=0.25, abs=2e-3), name


def test_low_rank_is_found_and_a_smaller_dimension_wins() -> None:
    made = plan(Two(), counts(), ratio=4, methods=["lowdim", "hash", "robe"], trained=True,
                least_rows=350)  # fmt: skip
    assert made.method == "lowdim"
    assert made.tables["item"].format == "lowdim"
    assert made.tables["item"].error < 1e-9
    assert made.alternatives[0].method == "lowdim"


def test_measured_scores_decide() -> None:
    model, lookups = Two(), counts()
    requested: list[str] = []

    def evaluate(copied: nn.Module) -> float:
        kind = type(copied.item).__name__
        requested.append(kind)
        with torch.no_grad():
            copied.top.weight.zero_()  # the user's model is unchanged
        return {"ROBEEmbedding": 0.9, "TableEmbedding": 0.5}.get(kind, 0.1)

    made = plan(
        model, lookups, ratio=8, methods=["lowdim", "robe"], evaluate=evaluate, least_rows=350
    )
    assert made.method == "robe"
    assert made.alternatives[0].score == 0.9
    assert len(requested) == 3
    assert bool(model.top.weight.any())
    assert type(model.item) is nn.Embedding
    assert "score 0.9" in str(made)


def test_a_smaller_dimension_is_always_among_the_alternatives() -> None:
    model = Two()
    made = plan(model, counts(), ratio=4, methods=["hash"], least_rows=350)
    assert made.method == "hash"
    lowdim = next(
        alternative for alternative in made.alternatives if alternative.method == "lowdim"
    )
    assert lowdim.error is not None
    assert "lowdim" in str(made)
    assert re.search(r"\bnot\b.*\brequested\b", str(made))
    scores = {"HashEmbedding": 0.3, "TableEmbedding": 0.6}

    def evaluate(copied: nn.Module) -> float:
        kind = "TableEmbedding" if "dim=" in repr(copied.item) else "HashEmbedding"
        return scores[kind]

    judged = plan(model, counts(), ratio=4, methods=["hash"], evaluate=evaluate, least_rows=350)
    assert judged.method == "lowdim"
    tight = plan(model, counts(), ratio=200, methods=["hash"], least_rows=350)
    assert all(alternative.method != "lowdim" for alternative in tight.alternatives)


def test_an_optimizer_trains_the_new_parameters() -> None:
    model = Two()
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    plan(model, counts(), ratio=5, methods=["lowdim"], least_rows=100).apply(model, optimizer)
    own = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(own) == sorted(map(id, model.parameters()))
    ids = torch.randint(0, 300, (64,))
    target = torch.randn(64)

    def step() -> float:
        loss = (model(ids, ids[:, None], ids % 7)[:, 0] - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    first = step()
    assert min(step() for _ in range(60)) < 0.3 * first


def test_plans_are_saved(tmp_path: Path) -> None:
    model = Two()
    made = plan(model, counts(), ratio=5, least_rows=100)
    made.save(tmp_path / "plan.json")
    again = ss.embedding.TablePlan.load(tmp_path / "plan.json")
    assert again.tables == made.tables
    assert again.alternatives == made.alternatives
    first, other = made.apply(copy.deepcopy(model)), again.apply(copy.deepcopy(model))
    assert {k: v.shape for k, v in first.state_dict().items() if hasattr(v, "shape")} == {
        k: v.shape for k, v in other.state_dict().items() if hasattr(v, "shape")
    }
    coded = plan(model, ratio=3, methods=["int8"], trained=True, least_rows=350)
    coded.save(tmp_path / "coded.json")
    loaded = ss.embedding.TablePlan.load(tmp_path / "coded.json")
    with pytest.raises(InvalidArgumentError, match="int8"):
        loaded.apply(copy.deepcopy(model))
    loaded.converting(model).apply(model)
    for text in ("", "[]", "{}", '{"version": 2}', '{"version": 1, "tables": {"a": {"way": "x"}}}'):
        (tmp_path / "wrong.json").write_text(text)
        with pytest.raises(InvalidArgumentError, match="not a plan"):
            ss.embedding.TablePlan.load(tmp_path / "wrong.json")


def test_rows_of_a_saved_plan_keep_their_signs(tmp_path: Path) -> None:
    model = Two()
    made = plan(model, counts(), ratio=5, methods=["robe"], least_rows=100)
    assert made.apply(copy.deepcopy(model)).item.pool.sign is False  # type: ignore[union-attr]
    made.save(tmp_path / "plan.json")
    assert ss.embedding.TablePlan.load(tmp_path / "plan.json") == made
    payload = json.loads((tmp_path / "plan.json").read_text())
    del payload["sign"]  # in the format of plans from when all rows had signs
    (tmp_path / "plan.json").write_text(json.dumps(payload))
    older = ss.embedding.TablePlan.load(tmp_path / "plan.json")
    assert older.apply(model).item.pool.sign is True  # type: ignore[union-attr]


def test_cached_rows_of_a_train_are_the_most_frequent() -> None:
    lookups = {"item": torch.ones(400).scatter(0, torch.arange(100, 116), 1e6)}
    for trained in (False, True):
        model = Two()
        made = plan(model, lookups, ratio=2, methods=["hot_tt"], trained=trained, least_rows=350)
        hot = made.tables["item"].settings["hot"]
        assert isinstance(hot, tuple)
        assert {*range(100, 116)} <= {*hot}
        item: Any = made.apply(copy.deepcopy(model)).item
        assert item.nbytes == made.tables["item"].nbytes
        assert sorted(item.hot.ids.tolist()) == list(hot)
        if trained:
            ids = torch.tensor(hot)
            assert torch.equal(item.materialize(ids), model.item.weight[ids])
        item(torch.tensor([100])).sum().backward()
        assert bool(item.hot.weight.grad.any())
        assert not any(bool(core.grad.any()) for core in item.cores)
    assert not list(FORMATS["hot_tt"].choices(TableFacts("x", 5000, 8)))  # nothing was counted


def test_a_train_starts_far_enough_from_zero_to_be_trained() -> None:
    model = Two()
    with torch.no_grad():
        model.item.weight.mul_(1e-4)
    made = plan(model, counts(), ratio=2, methods=["tt"], least_rows=350)
    item: Any = made.apply(model).item
    assert float(item.to_dense().std()) == pytest.approx(MIN_STD, rel=0.3)


def test_allocation_is_as_good_as_the_optimum_on_the_hull() -> None:
    torch.manual_seed(0)
    for seed in range(20):
        draw = torch.Generator().manual_seed(seed)
        choices = [
            [
                Choice("x", {"n": n}, int(torch.randint(1, 60, (1,), generator=draw)),
                       float(torch.rand(1, generator=draw)))
                for n in range(5)
            ]
            for _ in range(4)
        ]  # fmt: skip
        budget = 90
        taken = allocate(choices, [1.0, 2.0, 1.0, 0.5], budget)
        weights = [1.0, 2.0, 1.0, 0.5]

        def loss(found: Any, weights: list[float] = weights) -> float:
            return sum(w * choice.loss for w, choice in zip(weights, found, strict=True))

        possible = [
            found for found in product(*choices) if sum(choice.nbytes for choice in found) <= budget
        ]
        if not possible:
            assert taken is None
            continue
        assert taken is not None
        assert sum(choice.nbytes for choice in taken) <= budget
        best = min(map(loss, possible))
        # The gap is less than one step of a hull.
        step = max(
            (w * (a.loss - b.loss) for w, own in zip(weights, choices, strict=True)
             for a, b in zip(lower_hull(own), lower_hull(own)[1:], strict=False)), default=0.0,
        )  # fmt: skip
        assert best <= loss(taken) <= best + step + 1e-12


def test_uses_shares_from_a_recording() -> None:
    ids = TableIds("model.item", 10, 4, 4, lookups=20, distinct=4, hot_ids=(7, 2, 0, 9),
                   hot_counts=(10, 6, 2, 2), top_share=(0.5, 0.8, 1.0), frequency=(0, 2, 1, 1),
                   blocks=(4.0,))  # fmt: skip
    shares = shares_of(ids)
    assert float(shares.sum()) == pytest.approx(1)
    assert shares.argmax() == 7
    assert shares[1] == shares[3] < shares[0]
    made = plan(Two(), Statistics(recorded=("ids",), ids=()), ratio=3, least_rows=100)
    assert made.nbytes <= made.budget


def test_sizes_and_errors_are_interpolated() -> None:
    every = sizes(1000, 10)
    assert every == sorted(every, reverse=True)
    assert every[0] < 1000
    assert every[-1] >= 10
    requested: list[int] = []

    def measured(size: int) -> float:
        requested.append(size)
        return 1 / size

    found = list(with_errors(measured, every))
    assert [size for size, _ in found] == every
    assert len(requested) < len(every) / 3
    for size, error in found:
        assert 1 / size <= error + 1e-12 <= 1.2 / size + 1e-12


def test_a_dimension_without_three_factors_has_no_train() -> None:
    assert not list(FORMATS["tt"].choices(TableFacts("x", 5000, 7)))
    assert list(FORMATS["tt"].choices(TableFacts("x", 5000, 8)))


def test_invalid_arguments_are_named() -> None:
    model = Two()
    cases: list[tuple[str, Any]] = [
        ("budget", {}),
        ("budget", {"budget": 10**5, "ratio": 2}),
        ("budget", {"budget": 0}),
        ("budget", {"budget": 3}),
        ("budget", {"budget": "many"}),
        ("ratio", {"ratio": 0.5}),
        ("ratio", {"ratio": "8"}),
        ("methods", {"ratio": 2, "methods": "lowdim"}),
        ("id_stats", {"ratio": 2, "id_stats": [3, 4]}),
        ("id_stats", {"ratio": 2, "id_stats": {"item": "often"}}),
        ("least_rows", {"ratio": 2, "least_rows": 0.5}),
        ("evaluate", {"ratio": 2, "evaluate": lambda copied: None}),
        ("evaluate", {"ratio": 2, "evaluate": lambda copied: float("nan")}),
        ("ratio", {"ratio": float("nan")}),
        ("model", {"ratio": 2, "least_rows": MIN_ROWS}),
        ("id_stats", {"ratio": 2, "id_stats": {"item": torch.ones(3)}}),
        ("id_stats", {"ratio": 2, "id_stats": {"item": -torch.ones(400)}}),
        ("id_stats", {"ratio": 2, "id_stats": Statistics()}),
    ]
    for argument, how in cases:
        with pytest.raises(InvalidArgumentError) as caught:
            plan(model, **{"least_rows": 100, **how})
        assert caught.value.argument == argument, how
    for how in ({"methods": ["lowdin"]}, {"id_stats": {"items": torch.ones(3)}}):
        with pytest.raises(UnknownNameError):
            plan(model, ratio=2, least_rows=100, **how)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match=r"^model: .*\blist\b"):
        plan([model], ratio=2)  # type: ignore[arg-type]
    broken = Two()
    with torch.no_grad():
        broken.item.weight[5, 5] = float("nan")
    with pytest.raises(InvalidArgumentError, match=r"^model: .*'item'.*NaN"):
        plan(broken, ratio=2, least_rows=100, trained=True)
    made = plan(model, ratio=4, least_rows=100)
    with pytest.raises(SlipstreamError, match="cannot be written"):
        made.save(Path("no folder") / "plan.json")
    assert "less): dense" in str(plan(model, budget="1GiB", least_rows=100))
    with pytest.raises(InvalidArgumentError, match="not an embedding table"):
        made.apply(nn.Linear(2, 2))
    other = Two()
    other.item = nn.Embedding(401, 16)
    with pytest.raises(InvalidArgumentError, match="401"):
        made.apply(other)
