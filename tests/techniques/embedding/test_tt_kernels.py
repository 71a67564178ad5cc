"""Every kernel multiplies like the reference: bitwise if sums are exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slipstream.errors import InvalidArgumentError
from slipstream.native import InstructionSet
from slipstream.techniques.embedding.kernels import tt as door
from slipstream.techniques.embedding.kernels import tt_reference as reference

KERNELS = pytest.mark.parametrize("kernel", door.kernels().items(), ids=lambda k: str(k[0]))
SHAPES = (
    ((5, 6, 7), (2, 2, 4), (3, 5)),
    ((5, 6, 7), (4, 4, 4), (32, 32)),
    ((5, 6, 7), (4, 4, 8), (16, 8)),
    ((3, 2, 4), (2, 4, 4), (33, 7)),
    ((5, 6, 7), (1, 3, 5), (1, 1)),
    ((4, 3, 2), (40, 1, 2), (2, 3)),
    ((50, 4), (4, 8), (6,)),
)


def whole_cores(shape: Any) -> list[torch.Tensor]:
    """Cores of small integers: every sum in float32 is exact."""
    p, q, r = shape
    ranks = (1, *r, 1)
    return [
        torch.randint(-2, 3, (p[t], ranks[t], q[t], ranks[t + 1])).float() for t in range(len(p))
    ]


def bags(rows: int, mode: int, cached: int = 0, dim: int = 1, count: int = 900) -> tuple[Any, ...]:
    """Bags of all sizes, with padding and repeated ids: arguments of the operator."""
    ids = torch.randint(0, rows, (count,))
    ids[::9], ids[1::7] = 4, 11
    offsets = torch.sort(torch.randint(0, count + 1, (50,))).values
    offsets[0] = 0
    weights = torch.randint(-1, 2, (count,)).float() if mode == 0 else None
    cache = hot = None
    if cached:
        cache = torch.randint(-9, 9, (cached, dim)).float()
        hot = table_of(torch.randperm(rows)[:cached])
    return cache, hot, ids, offsets, weights, rows, 4, 50, mode


def table_of(ids: torch.Tensor) -> torch.Tensor:
    """Return a hash table of hot rows, inserted in order."""
    capacity = 1 << (2 * len(ids) - 1).bit_length()
    table = torch.full((capacity, 2), -1)
    for row, (index, place) in enumerate(
        zip(ids.tolist(), reference.start(ids, capacity).tolist(), strict=True)
    ):
        while table[place, 0] >= 0:
            place = (place + 1) % capacity
        table[place] = torch.tensor([index, row])
    return table


def exactly(cores: list[torch.Tensor], how: tuple[Any, ...], grad: torch.Tensor) -> Any:
    """Return the reference's result in float64, and gradients of cores, cache and weights."""
    leaves = [core.double().requires_grad_() for core in cores]
    cache = None if how[0] is None else how[0].double().requires_grad_()
    weights = None if how[4] is None else how[4].double().requires_grad_()
    made = door.by_reference(leaves, cache, *how[1:4], weights, *how[5:])
    inputs = [tensor for tensor in (*leaves, cache, weights) if tensor is not None]
    return made, torch.autograd.grad(made, inputs, grad.double())


@KERNELS
@pytest.mark.parametrize("cached", [0, 9])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s[1])))
def test_sums_and_gradients_are_exact(
    kernel: tuple[InstructionSet, int], shape: Any, cached: int
) -> None:
    cores = whole_cores(shape)
    rows, dim = (int(torch.tensor(part).prod()) for part in shape[:2])
    how = bags(rows, 0, cached, dim)
    grad = torch.randint(-1, 2, (50, dim)).float()
    made, found = exactly(cores, how, grad)
    assert torch.equal(door.forward_by(kernel[1], cores, *how).double(), made)
    backward = door.backward_by(kernel[1], grad, cores, *how)
    for gradient, expected in zip(backward, found, strict=False):
        assert torch.equal(gradient.double(), expected)
    weights = door.weights_by(kernel[1], grad, cores, *how)
    assert torch.equal(weights.double(), found[-1])


@KERNELS
def test_means_equal_the_references(kernel: tuple[InstructionSet, int]) -> None:
    for shape in SHAPES:
        cores = whole_cores(shape)
        rows, dim = (int(torch.tensor(part).prod()) for part in shape[:2])
        how = bags(rows, 1, 9, dim)
        grad = torch.randn(50, dim)
        made, found = exactly(cores, how, grad)
        own = door.forward_by(kernel[1], cores, *how)
        backward = door.backward_by(kernel[1], grad, cores, *how)
        for value, expected in zip((own, *backward), (made, *found), strict=True):
            error = (value - expected).abs().max() / expected.abs().max()
            assert error <= 1e-5


def random_call(count: int = 5000) -> tuple[Any, ...]:
    torch.manual_seed(3)
    cores = [torch.randn(30, 1, 4, 8), torch.randn(20, 8, 4, 8), torch.randn(25, 8, 4, 1)]
    how = bags(15_000, 0, 50, 64, count)
    return cores, torch.randn(50, 64), how


