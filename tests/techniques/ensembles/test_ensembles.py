"""Planted redundancy is found and removed exactly; ensembles equal their members."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from model_uses import check_uses
from slipstream.errors import (
    InvalidArgumentError,
    SlipstreamError,
    SlipstreamWarning,
    WorkloadError,
)
from slipstream.techniques.ensembles import (
    Ensemble,
    StackedEnsemble,
    build,
    calibration,
    compact,
    compare,
    detection,
    evaluate,
    redundancy,
    training,
)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 9), nn.Tanh(), nn.Linear(9, 3))


def cnn() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(12, 9, 3), nn.Tanh(), nn.Flatten(), nn.Linear(9 * 4, 3),
    )  # fmt: skip


class Block(nn.Module):
    """A residual block with functional operations."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm = nn.Conv2d(2, 12, 3, padding=1), nn.BatchNorm2d(12)
        self.two, self.out = nn.Conv2d(12, 2, 3, padding=1), nn.Linear(2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.two(torch.relu(self.norm(self.one(x))))
        made: torch.Tensor = self.out(x.mean((2, 3)))
        return made


def transformer() -> nn.Module:
    return nn.TransformerEncoder(
        nn.TransformerEncoderLayer(6, 2, 12, activation="relu", batch_first=True), 1
    )


def plant(layer: Any, norm: Any) -> None:
    """Plant a duplicate, a scaled copy, a constant and a dead unit in a layer."""
    with torch.no_grad():
        weight, bias = layer.weight, layer.bias
        bias += 0.5  # so that no other unit of a random layer is dead
        weight[3], bias[3] = weight[0], bias[0]
        weight[4], bias[4] = 2.5 * weight[1], 2.5 * bias[1]
        weight[5], bias[5] = 0.0, 0.7
        weight[6], bias[6] = 0.0, -1.0
        if isinstance(norm, nn.BatchNorm2d):
            norm.running_mean.zero_()
            norm.running_var.fill_(1.0)


@pytest.mark.parametrize(("make", "shape"), [(mlp, (6,)), (cnn, (2, 8, 8))])
def test_planted_units_are_removed_and_outputs_stay(make: Any, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = make().eval()
    plant(model[0], model[1])
    batches = list(torch.randn(8, 64, *shape))
    before = copy.deepcopy(model.state_dict())
    found = compact(model, batches)
    assert (found.layers[0].dead, found.layers[0].dependent) == (2, 2)
    assert (found.layers[1].dead, found.layers[1].dependent) == (0, 0)
    x = torch.randn(50, *shape)
    torch.testing.assert_close(found.model(x), model(x), rtol=1e-5, atol=1e-5)
    assert found.parameters < 1
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("kind", ["block", "transformer"])
def test_units_of_a_block_and_of_a_feed_forward_layer_are_removed(kind: str) -> None:
    torch.manual_seed(0)
    if kind == "block":
        model: Any = Block().eval()
        plant(model.one, model.norm)
        shape: tuple[int, ...] = (2, 8, 8)
    else:
        model = transformer().eval()
        plant(model.layers[0].linear1, None)
        shape = (5, 6)
    found = compact(model, list(torch.randn(8, 64, *shape)))
    # The block's second convolution pads with zeros, so one constant has to stay.
    assert found.layers[0].dead == (1 if kind == "block" else 2)
    assert found.layers[0].dependent == 2
    x = torch.randn(50, *shape)
    torch.testing.assert_close(found.model(x), model(x), rtol=1e-5, atol=1e-5)
    assert found.parameters < 1


def test_constants_before_a_padded_convolution_have_no_effect_beyond_its_edge() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 8, 3), nn.Tanh(), nn.Conv2d(8, 3, 3, padding=1)).eval()
    with torch.no_grad():
        model[0].weight[2:4] = 0.0
        model[0].weight[4] = model[0].weight[5]  # and not its bias: no sum of others after Tanh
    found = compact(model, list(torch.randn(8, 16, 2, 9, 9)))
    assert (found.layers[0].dead, found.layers[0].dependent) == (1, 0)
    x = torch.randn(4, 2, 9, 9)
    torch.testing.assert_close(found.model(x), model(x), rtol=1e-5, atol=1e-5)


