"""Ids and offsets are checked with and without the library, and errors report the position."""

from __future__ import annotations

import pytest
import torch

from environments import switch_library_off
from slipstream.errors import InvalidArgumentError
from slipstream.native import library
from slipstream.techniques.embedding.kernels import bags

ROWS = torch.tensor([5, 7])


@pytest.fixture(params=["compiled", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        switch_library_off(monkeypatch)
    elif library() is None:
        pytest.skip("no compiled library")
    return str(request.param)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_valid_bags_pass(way: str, dtype: torch.dtype) -> None:
    ids = torch.tensor([0, 4, 1, 6, 5, 0], dtype=dtype)
    bags.check(ids, torch.tensor([0, 3, 3, 6]), ROWS, 2)
    bags.check(ids, torch.tensor([0, 3, 3, 6, 6]), ROWS, 2)
    bags.check(ids, None, torch.tensor([7]), 3)
    bags.check(ids[:0], torch.tensor([0, 0, 0, 0]), ROWS, 2)
    bags.check(ids[:0], torch.empty(0, dtype=torch.int64), ROWS, 0)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_are_checked_against_their_own_table(way: str, dtype: torch.dtype) -> None:
    offsets = torch.tensor([0, 1, 2, 3])
    with pytest.raises(InvalidArgumentError, match=r"^input: .*\b6\b.*\b1\b.*\b5\b"):
        bags.check(torch.tensor([0, 6, 6, 6], dtype=dtype), offsets, ROWS, 2)
    with pytest.raises(InvalidArgumentError, match=r"\b7\b.*\b3\b.*\b7\b.*\b1\b"):
        bags.check(torch.tensor([0, 4, 6, 7], dtype=dtype), offsets, ROWS, 2)
    # Like torch's, and like all of ours.
    with pytest.raises(IndexError, match=r"-1\b.*\b2\b"):
        bags.check(torch.tensor([0, 4, -1, 6], dtype=dtype), None, ROWS, 2)
    with pytest.raises(InvalidArgumentError, match=r"-3\b.*\b0\b"):
        bags.check(torch.tensor([-3], dtype=dtype), None, torch.tensor([2**62]), 1)


def test_offsets_increase_from_zero_to_the_number_of_ids(way: str) -> None:
    ids = torch.zeros(4, dtype=torch.int64)
    for offsets, message in (
        ([1, 2], r"\b1\b.*\b0\b"),
        ([-1, 2], r"-1\b.*\b0\b"),
        ([0, 3, 2], r"\boffset 2\b.*\bplace 2\b.*\b3\b"),
        ([0, 5], r"\boffset 5\b.*\bplace 1\b.*\b4 ids\b"),
        ([0, -(2**63)], r"\bplace 1\b"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            bags.check(ids, torch.tensor(offsets), torch.tensor([1]), len(offsets))


def test_device_checks_equal_all_other_checks() -> None:
    rows = torch.tensor([5])
    for ids, offsets in (
        ([0, 4, 2], [0, 1]), ([0, 4, 2], [0, 3, 3]), ([4], None), ([0, 5], [0]), ([-1, 0], None),
        ([0, 1], [1, 2]), ([0, 1], [0, 2, 1]), ([0, 1], [0, 3]), ([0, 1], [1]),
    ):  # fmt: skip
        arguments = torch.tensor(ids), None if offsets is None else torch.tensor(offsets), rows
        total = 1 if offsets is None else len(offsets)
        assert bags._is_sound(*arguments) == (bags._fault_by_torch(*arguments, total) is None)
    assert not bags._is_sound(torch.tensor([0]), None, ROWS)


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("padding", [-1, 3])
@pytest.mark.parametrize("has_end", [False, True])
def test_rows_reduced_to_bags_equal_torchs(mode: str, padding: int, has_end: bool) -> None:
    torch.manual_seed(0)
    ids, offsets = torch.randint(0, 5, (12,)), torch.tensor([0, 0, 4, 4, 9, 12])
    weights = torch.randn(12, dtype=torch.float64) if mode == "sum" else None
    rows = torch.randn(12, 2, dtype=torch.float64)
    expected = bags.reduced(rows, ids, offsets, mode, weights, padding, has_end)
    pooled = bags.summed(rows, ids, offsets, weights, padding, mode == "mean", has_end)
    assert pooled.shape == (6 - has_end, 2)
    torch.testing.assert_close(pooled, expected)


def test_gradients_of_rows_reduced_to_bags() -> None:
    ids, offsets = torch.tensor([0, 3, 1, 2]), torch.tensor([0, 1, 1])
    rows, weights = (torch.randn(4, *s, dtype=torch.float64).requires_grad_() for s in ((2,), ()))
    for mean in (False, True):
        assert torch.autograd.gradcheck(
            lambda r, w, mean=mean: bags.summed(r, ids, offsets, w, 3, mean, False), (rows, weights)
        )
