"""Sub-networks of a supernet: exact on every family, exported as plain modules."""

from __future__ import annotations

import copy
import functools
import importlib.util
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from slipstream.cli.nas import app
from slipstream.durations import Durations, Timing
from slipstream.errors import (
    InvalidArgumentError,
    SlipstreamError,
    UnknownNameError,
    WorkloadError,
)
from slipstream.nas import (
    Supernet,
    calibrate,
    derive_space,
    estimate,
    fit,
    predict_latency,
    search,
)
from slipstream.nas.writing import write_module
from slipstream.provenance import Provenance
from slipstream.search import Budget
from slipstream_bench.systems.nas.families import FAMILIES, Basic, resnet


@functools.cache
def built(family: str) -> tuple[nn.Module, torch.Tensor, Supernet]:
    torch.manual_seed(0)
    make, inputs = FAMILIES[family]
    model, x = make().eval(), inputs()
    return model, x, Supernet(derive_space(model, x))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_subnet_equals_its_export(family: str) -> None:
    model, x, net = built(family)
    torch.testing.assert_close(net.configure({})(x), model(x), rtol=0, atol=0)
    # A mixer's token layers have the number of patches, which the input fixes.
    assert net.space.coverage >= (0.97 if family != "mixer" else 0.9)
    rng = np.random.default_rng(0)
    for config in (net.space.smallest, *(net.space.sample(rng) for _ in range(3))):
        exported = net.export(config)
        torch.testing.assert_close(net.configure(config)(x), exported(x), rtol=0, atol=1e-5)
        size = estimate(net, config)
        assert sum(p.numel() for p in exported.parameters()) == size["params"]
        assert len(exported(torch.cat([x, x[:1]]))) == len(x) + 1
        # The reference counts neither recurrent layers nor attention on CPU.
        if family not in ("lstm", "rnn", "vit", "bert", "gpt"):
            with FlopCounterMode(display=False) as counter:
                exported(x)
            assert counter.get_total_flops() == 2 * len(x) * size["macs"]
    net.configure({})


def test_a_residual_stream_is_one_width() -> None:
    _, _, net = built("resnet")
    width = net.space.choices["width_0"]
    assert {"0.weight", "3.0.conv2.weight", "3.1.bn2.running_var"} <= set(width.parameters)


def test_flatten_before_a_linear_layer_stays_searchable() -> None:
    _, _, net = built("resnet")
    assert ("7.weight", 1) not in net.space.reasons
    assert net.export(net.space.smallest).get_submodule("7").in_features == 4 * 8


def test_rows_of_a_position_table_that_the_example_does_not_read_stay() -> None:
    _, _, net = built("gpt")
    assert "looked up by index" in net.space.reasons["position", 0]


def test_recurrent_layers_are_counted() -> None:
    _, x, net = built("rnn")
    weights = sum(p.numel() for p in net.parameters() if p.dim() == 2)
    unread = 50 * 16 + 5 * 48  # the embedding, and the head, which reads one step
    assert estimate(net, {})["macs"] == x.shape[1] * (weights - unread) + 5 * 48


def test_copies_and_loaded_states_have_the_same_subnets() -> None:
    model, x, _ = built("resnet")
    net = Supernet(derive_space(model, x))
    copied, other = copy.deepcopy(net), Supernet(derive_space(resnet(), x))
    other.load_state_dict(net.state_dict())
    expected = net.configure(net.space.smallest)(x)
    for same in (copied, other):
        actual = same.configure(net.space.smallest)(x)
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    with torch.no_grad():
        copied.tensor("0.weight").zero_()
    assert net.tensor("0.weight").any()
    with pytest.raises(WorkloadError, match=r"state_dict\(\)"):
        pickle.dumps(net)
    with pytest.raises(InvalidArgumentError, match="another architecture space"):
        other.load_state_dict(built("vit")[2].state_dict())


def test_frozen_parameters_count() -> None:
    model = copy.deepcopy(built("resnet")[0]).requires_grad_(False)
    net = Supernet(derive_space(model, built("resnet")[1]))
    assert estimate(net)["params"] == sum(p.numel() for p in model.parameters())