def all_of(kernel: int, call: tuple[Any, ...]) -> list[torch.Tensor]:
    cores, grad, how = call
    return [
        door.forward_by(kernel, cores, *how),
        *door.backward_by(kernel, grad, cores, *how),
        door.weights_by(kernel, grad, cores, *how),
    ]


@KERNELS
def test_every_instruction_set_gives_the_same_bits(kernel: tuple[InstructionSet, int]) -> None:
    call = random_call()
    best = next(iter(door.kernels().values()))
    assert all(map(torch.equal, all_of(best, call), all_of(kernel[1], call)))


@KERNELS
def test_gradients_are_exact_over_micro_batches_and_chunks(
    kernel: tuple[InstructionSet, int],
) -> None:
    cores = whole_cores(((25, 30, 20), (2, 2, 4), (3, 5)))
    how = bags(15_000, 0, 9, 16, count=20_001)
    grad = torch.randint(-1, 2, (50, 16)).float()
    made, found = exactly(cores, how, grad)
    assert torch.equal(door.forward_by(kernel[1], cores, *how).double(), made)
    for gradient, expected in zip(
        door.backward_by(kernel[1], grad, cores, *how), found, strict=False
    ):
        assert torch.equal(gradient.double(), expected)


@pytest.mark.parametrize("equal", [False, True], ids=["any ids", "equal ids"])
@pytest.mark.parametrize("count", [0, 1, 4_999, 40_000])
def test_threads_do_not_change_a_bit(
    monkeypatch: pytest.MonkeyPatch, count: int, equal: bool
) -> None:
    if not door.kernels():
        pytest.skip("no compiled library")
    call, best = random_call(count), next(iter(door.kernels().values()))
    if equal:
        call[2][2].fill_(77)
    results = []
    for threads in (1, 2, 3, 4, 5):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=threads: count)
        results.append(all_of(best, call))
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


def test_a_bag_is_the_ordered_sum_of_its_rows_regardless_of_others() -> None:
    if not door.kernels():
        pytest.skip("no compiled library")
    cores, _, _ = random_call()
    best = next(iter(door.kernels().values()))
    ids = torch.randint(0, 15_000, (40_000,))
    how = (None, None, ids, None, None, 15_000, -1, 40_000, 0)
    rows = door.forward_by(best, cores, *how)
    few = (None, None, ids[:7], None, None, 15_000, -1, 7, 0)
    assert torch.equal(door.forward_by(best, cores, *few), rows[:7])
    together = door.forward_by(best, cores, *how[:7], 2000, 0)
    expected = torch.zeros(2000, 64)
    for place in range(20):
        expected += rows.view(2000, 20, 64)[:, place]
    assert torch.equal(together, expected)


def test_the_operator_passes_torchs_checks() -> None:
    cores, _, _ = random_call()
    how = (None, None, torch.randint(0, 99, (12,)), None, torch.rand(12), 99, 3, 4, 0)
    torch.library.opcheck(torch.ops.slipstream.tt.default, (cores, *how))
    grad = torch.randn(4, 64)
    torch.library.opcheck(torch.ops.slipstream.tt.gradient, (grad, cores, *how))
    torch.library.opcheck(torch.ops.slipstream.tt.weights, (grad, cores, *how))


def test_invalid_arguments_of_the_operator_are_named() -> None:
    cores, _, _ = random_call()
    ids = torch.arange(6)
    good: dict[str, Any] = {
        "cores": cores, "cache": None, "hot": None, "ids": ids, "offsets": None, "weights": None,
        "rows": 50, "padding": -1, "bags": 3, "mode": 0,
    }  # fmt: skip
    operator = torch.ops.slipstream.tt.default
    assert operator(*good.values()).shape == (3, 64)
    cache, hot = torch.zeros(2, 64), table_of(torch.tensor([3, 4]))
    for change, message in (
        ({"cores": cores[:1]}, "cores: there are 1"),
        ({"cores": [cores[0], cores[2], cores[1]]}, r"^cores: .*\branks\b"),
        ({"cores": [cores[0].double(), *cores[1:]]}, r"^cores: .*\bdtype\b"),
        ({"cores": [cores[0][:0], *cores[1:]]}, "cores: .*not empty"),
        ({"cache": cache[:, :3], "hot": hot}, "cache: must be"),
        ({"cache": cache}, "hot: must be"),
        ({"cache": cache, "hot": hot[:3].contiguous()}, "hot: .*a power of two"),
        ({"ids": ids.float()}, "int32 or int64"),
        ({"ids": ids + 45}, "input: the id 50 at place 5"),
        ({"bags": 4}, "do not fill"),
        ({"offsets": torch.tensor([0, 2])}, "offsets"),
        ({"weights": torch.rand(5)}, "per_sample_weights"),
        ({"weights": torch.rand(6), "mode": 1}, "mode"),
        ({"mode": 2}, "mode"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            operator(*{**good, **change}.values())
    how, grad = list(good.values()), torch.ones(3, 64)
    for wrong in (grad[:2], grad.double()):
        with pytest.raises(InvalidArgumentError, match="grad"):
            torch.ops.slipstream.tt.gradient(wrong, *how)
        with pytest.raises(InvalidArgumentError, match="grad"):
            torch.ops.slipstream.tt.weights(wrong, *how)
