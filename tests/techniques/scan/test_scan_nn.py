"""Our recurrent modules and torch's give equal results, forward and backward."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from model_uses import check_uses
from slipstream.errors import InvalidArgumentError
from slipstream.techniques.scan import cells, rnn
from slipstream.techniques.scan import kernels as door
from slipstream.techniques.scan.nn import CLASSES

MAKERS = {
    "tanh": nn.RNN, "relu": lambda *a, **k: nn.RNN(*a, nonlinearity="relu", **k),
    "gru": nn.GRU, "lstm": nn.LSTM,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _compiled(require: Any) -> None:
    require("native", door.available(), "no compiled kernels")
    torch.manual_seed(0)


def flat(made: Any) -> Iterator[torch.Tensor]:
    for item in made:
        yield from flat(item) if isinstance(item, tuple) else (item,)


def worst(module: nn.Module, x: torch.Tensor, **how: Any) -> float:
    """Return the largest relative difference of outputs and all gradients from torch's."""
    found = []
    for run in (module, lambda x: rnn(module, x, **how)):
        x.grad = None
        outputs = list(flat(run(x)))
        loss = sum(
            (y * torch.arange(1.0, y.numel() + 1).view(y.shape).sin()).sum() for y in outputs
        )
        gradients = torch.autograd.grad(loss, [x, *module.parameters()])
        found.append([*outputs, *gradients])
    pairs = zip(*found, strict=True)
    return max(float(((a - b).norm() / a.norm().clamp_min(1e-30)).detach()) for a, b in pairs)


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("way", ["fused", "chunked", "tree"])
def test_gradients_equal_autograds(kind: str, way: Any) -> None:
    for steps, layers in itertools.product((1, 2, 3, 8, 9, 31, 65), (1, 2)):
        module = MAKERS[kind](3, 6, layers, bidirectional=layers == 2).double()
        x = torch.randn(steps, 2, 3, dtype=torch.float64, requires_grad=True)
        assert worst(module, x, backward=way) <= 1e-10, (steps, layers)


@pytest.mark.parametrize("kind", MAKERS)
def test_float32_is_accurate_to_rounding(kind: str) -> None:
    module = MAKERS[kind](5, 33, batch_first=True)
    x = torch.randn(7, 40, 5, requires_grad=True)
    assert worst(module, x, backward="fused") <= 1e-5


@pytest.mark.parametrize("kind", MAKERS)
def test_gradcheck(kind: str) -> None:
    module = MAKERS[kind](2, 3).double()
    x = torch.randn(4, 2, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: rnn(module, x, backward="fused")[0], (x,))


def test_every_kernel_agrees() -> None:
    for kind, number in itertools.product(door.KINDS, door.kernels().values()):
        count = door.GATES[kind]
        gates, weight = torch.randn(9, 5, 21 * count), torch.randn(21 * count, 21) / 5
        h0, c0 = torch.randn(5, 21), torch.randn(5, 21) if kind == "lstm" else None
        bias = torch.randn(21) if kind == "gru" else None
        both = []
        for kernel in (number, min(door.kernels().values())):
            y, own, extra = door.run_forward(gates, weight, bias, h0, c0, kind, kernel)
            dy = torch.ones_like(y)
            both.append(
                [y, *door.run_backward(y, own, extra, weight, h0, c0, dy, None, None, kind, kernel)]
            )
        for output, other in zip(*both, strict=True):
            torch.testing.assert_close(output, other, rtol=1e-4, atol=1e-4)


def test_two_threads_give_the_same_results() -> None:
    module, x = nn.GRU(3, 8), torch.randn(20, 5, 3, requires_grad=True)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert worst(module, x, backward="fused") <= 1e-5
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("radius", [0.5, 1.5])
def test_results_are_finite_whenever_those_of_the_loop_are(radius: float) -> None:
    module = nn.RNN(1, 8, nonlinearity="relu")
    weight, _ = torch.linalg.qr(torch.randn(8, 8))
    module.weight_hh_l0.data = weight * radius
    y = torch.rand(300, 1, 8) + 0.1  # all units on: products of 300 Jacobians exceed float32
    saved = cells.Saved("relu", module.weight_hh_l0.data, y, y[:0], y[:0], y[0], None)
    end = torch.zeros(1, 8)
    dy = torch.zeros_like(y)
    dy[20] = 1.0  # the gradient itself passes through only twenty of them
    expected = cells.sequential(saved, dy, end, None).dgates
    assert torch.isfinite(expected).all()
    for found in (cells.chunked(saved, dy, end, None, 300), cells.tree(saved, dy, end, None)):
        torch.testing.assert_close(found.dgates, expected, rtol=1e-3, atol=1e-5)