def test_heads_are_removed_whole() -> None:
    _, _, net = built("vit")
    exported = net.export({"width_layers_0_attention_qkv": 1})
    assert exported.get_submodule("layers.0.attention.qkv").out_features == 3 * 8


def test_a_skipped_block_leaves_nothing_behind() -> None:
    _, _, net = built("resnet")
    names = dict(net.export({"depth_3": 1}).named_parameters())
    assert "3.0.conv1.weight" in names
    assert "3.1.conv1.weight" not in names


def test_an_exported_subnet_is_plain_and_trains() -> None:
    _, x, net = built("resnet")
    exported = net.export(net.space.smallest).train()
    assert all(type(m).__module__.startswith("torch") for m in exported.children())
    exported(x).sum().backward()
    assert all(p.grad is not None for p in exported.parameters())


@pytest.mark.parametrize("family", ["vit", "bfloat16"])
def test_written_source_computes_the_same(family: str, tmp_path: Path) -> None:
    if family == "vit":
        _, x, net = built("vit")
    else:
        conv = nn.Conv2d(3, 16, 3, padding="same")
        x = torch.randn(2, 3, 8, 8).bfloat16()
        net = Supernet(derive_space(nn.Sequential(conv, nn.Conv2d(16, 2, 1)).bfloat16(), x))
    exported = net.export(net.space.smallest)
    write_module(exported, tmp_path / "small.py")
    spec = importlib.util.spec_from_file_location("small", tmp_path / "small.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.testing.assert_close(module.load()(x), exported(x), rtol=0, atol=0)
    assert "slipstream" not in (tmp_path / "small.py").read_text().partition('"""\n')[2]


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("made.py:value", "'made.py:value' is an int, not a function"),
        ("made.py:fails", "ZeroDivisionError"),
        ("made.py", "does not name a function"),
        ("no_such_module:f", "No module named 'no_such_module'"),
        ("made.py:pair", "is not a Supernet"),
    ],
)
def test_the_command_refuses_what_is_not_a_supernet(
    target: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("made.py").write_text("value = 3\npair = lambda: (1, 2)\nfails = lambda: 1 / 0\n")
    words = ["export", target, "-o", "small.py", "--config", "{}"]
    error = CliRunner().invoke(app, words).exception
    assert isinstance(error, SlipstreamError)
    assert text in str(error)


def test_kept_layers_are_not_searchable() -> None:
    model, x, _ = built("resnet")
    for four in ("4", "4.*"):
        space = derive_space(model, x, keep=["0", four])
        assert set(space.choices) == {"width_3_0_conv1", "width_3_1_conv1", "depth_3"}
    with pytest.raises(InvalidArgumentError, match="matches no parameter"):
        derive_space(model, x, keep="layer9")


def test_training_and_search_use_shared_weights() -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 3, 8, 8)
    y = torch.randint(0, 10, (8,))
    net = Supernet(derive_space(nn.Sequential(*list(resnet())[:4], nn.AdaptiveAvgPool2d(1),
                                              nn.Flatten(), nn.Linear(16, 10)), x))  # fmt: skip
    before = net.tensor("0.weight").detach().clone()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    fit(net, lambda: [(x, y)], nn.functional.cross_entropy, optimizer, epochs=1)
    assert not torch.equal(before, net.tensor("0.weight"))

    def score(module: nn.Module) -> float:
        with torch.no_grad():
            return -float(nn.functional.cross_entropy(module(x), y))

    whole = estimate(net, net.space.full)["macs"]
    study = search(net, score, constraints={"macs": "<= 0.6x"}, calibration=[x], seed=1)
    best = study.run(budget=Budget(trials=6)).best()
    assert best is not None
    assert estimate(net, best.candidate)["macs"] <= 0.6 * whole

    assert search(net, score, constraints={"macs": "<= 6e-1x"}).limits == study.limits
    with pytest.raises(InvalidArgumentError, match="a float is not a function"):
        search(net, 0.5, constraints={"macs": "<= 0.6x"})  # type: ignore[arg-type]
    for limit in ("<= 0.001x", ">= 1.5x"):
        with pytest.raises(InvalidArgumentError, match="no architecture has macs"):
            search(net, score, constraints={"macs": limit})
    with pytest.raises(InvalidArgumentError, match="is not a limit"):
        search(net, score, constraints={"macs": "<= nan"})
    with pytest.raises(UnknownNameError, match="flops"):
        search(net, score, constraints={"flops": "<= 0.5x"})


