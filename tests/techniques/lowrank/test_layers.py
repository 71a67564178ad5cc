"""Layers as products of thin matrices: results, sizes and refusals."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from model_uses import check_uses
from slipstream.errors import (
    InvalidArgumentError,
    SlipstreamWarning,
    UnknownNameError,
    WorkloadError,
)
from slipstream.techniques.lowrank import (
    RankMonitor,
    Start,
    factorize,
    merge,
    plan,
    switch,
    truncate,
)
from slipstream.techniques.lowrank.factors import stable_rank
from slipstream_bench.systems.lowrank.models import PUBLISHED, ResNet18, resnet18_ranks, trained

pytestmark = pytest.mark.filterwarnings("ignore:.*have more parameters as products")
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}
LAYERS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(13, 7), (5, 13)),
    "no bias": (lambda: nn.Linear(7, 13, bias=False), (5, 7)),
    "conv": (lambda: nn.Conv2d(6, 8, 3, stride=2, padding=1, dilation=2, groups=2), (2, 6, 17, 17)),
    "conv1d": (
        lambda: nn.Conv1d(4, 6, 3, padding="same", padding_mode="circular"), (2, 4, 11)
    ),
    "lstm": (lambda: nn.LSTM(5, 6, 2, bidirectional=True, batch_first=True), (3, 4, 5)),
    "unbatched": (lambda: nn.LSTM(5, 6, bias=False), (4, 5)),
    "attention": (lambda: nn.MultiheadAttention(8, 2, batch_first=True), (3, 4, 8)),
    "other keys": (lambda: nn.MultiheadAttention(8, 2, kdim=8, vdim=8, bias=False), (3, 4, 8)),
}  # fmt: skip


def run(layer: Any, x: torch.Tensor) -> list[torch.Tensor]:
    made = layer(x, x, x) if hasattr(layer, "num_heads") else layer(x)
    if isinstance(made, tuple) and isinstance(made[1], tuple):
        return [made[0], *made[1]]
    return list(made) if isinstance(made, tuple) else [made]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", LAYERS)
def test_full_rank_is_the_identity_even_merged(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    make, shape = LAYERS[name]
    dense, x = make().to(dtype), torch.randn(shape, dtype=dtype)
    model: Any = nn.Sequential(copy.deepcopy(dense))
    factorize(model, 1.0, must_shrink=False, keep="none")
    assert type(model[0]) is not type(dense)
    for form in ("product", "merged"):
        for ours, theirs in zip(run(model[0], x), run(dense, x), strict=True):
            assert float(((ours - theirs).norm() / theirs.norm()).detach()) <= TOLERANCE[dtype], (
                form
            )
        merge(model)
    assert type(model[0]) is type(dense)


def test_attention_is_masked_as_in_torch() -> None:
    torch.manual_seed(0)
    dense: Any = nn.MultiheadAttention(8, 2, batch_first=True)
    model: Any = nn.Sequential(copy.deepcopy(dense))
    factorize(model, 1.0, must_shrink=False, keep="none")
    x, padding = torch.randn(3, 4, 8), torch.zeros(3, 4, dtype=torch.bool)
    padding[:, 3] = True
    causal = torch.triu(torch.ones(4, 4, dtype=torch.bool), 1)
    for settings in ({}, {"need_weights": False}, {"average_attn_weights": False}):
        masks = {"key_padding_mask": padding, "attn_mask": causal, **settings}
        ours, theirs = model[0](x, x, x, **masks), dense(x, x, x, **masks)
        torch.testing.assert_close(ours[0], theirs[0])
        torch.testing.assert_close(ours[1], theirs[1])


def test_an_encoder_takes_no_path_that_reads_dense_weights() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    dense = copy.deepcopy(model)
    factorize(model, 1.0, must_shrink=False, keep="none")
    x = torch.randn(3, 4, 8)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(x), dense.eval()(x))


def test_packed_sequences_equal_those_of_the_dense_lstm() -> None:
    torch.manual_seed(0)
    dense = nn.LSTM(5, 6, batch_first=True)
    model: Any = nn.Sequential(copy.deepcopy(dense))
    factorize(model, 1.0, must_shrink=False, keep="none")
    packed = pack_padded_sequence(torch.randn(2, 4, 5), torch.tensor([4, 2]), batch_first=True)
    ours, theirs = (pad_packed_sequence(module(packed)[0])[0] for module in (model[0], dense))
    torch.testing.assert_close(ours, theirs)
    ours.sum().backward()
    assert model[0].a_hh_l0.grad is not None


@pytest.mark.parametrize("randomised", [False, True])
def test_the_error_is_that_of_the_dropped_singular_values(randomised: bool) -> None:
    torch.manual_seed(0)
    weight = torch.randn(60, 90, dtype=torch.float64) * torch.logspace(0, -2, 90)
    values = torch.linalg.svdvals(weight).square()
    found = truncate(weight, 20, Start(randomised=randomised))
    lost = float((weight - found.b @ found.a).square().sum() / values.sum())
    assert found.lost == pytest.approx(lost, abs=1e-9)
    least = float(values[20:].sum() / values.sum())
    assert lost == pytest.approx(least, rel=0.04 if randomised else 1e-5)


def test_sampled_weights_keep_half_of_the_dropped_norm_on_request() -> None:
    torch.manual_seed(0)
    weight = torch.randn(60, 90, dtype=torch.float64)
    near, rescaled = (truncate(weight, 5, Start(keep_norm=keep)) for keep in (False, True))
    norms = [float(matrix.norm()) for matrix in (near.b @ near.a, weight, rescaled.b @ rescaled.a)]
    assert norms[2] == pytest.approx((norms[0] * norms[1]) ** 0.5)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name: str) -> None:
    make, ranks, before, after, *_ = PUBLISHED[name]
    with torch.device("meta"):
        model = make()
    report = plan(model, ranks(model))
    assert trained(model) == before
    assert before - (report.parameters_before - report.parameters) == after


def test_planned_layers_equal_the_resulting_ones() -> None:
    model = ResNet18()
    report = factorize(model, resnet18_ranks(model), start=Start(randomised=True))
    assert trained(model) == report.parameters == 3_336_138
    assert "█" in str(report.table().rows[5][1])
    assert report.table().columns[0].name == "Layer"


class Tied(nn.Module):
    """Two layers with one weight, one that is normalised, and one with a parametrisation."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)
        self.other.weight = self.one.weight
        self.odd = nn.utils.parametrizations.orthogonal(nn.Linear(8, 8))
        self.plain, self.last = nn.Linear(8, 8), nn.Linear(8, 8)