def test_a_cell_runs_over_all_steps() -> None:
    cell, x = nn.GRUCell(3, 5), torch.randn(6, 2, 3)
    torch.testing.assert_close(rnn(cell, x)[0], rnn(cell, x, backward="framework")[0])


def test_unsupported_inputs_use_torchs_own_module() -> None:
    for module in (nn.LSTM(3, 6, proj_size=2), nn.GRU(3, 6)):
        x = torch.randn(4, 2, 3)
        packed = pack_padded_sequence(x, torch.tensor([4, 2]))
        inputs = x if module.proj_size else packed
        expected, found = flat(module(inputs)), flat(rnn(module, inputs, backward="fused"))
        for value, other in zip(expected, found, strict=True):
            if isinstance(value, torch.Tensor):
                assert torch.equal(value, other)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (lambda: rnn(nn.RNN(2, 3), torch.zeros(0, 1, 2)), "without a step"),
        (
            lambda: rnn(nn.RNN(2, 3), torch.zeros(4, 1, 2), backward="soon"),
            "not a way to compute gradients",
        ),
        (lambda: rnn(nn.Linear(2, 3), torch.zeros(4, 1, 2)), "is not an nn.RNN"),
        (lambda: rnn(nn.RNN(2, 3), torch.zeros(4, 1, 5), backward="fused"), "has 5 features"),
        (
            lambda: rnn(nn.RNN(2, 3), torch.zeros(4, 1, 2), torch.zeros(1, 2, 3), backward="fused"),
            "has shape",
        ),
    ],
)
def test_errors_explain_themselves(arguments: Any, words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        arguments()


@pytest.mark.parametrize("kind", MAKERS)
def test_second_derivatives_use_torchs(kind: str) -> None:
    module = MAKERS[kind](2, 3).double()
    found = []
    for run in (module, lambda x: rnn(module, x, backward="fused")):
        x = torch.linspace(-1, 1, 16, dtype=torch.float64).view(4, 2, 2).requires_grad_()
        sources = [x * 1, *module.parameters()]
        loss = sum(y.square().sum() for y in flat(run(sources[0])))
        gradients = torch.autograd.grad(loss, sources, create_graph=True)
        penalty = sum(gradient.square().sum() for gradient in gradients)
        found.append(torch.autograd.grad(penalty, [x, *module.parameters()]))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("kind", MAKERS)
def test_outputs_may_be_modified_in_place(kind: str) -> None:
    cell = {"gru": nn.GRUCell, "lstm": nn.LSTMCell}.get(kind, nn.RNNCell)(2, 3)
    for module in (MAKERS[kind](2, 3), cell):
        found = []
        for how in ("framework", "fused"):
            output, state = rnn(module, torch.ones(4, 2, 2), backward=how)
            # Autograd forbids it for some of torch's own outputs.
            outputs = [y * 2 if how == "framework" else y.mul_(2) for y in flat((output, state))]
            loss = sum(y.square().sum() for y in outputs)
            found.append(torch.autograd.grad(loss, list(module.parameters())))
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_functional_transforms_and_traces_use_torchs() -> None:
    for kind in ("GRU", "LSTM"):
        module: Any = CLASSES[getattr(nn, kind)](2, 3)
        cell: Any = getattr(nn, f"{kind}Cell")(2, 3)
        module.backward_as, x = "fused", torch.randn(4, 2, 2)
        parameters = dict(module.named_parameters())

        def loss(parameters: Any, module: Any = module, x: Any = x) -> torch.Tensor:
            output: torch.Tensor = torch.func.functional_call(module, parameters, (x,))[0]
            return output.sum()

        ours = torch.func.grad(loss)(parameters)
        theirs = torch.autograd.grad(module(x)[0].sum(), list(module.parameters()))
        for gradient, other in zip(ours.values(), theirs, strict=True):
            torch.testing.assert_close(gradient, other)
        assert torch.func.grad(lambda x, c=cell: rnn(c, x, backward="fused")[0].sum())(x).any()
        traced, longer = torch.jit.trace(module, x), torch.randn(4, 5, 2)
        torch.testing.assert_close(traced(longer)[0], module(longer)[0])


@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM"])
def test_a_module_supports_common_uses_of_models(kind: str) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        module: Any = CLASSES[getattr(nn, kind)](3, 8, batch_first=True)
        module.backward_as = "fused"
        return module  # type: ignore[no-any-return]

    check_uses(make, torch.randn(4, 20, 3))


def test_the_replacement_keeps_parameters_and_dropout() -> None:
    module = nn.LSTM(3, 4, 2, dropout=0.5)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    module.__class__ = CLASSES[nn.LSTM]
    module.backward_as = "fused"
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    x = torch.randn(5, 2, 3)
    assert not torch.equal(module(x)[0], module(x)[0])
    module.eval()
    assert torch.equal(module(x)[0], module(x)[0])