def test_models_with_several_inputs_are_trained() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 16), nn.Linear(16, 2)

        def forward(self, x: torch.Tensor, scale: torch.Tensor) -> Any:
            return self.last(self.first(x) * scale)

    x, scale, y = torch.randn(8, 4), torch.rand(8, 1), torch.randint(0, 2, (8,))
    net = Supernet(derive_space(Two(), (x, scale)))
    before = net.tensor("first.weight").detach().clone()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    fit(net, lambda: [((x, scale), y)], nn.functional.cross_entropy, optimizer)
    assert not torch.equal(before, net.tensor("first.weight"))


def test_calibration_uses_the_subnets_own_statistics() -> None:
    _, x, net = built("resnet")
    exported = net.export(net.space.smallest)
    calibrate(exported, [x])
    seen = exported.get_submodule("0")(x)
    for batches in ([], x):
        calibrate(exported, batches)
        torch.testing.assert_close(exported.get_submodule("1").running_mean, seen.mean((0, 2, 3)))


def test_training_refuses_what_it_cannot_train() -> None:
    model, _, net = built("resnet")
    weights, loss = torch.optim.SGD(net.parameters()), nn.functional.cross_entropy
    with pytest.raises(InvalidArgumentError, match=r"lambda: loader"):
        fit(net, [], loss, weights)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="no weights of the supernet"):
        fit(net, list, loss, torch.optim.SGD(model.parameters()))
    with pytest.raises(InvalidArgumentError, match="is not a Supernet"):
        estimate(model)  # type: ignore[arg-type]

    def interrupted() -> Any:
        yield torch.randn(2, 3, 16, 16), torch.tensor([0, 1])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(net, interrupted, loss, weights)
    assert net.config == net.space.full
    assert not net.training


class _Root(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sqrt()


@pytest.mark.parametrize(
    ("first", "text"),
    [
        (-1.0, "the loss is NaN or infinite in step 2, first in sqrt in 1"),
        (0.0, "the gradient is NaN or infinite in step 2, first in the gradient of 0.weight"),
        (float("nan"), "the loss is NaN or infinite in step 2, first in the input"),
    ],
)
def test_training_stops_at_the_first_step_that_is_not_finite(first: float, text: str) -> None:
    model = nn.Sequential(nn.Linear(4, 16, bias=False), _Root(), nn.Linear(16, 2))
    nn.init.constant_(model.get_parameter("0.weight"), 1.0)
    net = Supernet(derive_space(model, torch.ones(2, 4)))
    batches = [(torch.full((2, 4), value), torch.tensor([0, 1])) for value in (1.0, first, 1.0)]
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    with pytest.raises(WorkloadError) as stopped:
        fit(net, lambda: batches, nn.functional.cross_entropy, optimizer)
    assert text in str(stopped.value)
    assert all(p.isfinite().all() for p in net.parameters())


def test_training_continues_if_only_the_norm_of_the_gradients_overflows() -> None:
    net = Supernet(
        derive_space(nn.Sequential(nn.Linear(4, 16), nn.Linear(16, 2)), torch.ones(2, 4))
    )
    batches = [(torch.ones(2, 4), torch.zeros(2))]
    fit(net, lambda: batches, lambda out, _: out.sum() * 1e25,
        torch.optim.SGD(net.parameters(), lr=1e-30))  # fmt: skip
    assert all(p.isfinite().all() for p in net.parameters())


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        ((torch.randn(2, 3, 8, 8),), "[2, 3, 8, 8] is not [batch, 3, 16, 16]"),
        ((torch.randn(3, 16, 16),), "is not [batch, 3, 16, 16]"),
        ((torch.zeros(2, 3, 16, 16, dtype=torch.int64),), "torch.int64 instead of torch.float32"),
        ((3,), "an int is not a tensor"),
        ((), "got 0, but the model takes 1"),
    ],
)
def test_inputs_of_other_shapes_are_refused(inputs: Any, text: str) -> None:
    _, _, net = built("resnet")
    with pytest.raises(InvalidArgumentError) as refused:
        net(*inputs)
    assert text in str(refused.value)


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        (torch.randn(2, 3, 16, 16), "a batch is a Tensor, not a pair"),
        ((torch.randn(2, 3, 16, 16), torch.zeros(3, dtype=torch.int64)), "[2, 10], [3]"),
        ((torch.randn(2, 3, 9, 16), torch.zeros(2, dtype=torch.int64)), "is not [batch, 3, 16"),
    ],
)
def test_training_refuses_batches_of_other_shapes(batch: Any, text: str) -> None:
    _, _, net = built("resnet")
    with pytest.raises(SlipstreamError) as refused:
        fit(net, lambda: [batch], nn.functional.cross_entropy, torch.optim.SGD(net.parameters()))
    assert text in str(refused.value)


