"""Every kernel reads elements at the positions of the formula, and adds gradients there."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from environments import check_choice
from slipstream.errors import InvalidArgumentError, SlipstreamError
from slipstream.native import InstructionSet
from slipstream.techniques.embedding.kernels import robe as door
from slipstream.techniques.embedding.kernels import robe_reference as reference

KERNELS = pytest.mark.parametrize("kernel", door.kernels().items(), ids=lambda k: str(k[0]))
BLOCKS = (1, 2, 8, 16, 32, 48, 64, 128, 256)
DIMS = (16, 24, 64, 128)


def oracle(
    array: NDArray[np.float32], key: int, ids: list[int], d: int, z: int, sign: bool
) -> NDArray[np.float32]:
    """Return rows by the formula, element by element."""
    k1, k2, word, m = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 2**64, len(array)

    def mix(n: int) -> int:
        n = (n ^ (n >> 30)) * 0xBF58476D1CE4E5B9 % word
        n = (n ^ (n >> 27)) * 0x94D049BB133111EB % word
        return n ^ (n >> 31)

    rows = np.empty((len(ids), d), np.float32)
    for (r, x), i in itertools.product(enumerate(ids), range(d)):
        row, flat = (x, i) if z <= d else (0, x * d + i)
        start = mix((key + row * k1 + flat // z * k2) % word) * m >> 64
        bit = mix(((key ^ 0xD6E8FEB86659FD93) % word + x * k1 + i // 64 * k2) % word) >> i % 64
        rows[r, i] = array[(start + flat % z) % m] * (-1 if sign and bit & 1 else 1)
    return rows


def described(*tables: tuple[int, int, int]) -> torch.Tensor:
    """Tables 0, 1, ... with these rows, dimensions and padding rows."""
    return torch.tensor([[door.table_key(3, t), *table] for t, table in enumerate(tables)])


def one_each(array: torch.Tensor, ids: torch.Tensor, table: Any, z: int, sign: bool) -> Any:
    return array, ids, None, None, table, len(ids), int(table[0, 2]), z, sign, 0


@KERNELS
@pytest.mark.parametrize("d", DIMS)
def test_rows_equal_the_formula_bitwise(kernel: tuple[InstructionSet, int], d: int) -> None:
    ids = [0, 1, 2, 77, 2**31 + 5, 2**45 - 1]
    table = described((2**45, d, -1))
    for z, sign in itertools.product(BLOCKS, (True, False)):
        for size in (z, 3 * z + 1, 5003):
            if size < z:
                continue
            array = torch.randn(size)
            made = door.forward_by(kernel[1], *one_each(array, torch.tensor(ids), table, z, sign))
            expected = oracle(array.numpy(), int(table[0, 0]), ids, d, z, sign)
            assert np.array_equal(made.numpy(), expected), (z, sign, size)


@pytest.mark.parametrize("sign", [True, False])
def test_the_reference_equals_the_formula(sign: bool) -> None:
    ids, table = [0, 5, 2**40], described((2**45, 24, -1))
    for z in BLOCKS:
        array = torch.randn(1000, dtype=torch.float64)
        made = door.by_reference(*one_each(array, torch.tensor(ids), table, z, sign))
        expected = oracle(array.numpy().astype(np.float32), int(table[0, 0]), ids, 24, z, sign)
        assert np.array_equal(made.numpy().astype(np.float32), expected), z


def test_positions_are_those_of_every_version() -> None:
    # Recorded once: a change of any of them changes the meaning of checkpoints.
    assert door.table_key(0, 0) == GOLDEN_KEYS[0]
    assert door.table_key(2**63 - 1, 25) == GOLDEN_KEYS[1]
    ids = torch.tensor([0, 1, 2**31, 2**40 + 3])
    block = torch.tensor([0, 3, 1, 2**20])
    for size, expected in GOLDEN_STARTS.items():
        assert reference.starts(GOLDEN_KEYS[0], ids, block, size).tolist() == expected
    signs = reference.signs(GOLDEN_KEYS[0], torch.tensor([7]), 100, torch.float32)[0]
    assert "".join("+" if s > 0 else "-" for s in signs.tolist()) == GOLDEN_SIGNS


GOLDEN_KEYS = (-6224405835515295160, 1629916282312275217)
GOLDEN_STARTS = {
    64: [46, 58, 6, 21],
    27_000_000: [19555230, 24806323, 2925750, 9056012],
    1_099_511_627_777: [796340860476, 1010179296504, 119144309551, 368784847652],
}
GOLDEN_SIGNS = (
    "--++-+++-+-+-++++-+-++++++--++--+--+++-+--++-----+"
    "++--+-++----+++++++---+-+++----+++--+--++---+-++-+"
)


def bags(mode: int, seed: int, z: int, dims: tuple[int, int] = (64, 24)) -> tuple[Any, ...]:
    """Two tables, bags of 0 to 60 ids with some padding: arguments of the operator."""
    draw = torch.Generator().manual_seed(seed)
    count = 7
    sizes = torch.randint(0, 60, (2 * count,), generator=draw)
    sizes[[1, count]] = 0
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    ids = torch.randint(0, 90, (int(offsets[-1]),), generator=draw)
    weights = torch.rand(len(ids), generator=draw) if mode == 0 else None
    table = described((90, dims[0], 4), (100, dims[1], -1))
    return ids, offsets, weights, table, count, sum(dims), z, True, mode


@KERNELS
@pytest.mark.parametrize("mode", range(3), ids=door.MODES)
def test_bags_and_gradients_equal_torchs_on_expanded_rows(
    kernel: tuple[InstructionSet, int], mode: int
) -> None:
    for z, size in ((16, 3000), (32, 40), (64, 64), (8, 500), (48, 700), (128, 600)):
        array = torch.randn(size, requires_grad=True)
        how = bags(mode, z, z)
        expected = door.by_reference(array, *how)
        made = door.forward_by(kernel[1], array.detach(), *how)
        torch.testing.assert_close(made, expected, rtol=1e-5, atol=1e-5)
        grad = torch.randn_like(made)
        (gradient,) = torch.autograd.grad(expected, array, grad)
        found = door.backward_by(kernel[1], grad, array.detach(), made, *how)
        error = (found - gradient).abs().max() / gradient.abs().max()
        assert error <= 1e-6, (z, float(error))


@KERNELS
def test_every_instruction_set_gives_the_same_bits(kernel: tuple[InstructionSet, int]) -> None:
    best = next(iter(door.kernels().values()))
    for mode, z in itertools.product(range(3), (16, 48, 64, 128)):
        array, how = torch.randn(999), bags(mode, z + 1, z, (64, 128))
        first, other = (door.forward_by(k, array, *how) for k in (best, kernel[1]))
        assert torch.equal(first, other)
        grad = torch.randn_like(first)
        back = [door.backward_by(k, grad, array, first, *how) for k in (best, kernel[1])]
        assert torch.equal(*back)
        if mode == 0:
            weights = [door.weights_by(k, grad, array, *how) for k in (best, kernel[1])]
            assert torch.equal(*weights)


@KERNELS
@pytest.mark.parametrize("dims", [(64, 64), (64, 24)])
def test_a_result_larger_than_the_caches_equals_its_halves(
    kernel: tuple[InstructionSet, int], dims: tuple[int, int]
) -> None:
    # From 16 MiB on it is written past the caches if its rows begin at whole vectors.
    half, width = 25_000, sum(dims)
    table = described((90_000, dims[0], 5), (90_000, dims[1], -1))
    ids = torch.randint(0, 90_000, (2, 2, half), generator=torch.Generator().manual_seed(1))
    array = torch.randn(3001)
    how = (None, None, table, 2 * half, width, 32, True, 0)
    whole = door.forward_by(kernel[1], array, ids.flatten(), *how)
    assert whole.nbytes >= 2**24
    for number, part in enumerate(whole.split(half)):
        own = ids[:, number].flatten()
        found = door.forward_by(kernel[1], array, own, None, None, table, half, *how[4:])
        assert torch.equal(part, found)


@pytest.mark.parametrize("mode", range(3), ids=door.MODES)
def test_threads_do_not_change_a_bit(mode: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if not door.kernels():
        pytest.skip("no compiled library")
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 10**6, (6000,), generator=draw)
    how = (ids, None, None, described((10**6, 64, -1)), 400, 64, 32, True, mode)
    array = torch.randn(5000, generator=draw)
    results = []
    for threads in (1, 2, 5):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=threads: count)
        made = door.robe(array, *how)
        results.append((made, door.robe_gradient(made, array, made, *how, 1.0)))
    for other in results[1:]:
        assert torch.equal(results[0][0], other[0])
        assert torch.equal(results[0][1], other[1])


def test_an_array_beyond_the_range_of_int32() -> None:
    # At a large offset, instead of with 8 GiB of it.
    size = 2**31 + 2**30 + 12345
    ids = torch.arange(20_000)
    starts = reference.starts(door.table_key(0, 0), ids, torch.zeros(1, dtype=torch.int64), size)
    expected = [
        reference.mix((door.table_key(0, 0) + x * 0x9E3779B97F4A7C15) % 2**64) * size >> 64
        for x in range(20_000)
    ]
    assert starts.tolist() == expected
    assert int(starts.max()) > 2**31


def test_the_environment_chooses_the_kernel_and_changes_no_row() -> None:
    script = (
        "import torch; from slipstream.techniques.embedding.kernels import robe as r;"
        "t = torch.tensor([[r.table_key(0, 0), 99, 64, -1]]); a = torch.arange(500.);"
        "ids = torch.arange(99, dtype=torch.int32);"
        "made = r.robe(a, ids, None, None, t, 99, 64, 32, True, 0);"
        "print(next(iter(r.kernels()), None), made.double().sum().item())"
    )
    check_choice(script)


def test_the_operator_passes_torchs_checks() -> None:
    array = torch.randn(400)
    ids, table = torch.randint(0, 50, (12,)), described((50, 16, -1))
    how = (ids, None, torch.rand(12), table, 4, 16, 8, True, 0)
    torch.library.opcheck(torch.ops.slipstream.robe.default, (array, *how))
    grad = torch.randn(4, 16)
    torch.library.opcheck(torch.ops.slipstream.robe.gradient, (grad, array, None, *how, 1.0))
    torch.library.opcheck(torch.ops.slipstream.robe.weights, (grad, array, *how))


def test_invalid_arguments_of_the_operator_are_named() -> None:
    array, ids, table = torch.randn(400), torch.arange(6), described((50, 16, -1))
    good: dict[str, Any] = {
        "array": array, "ids": ids, "offsets": None, "weights": None, "tables": table, "bags": 3,
        "width": 16, "block": 8, "sign": True, "mode": 0,
    }  # fmt: skip
    assert door.robe(*good.values()).shape == (3, 16)
    for change, message in (
        ({"array": array.view(20, 20)}, "array"),
        ({"block": 0}, "block"),
        ({"block": 401}, "block"),
        ({"ids": ids.float()}, "int32 or int64"),
        ({"ids": ids + 45}, "input: the id 50 at place 5"),
        ({"bags": 4}, "do not fill"),
        ({"offsets": torch.tensor([0, 2])}, "offsets"),
        ({"weights": torch.rand(5)}, "per_sample_weights"),
        ({"weights": torch.rand(6), "mode": 1}, "mode"),
        ({"tables": table[:, :3]}, "tables"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            door.robe(*{**good, **change}.values())
    how, grad = list(good.values())[1:], torch.ones(3, 16)
    with pytest.raises(InvalidArgumentError, match="grad"):
        door.robe_gradient(grad[:2], array, None, *how, 1.0)
    with pytest.raises(InvalidArgumentError, match="grad"):
        door.robe_gradient(grad, array, None, *how[:-1], 2, 1.0)
    with pytest.raises(InvalidArgumentError, match="input: the id"):
        door.robe_gradient(grad, array, None, ids + 45, *how[1:], 1.0)
    with pytest.raises(InvalidArgumentError, match="grad"):
        door.robe_weights(grad.double(), array, *how)
    if door.kernels():
        with pytest.raises(SlipstreamError, match="status"):
            door.robe(*{**good, "width": 17}.values())


@pytest.mark.parametrize("size", [2**31 + 4099, 2**32 + 4099])
def test_a_large_array_is_read(size: int) -> None:
    try:
        # Of its gigabytes only the accessed pages exist.
        array = torch.empty(size)
    except RuntimeError:
        pytest.skip("no address space")
    table, ids = described((2**40, 16, -1)), torch.tensor([1, 2**35])
    places = reference.places(int(table[0, 0]), ids, 16, 16, size)
    array[places] = torch.arange(32.0).view(2, 16)
    assert torch.equal(
        door.robe(*one_each(array, ids, table, 16, False)), torch.arange(32.0).view(2, 16)
    )