def test_tied_weights_and_residual_sums_are_preserved() -> None:
    model: Any = nn.Sequential(
        nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)
    )
    model[2].weight = model[4].weight
    with pytest.raises(WorkloadError, match="no layer"):
        compact(model, [torch.zeros(3, 4)])


def test_a_unit_is_not_a_large_multiple_of_a_nearly_constant_one() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    with torch.no_grad():
        # The first is the second less 200 times the third, or nearly the second alone.
        model[0].weight.copy_(torch.tensor([[1.0, 0.0], [1.0, 0.2], [0.0, 0.001]]))
        model[0].bias.fill_(10.0)
        model[2].weight.fill_(1.0)
    torch.manual_seed(0)
    compacted = compact(model, [torch.randn(512, 2)], 0.93)
    assert [(layer.units, layer.dependent) for layer in compacted.layers] == [(3, 1)]
    assert float(compacted.model.get_submodule("2").weight.detach().abs().max()) < 2.5
    assert compact(model, [torch.randn(512, 2)], 1.0).layers[0].dependent == 1


def test_a_lower_correlation_threshold_removes_more() -> None:
    torch.manual_seed(0)
    batches = list(torch.randn(8, 64, 6))
    model = mlp()
    model[1] = nn.Tanh()  # of which no unit is dead
    sizes = [compact(model, batches, c).parameters for c in (1.0, 0.95, 0.8)]
    assert sizes[0] == 1.0
    assert sizes == sorted(sizes, reverse=True)
    assert sum(layer.dependent for layer in redundancy(model, batches, 0.8)) > 0


def fit(x: torch.Tensor, y: torch.Tensor) -> Any:
    def train(model: nn.Module, share: float, seed: int) -> None:
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        for _ in range(round(100 * share)):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

    return train


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(300, 6)
    return x, (x[:, 0] * x[:, 1] > 0).long() + (x[:, 2] > 1).long()


@pytest.mark.parametrize("method", ["independent", "peers", "snapshot", "trunk"])
def test_members_differ_and_together_are_no_worse(method: Any) -> None:
    x, y = samples()
    train = fit(x[:200], y[:200])
    made = build(mlp(), train, members=3, method=method, sample=[x[:200]], trunk=2)
    assert len(made) == 3
    quality = evaluate(made, x[200:], y[200:])
    alone = [evaluate(Ensemble([member], made.trunk), x[200:], y[200:]) for member in made.members]
    assert quality.disagreement > 0
    assert quality.nll <= sum(result.nll for result in alone) / 3  # the logarithm is concave
    assert alone[0].disagreement == 0
    torch.testing.assert_close(made(x).sum(-1), torch.ones(300))


def test_members_with_shared_weights_are_trained_together() -> None:
    x, y = samples()
    epochs: list[float] = []

    def train(model: nn.Module, share: float, seed: int) -> None:
        fit(x[:201], y[:201])(model, share, seed)
        epochs.append(share)

    made = build(mlp(), train, members=3, method="batch")
    assert epochs == [1.0]
    assert len(made) == 3
    assert evaluate(made, x[201:], y[201:]).disagreement > 0
    weights = sum(p.numel() for p in mlp().parameters())
    assert sum(p.numel() for p in made.parameters()) < 3 * weights


def test_members_trained_before_a_kill_are_not_trained_again(tmp_path: Any) -> None:
    x, y = samples()
    model, calls = mlp(), []

    def train(model: nn.Module, share: float, seed: int) -> None:
        calls.append(seed)
        if len(calls) == 3:
            raise KeyboardInterrupt
        fit(x, y)(model, share, seed)

    def run(directory: Any) -> Ensemble:
        return build(model, train, members=4, sample=[x], directory=directory)

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path)
    resumed = run(tmp_path)
    assert calls == [0, 1, 2, 2, 3]
    torch.testing.assert_close(run(None)(x), resumed(x), rtol=0, atol=0)
    (tmp_path / "peers-1.pt").write_bytes(b"something else")
    with pytest.raises(SlipstreamError, match="not a member"):
        run(tmp_path)


