"""`slipstream.nn.Dropout` replaces torch's: the same behaviour with other random numbers."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import slipstream as ss
from slipstream.errors import InvalidArgumentError
from slipstream.techniques.dropout.nn import Dropout, dropout

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def nonzero(x: torch.Tensor) -> torch.Tensor:
    return x != 0


def test_it_is_public() -> None:
    assert ss.nn.Dropout is Dropout
    assert isinstance(ss.nn.Dropout(0.3), nn.Dropout)
    assert repr(Dropout(0.3)) == repr(nn.Dropout(0.3))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (2, 3, 4, 5), (1000, 100)], ids=str)
def test_shape_dtype_and_values(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.rand(shape).to(dtype) + 1
    y = Dropout(0.25)(x)
    assert (y.shape, y.dtype, y.stride()) == (x.shape, x.dtype, x.stride())
    scaled = (x.double() / 0.75).to(dtype)
    torch.testing.assert_close(y[nonzero(y)], scaled[nonzero(y)])
    if x.numel() > 10**4:
        deviation = (100_000 * 0.25 * 0.75) ** 0.5
        assert abs(int(nonzero(y).sum()) - 75_000) < 4 * deviation


def test_kept_values_equal_torchs_bitwise() -> None:
    x = torch.randn(10_000)
    theirs, ours = functional.dropout(x, 0.1), dropout(x, 0.1)
    both = nonzero(theirs) & nonzero(ours)
    assert both.sum() > 7000
    assert torch.equal(theirs[both], ours[both])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_all_dtypes_drop_the_same_elements(dtype: torch.dtype) -> None:
    masks = []
    for kind in (torch.float32, dtype):
        torch.manual_seed(7)
        masks.append(nonzero(dropout(torch.ones(999, dtype=kind), 0.4)))
    assert torch.equal(*masks)


def test_the_seed_determines_the_mask() -> None:
    layer, x = Dropout(0.5), torch.ones(500)
    torch.manual_seed(3)
    first, second = layer(x), layer(x)
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    assert torch.equal(layer(x), first)
    assert torch.equal(layer(x), second)


def test_a_separate_generator_is_used() -> None:
    state = torch.get_rng_state()
    layer = Dropout(0.5, generator=torch.Generator().manual_seed(1))
    twin = copy.deepcopy(layer)
    first = layer(torch.ones(300))
    assert torch.equal(torch.get_rng_state(), state), "torch's own is not touched"
    assert not torch.equal(layer(torch.ones(300)), first)
    assert torch.equal(twin(torch.ones(300)), first)


def test_without_dropout_the_input_itself_is_returned() -> None:
    x = torch.randn(4, 4)
    state = torch.get_rng_state()
    assert Dropout(0.5).eval()(x) is x
    assert Dropout(0.0)(x) is x
    empty = torch.empty(0, 3)
    assert Dropout(0.5)(empty) is empty
    assert torch.equal(torch.get_rng_state(), state)


def test_everything_dropped() -> None:
    x = torch.randn(8, requires_grad=True)
    y = Dropout(1.0)(x)
    assert not y.any()
    y.sum().backward()
    assert not x.grad.any()  # type: ignore[union-attr]


def test_gradient_is_that_of_the_same_mask() -> None:
    x = torch.randn(77, 5, requires_grad=True)
    y = Dropout(0.3)(x)
    y.backward(torch.ones_like(y))
    scale = torch.tensor(1.0) / torch.tensor(0.7)
    assert torch.equal(x.grad, nonzero(y) * scale)
    assert not Dropout(0.3)(x.detach()).requires_grad
    with torch.no_grad():
        assert not Dropout(0.3)(x).requires_grad


def seeded(x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(11)
    return dropout(x, 0.4)


def test_first_and_second_derivatives() -> None:
    x = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(seeded, x)
    assert torch.autograd.gradcheck(seeded, x.detach().mT.requires_grad_())
    assert torch.autograd.gradgradcheck(lambda x: seeded(x) ** 3, x)
    single = torch.randn(50, requires_grad=True)
    (first,) = torch.autograd.grad((seeded(single) ** 3).sum(), single, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), single)
    y = seeded(single)
    torch.testing.assert_close(second, 6 * y * nonzero(y) / 0.6**2)


@pytest.mark.parametrize(
    "lay",
    [
        lambda x: x.contiguous(memory_format=torch.channels_last),
        lambda x: x.transpose(1, 2),
        lambda x: x[:, ::2],
        lambda x: x[..., 1:],
        lambda x: x[:1].expand(3, -1, -1, -1),
    ],
)
def test_strides_are_preserved_as_in_torch(lay: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = lay(torch.rand(2, 4, 6, 5) + 1).detach().requires_grad_()
    y, theirs = Dropout(0.5)(x), nn.Dropout(0.5)(x)
    assert y.stride() == theirs.stride()
    assert torch.equal(y[nonzero(y)], 2 * x[nonzero(y)])
    gradient = torch.rand(y.shape)
    (made,) = torch.autograd.grad(y, x, gradient)
    assert torch.equal(made, gradient * nonzero(y) * 2)


def test_in_place() -> None:
    x = torch.rand(100) + 1
    before = x.clone()
    y = Dropout(0.5, inplace=True)(x)
    assert y is x
    assert torch.equal(x[nonzero(x)], 2 * before[nonzero(x)])
    leaf = torch.rand(100, requires_grad=True)
    hidden = leaf * 1
    out = dropout(hidden, 0.5, inplace=True)
    out.sum().backward()
    assert torch.equal(leaf.grad, nonzero(out) * 2.0)
    with pytest.raises(RuntimeError, match="leaf"):
        dropout(leaf, 0.5, inplace=True)


def test_dropped_elements_are_zero_for_any_input() -> None:
    y = dropout(torch.full((1000,), torch.inf), 0.5)
    assert set(y.tolist()) == {0.0, torch.inf}


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_draws_the_same_mask_again(reentrant: bool) -> None:
    layer = nn.Sequential(nn.Linear(8, 32), Dropout(0.5), nn.Linear(32, 8), Dropout(0.2))
    x = torch.randn(4, 8, requires_grad=True)

    def gradients(run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(5)
        return torch.autograd.grad(run().sum(), [x, *layer.parameters()])

    if reentrant:

        def backward() -> list[torch.Tensor]:
            x.grad = None
            layer.zero_grad()
            torch.manual_seed(5)
            checkpoint(layer, x, use_reentrant=True).sum().backward()
            return [x.grad, *(parameter.grad for parameter in layer.parameters())]

        again: Any = backward()
    else:
        again = gradients(lambda: checkpoint(layer, x, use_reentrant=False))
    for ours, plain in zip(again, gradients(lambda: layer(x)), strict=True):
        torch.testing.assert_close(ours, plain)


def test_compiles_without_a_graph_break() -> None:
    layer = Dropout(0.5)
    compiled = torch.compile(lambda x: layer(x) + 2 * layer(x), fullgraph=True, backend="aot_eager")
    x = torch.ones(5000, requires_grad=True)
    y = compiled(x)
    # Two masks: neither, the first, the second, both.
    assert sorted(set(y.tolist())) == [0.0, 2.0, 4.0, 6.0]
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())
    torch.manual_seed(2)
    first = compiled(x)
    assert not torch.equal(first, compiled(x))
    torch.manual_seed(2)
    assert torch.equal(compiled(x), first)


def test_autocast_keeps_the_input_dtype() -> None:
    layer = nn.Sequential(nn.Linear(16, 16), Dropout(0.5))
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(torch.randn(4, 16))
        assert y.dtype == torch.bfloat16
        assert Dropout(0.5)(torch.randn(4)).dtype == torch.float32
    y.float().sum().backward()
    assert layer[0].weight.grad.dtype == torch.float32  # type: ignore[union-attr]


def test_state_copies_and_pickles_equal_torchs() -> None:
    layer = Dropout(0.2, inplace=True)
    assert layer.state_dict() == {}
    nn.Dropout(0.2).load_state_dict(layer.state_dict())
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for twin in (copy.deepcopy(layer), torch.load(file, weights_only=False)):
        assert (type(twin), twin.p, twin.inplace) == (Dropout, 0.2, True)


def test_transforms_use_torchs_own_dropout() -> None:
    x = torch.ones(3, 200)
    y = torch.vmap(Dropout(0.5), randomness="different")(x)
    assert not torch.equal(y[0], y[1])
    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(Dropout(0.5))(x)
    slope = torch.func.grad(lambda x: dropout(x, 0.5).sum())(x)
    assert set(slope.flatten().tolist()) == {0.0, 2.0}
    _, tangent = torch.func.jvp(lambda x: dropout(x, 0.5), (x,), (x,))
    assert set(tangent.flatten().tolist()) == {0.0, 2.0}
    own = Dropout(0.5, generator=torch.Generator())
    with pytest.raises(InvalidArgumentError, match="generator"):
        torch.vmap(own, randomness="different")(x)
    assert Dropout(0.5)(torch.ones(3, device="meta")).device.type == "meta"


@pytest.mark.parametrize("p", [-0.1, 1.1, float("nan")])
def test_invalid_probabilities(p: float) -> None:
    with pytest.raises(InvalidArgumentError, match="p: a probability"):
        Dropout(p)
    with pytest.raises(InvalidArgumentError, match="p: a probability"):
        dropout(torch.ones(3), p)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64], ids=str)
def test_invalid_dtypes(dtype: torch.dtype) -> None:
    with pytest.raises(InvalidArgumentError, match="floating-point"):
        Dropout()(torch.ones(3, dtype=dtype))


def test_a_classifier_learns_with_it() -> None:
    torch.manual_seed(0)
    x = torch.randn(256, 10)
    target = (x[:, 0] * x[:, 1] > 0).long()
    model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), Dropout(0.2), nn.Linear(64, 2))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(80):
        optimizer.zero_grad()
        functional.cross_entropy(model(x), target).backward()
        optimizer.step()
    assert (model.eval()(x).argmax(1) == target).float().mean() > 0.9