class _Timed(Durations):
    """Durations of one millisecond per output element; views have none."""

    def measure(self, calls: Any, *args: Any, **options: Any) -> None:
        self.timed = list(calls)

    def lookup(self, call: Any) -> Timing | None:
        if call.call.name == "aten::relu_":
            return None
        return Timing(1e6 * call.call.outputs[0].numel, 0.0, Provenance.MICROBENCHMARK)


def test_latency_is_that_of_the_exports_operators() -> None:
    _, x, net = built("resnet")
    config = net.space.smallest
    module, durations = net.export(config), _Timed()
    elements: list[int] = []

    class Outputs(torch.fx.Interpreter):
        def run_node(self, n: torch.fx.Node) -> Any:
            value = super().run_node(n)
            views = n.op in ("placeholder", "output", "get_attr") or "flatten" in n.name
            elements.extend([] if views else [value.numel()])
            return value

    Outputs(module).run(x)
    predicted = predict_latency(net, config, durations=durations)
    assert predicted == pytest.approx(sum(elements))
    conv = durations.timed[0].call
    assert conv.inputs[1].shape == module.get_submodule("0").weight.shape


def test_operators_of_candidates_are_timed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[set[str]] = []

    class Recorded(_Timed):
        def measure(self, calls: Any, *args: Any, **options: Any) -> None:
            batches.append({request.key for request in calls})

    monkeypatch.setattr("slipstream.nas.searching.Durations", Recorded)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(),
                          nn.Linear(16, 4))  # fmt: skip
    net = Supernet(derive_space(model, torch.randn(2, 8)))
    limit = {"latency": "<= 0.9x"}
    search(net, lambda module: 0.0, constraints=limit).run(budget=Budget(trials=5))
    assert len(batches) > 5
    assert set().union(*batches[1:]) <= batches[0]


class _Branch(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > 0 else x


class _InPlace(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        y[:, 0] = 0
        return y


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (nn.Sequential(nn.Linear(4, 4), _Branch()), "_Branch.forward"),
        (nn.Sequential(nn.Linear(4, 4), _InPlace()), "in place"),
        (nn.Linear(4, 4), "nothing to search"),
        (nn.Linear(3, 4), "fails on the example inputs"),
        (nn.Sequential(nn.Linear(4, 4), nn.Linear(3, 4)), "where: Linear.forward, layer 1"),
        (torch.relu, "is not a torch.nn.Module"),
    ],
)
def test_models_without_a_space_are_refused(model: Any, text: str) -> None:
    with pytest.raises((WorkloadError, InvalidArgumentError)) as refused:
        derive_space(model, torch.randn(2, 4))
    assert text in str(refused.value)


def test_unknown_operators_are_named() -> None:
    class Sorted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 16), nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.first(x).sort(-1).values)

    with pytest.raises(InvalidArgumentError, match="sort has no rule"):
        derive_space(Sorted(), torch.randn(2, 4))


def test_shared_layers_shrink_once() -> None:
    block = Basic(16, 16, 1)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), block, block, nn.AdaptiveAvgPool2d(1),
                          nn.Flatten(), nn.Linear(16, 2)).eval()  # fmt: skip
    x = torch.randn(2, 3, 8, 8)
    net = Supernet(derive_space(model, x))
    exported = net.export(net.space.smallest)
    torch.testing.assert_close(net.configure(net.space.smallest)(x), exported(x), rtol=0, atol=1e-5)
    params = sum(p.numel() for p in exported.parameters())
    assert params == estimate(net, net.space.smallest)["params"]