def test_unsupported_layers_are_an_error_or_stay_with_their_reason() -> None:
    model = Tied()
    wrong: dict[str, Any] = {
        "shared": {"one": 2}, "ParametrizedLinear is not a plain": {"odd": 2},
        "9 is not from 1 to 8": {"plain": 9}, "0 is not from 1 to 8": {"plain": 0},
        "0.0 is not a share": {"plain": 0.0},
    }  # fmt: skip
    for words, ranks in wrong.items():
        with pytest.raises(InvalidArgumentError, match=words) as raised:
            factorize(model, ranks)
        assert f"layer {next(iter(ranks))}" in str(raised.value)
    with pytest.raises(UnknownNameError, match="plain"):
        factorize(model, {"plane": 2})
    with pytest.raises(WorkloadError, match="only=x"):
        factorize(model, 2, only="x*")
    with torch.device("meta"):
        nothing = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    with pytest.raises(InvalidArgumentError, match=r"meta device.*\n.*layer 1"):
        factorize(nothing, 2)
    with pytest.raises(InvalidArgumentError, match="no fewer parameters"):
        factorize(nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))), 2)
    report = factorize(model, 2)
    assert [change.name for change in report.changed] == ["plain"]
    assert "shared" in {layer.name: layer.reason for layer in report.layers}["other"]


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_moments_are_projected_on_the_factors(kind: str) -> None:
    """At full rank, with square orthogonal factors, the dense moment is recovered."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6, bias=False), nn.Linear(6, 6))
    optimizer: Any = (
        torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        if kind == "sgd"
        else torch.optim.Adam(model.parameters(), 0.01)
    )
    model(torch.randn(4, 6)).square().sum().backward()
    optimizer.step()
    dense: Any = model[1].weight
    key = "momentum_buffer" if kind == "sgd" else "exp_avg"
    moment = optimizer.state[dense][key].clone()
    factorize(model, {"1": 6}, optimizer=optimizer, must_shrink=False)
    layer: Any = model[1]
    a, b = layer.first.weight, layer.second.weight
    torch.testing.assert_close(optimizer.state[a][key], b.detach().T @ moment)
    torch.testing.assert_close(optimizer.state[b][key], moment @ a.detach().T)
    trained_now = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert trained_now == {id(p) for p in model.parameters()}
    model(torch.randn(4, 6)).square().sum().backward()
    optimizer.step()


def test_moments_of_a_convolution_have_the_shapes_of_the_factors() -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3, groups=2), nn.Flatten(), nn.Linear(8, 2))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(2):
        model(torch.randn(4, 4, 3, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if len(optimizer.state) == 4:
            factorize(model, {"0": 2}, optimizer=optimizer)
    assert all(
        state["exp_avg"].shape == parameter.shape for parameter, state in optimizer.state.items()
    )


def test_a_compiled_model_runs_the_changed_layers() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
    compiled: Any = torch.compile(model, backend="eager")
    x = torch.randn(2, 16)
    before = compiled(x)
    again = switch(compiled, lambda inner: factorize(inner, 4))
    assert not torch.equal(again(x), before)
    torch.testing.assert_close(again(x), model(x))


def test_the_stable_rank_follows_from_the_singular_values() -> None:
    torch.manual_seed(0)
    weight = torch.randn(30, 50)
    values = torch.linalg.svdvals(weight).square()
    assert stable_rank(weight)[0] == pytest.approx(float(values.sum() / values[0]), rel=0.02)


def test_ranks_start_full_and_settle_once_weights_converge() -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
    monitor = RankMonitor(model, window=3)
    assert monitor.measure() == {"0": 32, "2": 32}
    with torch.no_grad():
        model[0].weight += 4 * torch.outer(torch.randn(32), torch.randn(32))
    for _ in range(8):
        assert not monitor.has_converged or len(monitor.history["0"]) > 4
        monitor.measure()
    assert monitor.has_converged
    assert monitor.ranks["0"] < 8 < monitor.ranks["2"]


def separable() -> nn.Sequential:
    """With a depthwise and a grouped convolution."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(4, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, groups=2), nn.AdaptiveAvgPool2d(1), nn.Flatten(-3),
        nn.Linear(32, 64), nn.Linear(64, 5),
    )  # fmt: skip