def test_methods_are_rows_of_one_table() -> None:
    x, y = samples()
    found = compare(
        mlp(), fit(x[:200], y[:200]), x[200:], y[200:], members=2,
        methods=("independent", "peers", "snapshot"), sample=[x[:200]],
    )  # fmt: skip
    assert [row.method for row in found.rows] == ["one model", "independent", "peers", "snapshot"]
    assert [row.parameters for row in found.rows[:2]] == [1.0, 2.0]
    assert found.rows[1].time > 1.2
    assert len(found.table().rows) == 4


def test_calibration_and_detection_match_counts_by_hand() -> None:
    class Sure(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([x, -x], -1)

    ensemble = Ensemble([Sure()])
    x = torch.tensor([[3.0], [3.0], [-3.0], [-3.0]])
    bins = calibration(ensemble, x, torch.tensor([0, 1, 1, 1]), bins=4)
    assert [interval.count for interval in bins] == [0, 0, 0, 4]
    assert bins[-1].accuracy == 0.75
    assert bins[-1].confidence == pytest.approx(float(torch.sigmoid(torch.tensor(6.0))))
    assert evaluate(ensemble, x, torch.tensor([0, 1, 1, 1])).ece == pytest.approx(
        bins[-1].confidence - 0.75
    )

    class First(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tensor([1.0, 0.0]).expand(len(x), 2)

    pair = Ensemble([Sure(), First()])
    x = torch.tensor([[3.0], [-3.0], [-3.0], [-3.0]])
    assert evaluate(pair, x, torch.tensor([0, 1, 1, 1])).disagreement == 0.75
    assert detection(ensemble, torch.tensor([[2.0], [1.0]]), torch.tensor([[1.0], [0.5]])) == 0.875


def test_members_are_exported_as_one_graph(tmp_path: Any) -> None:
    pytest.importorskip("onnxruntime")
    from slipstream import runtimes

    torch.manual_seed(0)
    model = cnn().eval()
    peers = [cnn().eval() for _ in range(2)]
    ensemble = Ensemble(
        [nn.Sequential(*model[4:]), *(nn.Sequential(*p[4:]) for p in peers)], model[:4]
    ).eval()
    x = torch.randn(5, 2, 8, 8)
    for exported in (ensemble, ensemble.stacked()):
        path = exported.export_onnx(tmp_path / "members.onnx", x[:2])
        with runtimes.load(str(path)) as loaded:
            (made,) = loaded.run([x.numpy()])
        torch.testing.assert_close(torch.from_numpy(made), ensemble(x), rtol=1e-5, atol=1e-5)


def test_stacked_members_equal_separate_ones() -> None:
    torch.manual_seed(0)
    ensemble = Ensemble([cnn().eval() for _ in range(3)]).eval()
    together = ensemble.stacked()
    assert [type(member) for member in together.members] == [StackedEnsemble]
    x = torch.randn(7, 2, 8, 8)
    torch.testing.assert_close(
        together.probabilities(x), ensemble.probabilities(x), rtol=1e-5, atol=1e-5
    )
    mixed = Ensemble([mlp(), mlp(), nn.Sequential(nn.Linear(6, 3))])
    assert len(mixed.stacked()) == 3
    assert len(mixed.stacked().members) == 2


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: build(mlp(), lambda *_: None, members=0), InvalidArgumentError, "less than 1"),
        (lambda: compact(mlp(), []), InvalidArgumentError, "is empty"),
        (lambda: compact(mlp(), [torch.zeros(1, 6)], 1.5), InvalidArgumentError, "not in"),
        (lambda: compact(nn.Linear(2, 2), [torch.zeros(1, 2)]), WorkloadError, "Sequential|Linear"),
        (
            lambda: build(mlp(), lambda *_: None, method="dropout"),
            InvalidArgumentError,
            "not one of",
        ),
        (
            lambda: build(mlp(), lambda *_: None, method="trunk", trunk=5),
            InvalidArgumentError,
            "with more than",
        ),
        (
            lambda: StackedEnsemble([mlp(), nn.Sequential(nn.Linear(6, 3))]),
            InvalidArgumentError,
            "shapes",
        ),
        (lambda: StackedEnsemble([nn.GRU(2, 2)] * 2), WorkloadError, "GRU"),
        (
            lambda: compact(nn.Sequential(nn.Linear(2, 2), nn.Softmax(-1)), [torch.zeros(1, 2)]),
            WorkloadError,
            "Softmax",
        ),
        (
            lambda: evaluate(Ensemble([mlp()]), torch.zeros(2, 6), torch.zeros(0)),
            InvalidArgumentError,
            "labels|are 0",
        ),
        (
            lambda: Ensemble([nn.Linear(2, 2), nn.Linear(2, 3)])(torch.zeros(1, 2)),
            InvalidArgumentError,
            "different shapes",
        ),
    ],
)
def test_errors_explain_themselves(call: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()


def images() -> tuple[Any, torch.Tensor, torch.Tensor]:
    """A convolutional network, and images whose class is the brighter quarter."""
    torch.manual_seed(0)
    x = torch.randn(400, 1, 6, 6)
    y = torch.stack([q.mean((1, 2, 3)) for h in x.chunk(2, 2) for q in h.chunk(2, 3)], 1).argmax(1)
    layers = nn.Conv2d(1, 12, 3), nn.ReLU(), nn.Conv2d(12, 12, 3), nn.ReLU(), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(48, 4)), x, y