def encoder() -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 1)


@pytest.mark.parametrize(
    ("make", "shape"), [(separable, (3, 4, 8, 8)), (encoder, (3, 5, 16))]
)  # fmt: skip
def test_a_factorized_model_supports_common_uses_of_models(make: Any, shape: Any) -> None:
    def factorized() -> nn.Module:
        model: nn.Module = make()
        factorize(model, 0.25, keep="none")
        return model

    check_uses(factorized, torch.randn(shape))


def test_padded_batches_of_an_encoder_do_not_become_nested_tensors() -> None:
    model = encoder().eval()
    factorize(model, 0.25, keep="none")
    x, padding = torch.randn(3, 5, 16), torch.zeros(3, 5, dtype=torch.bool)
    padding[:, 4] = True
    expected = model(x, src_key_padding_mask=padding)
    with torch.no_grad():
        made = model(x, src_key_padding_mask=padding)
    torch.testing.assert_close(made[:, :4], expected[:, :4])


def test_a_depthwise_convolution_stays_dense_with_its_reason() -> None:
    report = factorize(separable(), 8)
    assert [change.name for change in report.changed] == ["3", "6"]
    assert report.layers[1].reason == "rank 8 is above its full rank of 1"


def test_a_second_call_leaves_first_and_last_layers_dense() -> None:
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
    assert len(factorize(model, 4).changed) == 2
    with pytest.raises(InvalidArgumentError, match=r"0: the first or last layer.*3: the first"):
        factorize(model, 4)


def test_layers_that_would_grow_are_named() -> None:
    with pytest.warns(SlipstreamWarning, match=r"2 layers have more.*0: 72 to 136"):
        factorize(
            nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), 8, must_shrink=False, keep="none"
        )


@pytest.mark.parametrize("rank", ["auto", True])
def test_a_rank_of_another_type_is_an_error(rank: Any) -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"neither a share[^\n]*\n.*layer 1(?s:.*)RankMonitor"
    ):
        factorize(nn.Sequential(*(nn.Linear(32, 32) for _ in range(3))), rank)


def test_hooks_and_frozen_weights_are_preserved_even_merged() -> None:
    model: Any = nn.Sequential(nn.Linear(32, 32), nn.MultiheadAttention(16, 2), nn.LSTM(16, 16))
    calls: list[int] = []
    handle = model[0].register_forward_hook(lambda *ignored: calls.append(1))
    for weight in (model[0].weight, model[1].in_proj_weight, model[2].weight_hh_l0):
        weight.requires_grad_(False)
    for form in ("product", "merged"):
        factorize(model, 0.25, keep="none") if form == "product" else merge(model)
        frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
        assert frozen == {
            "product": {
                "0.first.weight", "0.second.weight", "2.a_hh_l0", "2.b_hh_l0",
                *(f"1.{part}.{side}.weight" for part in "qkv" for side in ("first", "second")),
            },
            "merged": {"0.weight", "1.in_proj_weight", "2.weight_hh_l0"},
        }[form]  # fmt: skip
        model[0](torch.randn(2, 32))
    handle.remove()
    model[0](torch.randn(2, 32))
    assert calls == [1, 1]


@pytest.mark.parametrize("kind", ["weight_norm", "pruned", "gradient hook"])
def test_weights_set_or_watched_elsewhere_stay_dense(kind: str) -> None:
    model: Any = nn.Sequential(*(nn.Linear(32, 32) for _ in range(2)))
    if kind == "gradient hook":
        model[0].weight.register_hook(lambda gradient: gradient)
    elif kind == "pruned":
        prune.random_unstructured(model[0], "weight", 0.5)
    else:
        nn.utils.weight_norm(model[0])
    report = factorize(model, 4, keep="none")
    assert [change.name for change in report.changed] == ["1"]
    assert "gradient" in report.layers[0].reason or "at every call" in report.layers[0].reason