@pytest.mark.parametrize("method", ["peers", "independent", "snapshot"])
def test_an_ensemble_worse_than_a_member_is_not_returned(method: Any) -> None:
    model, x, y = images()
    shares: list[float] = []

    def train(member: nn.Module, share: float, seed: int) -> None:
        shares.append(share)
        if len(shares) == 1:
            fit(x[:200], y[:200])(member, 1.0, seed)
        else:  # the others learn something else, with confidence
            fit(x[:200], (y[:200] + 1) % 4)(member, 2.0, seed)

    held_out = x[200:300], y[200:300]
    with pytest.warns(
        SlipstreamWarning, match=r"its member 0 alone .* only that member is returned"
    ):
        made = build(model, train, members=6, method=method, validation=held_out)
    assert len(made) == 1
    assert len(shares) == (6 if method == "snapshot" else 3), (
        "stopped after two members that made it worse"
    )
    assert evaluate(made, x[300:], y[300:]).accuracy > 0.6


def test_an_ensemble_that_is_no_worse_is_returned_complete() -> None:
    model, x, y = images()
    held_out = x[:200], y[:200]  # evaluated as trained: every member is right
    made = build(model, fit(*held_out), members=2, method="independent", validation=held_out)
    assert len(made) == 2
    with pytest.raises(InvalidArgumentError, match="3 labels for 4 inputs"):
        build(model, fit(*held_out), validation=(x[:4], y[:3]))


def test_members_with_shared_weights_only_give_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, y = images()
    held_out = x[200:300], y[200:300]
    monkeypatch.setattr(training._Validator, "_accuracy", lambda self, each: 1 / len(each))
    with pytest.warns(SlipstreamWarning, match="members share weights"):
        assert len(build(model, fit(x, y), method="batch", members=2, validation=held_out)) == 2


def test_compaction_reports_the_change_of_outputs() -> None:
    torch.manual_seed(0)
    model, batches = mlp(), list(torch.randn(4, 64, 6))
    exact, near = compact(model, batches), compact(model, batches, 0.8)
    assert exact.error < 1e-5 < near.error
    with torch.no_grad():
        outputs = torch.cat([model(batch) for batch in batches])
        change = torch.cat([near.model(batch) for batch in batches]) - outputs
    assert near.error == pytest.approx(float(change.norm() / outputs.norm()), rel=1e-4)


@pytest.mark.parametrize("stacked", [False, True])
def test_an_ensemble_supports_common_uses_of_models(stacked: bool) -> None:
    def make() -> nn.Module:
        members = []
        for seed in range(2):
            torch.manual_seed(seed)
            members.append(mlp())
        return Ensemble(members).stacked() if stacked else Ensemble(members)

    check_uses(make, torch.randn(5, 6), except_=("unbatched",) if stacked else ())
