"""Cycles of lanes that skip zeros: equal to a slow model, and within the laws of the machine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from slipstream.errors import InvalidArgumentError
from slipstream.hardware import (
    Accelerator,
    Array,
    FrontEnd,
    LayerShape,
    Operand,
    Pass,
    simulate_pass,
)
from slipstream.hardware.kernels import FAMILY, Streams, schedule, stream_cycles
from slipstream.hardware.layers import OPERANDS, streams
from slipstream.hardware.mapping import jobs
from slipstream_bench.systems.accelerator import oracle

CHIP = replace(Accelerator.load("tensordash"), array=Array(tiles=3, rows=4, columns=2))
STANDARD = FrontEnd()


@pytest.mark.parametrize("seed", range(200))
def test_all_passes_of_random_layers_take_the_cycles_of_the_slow_model(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shape, rows = oracle.random_layer(rng), int(rng.choice([1, 2, 4, 8]))
    chip = replace(CHIP, array=Array(tiles=3, rows=rows, columns=2))
    for which in Pass:
        for operand in OPERANDS[which]:
            bits = rng.random(shape.shapes[operand]) < rng.random()
            found = simulate_pass(shape, which, {operand: bits}, chip)
            cycles = oracle.pass_cycles(shape, which, operand, bits, rows, 2, 3)
            full = oracle.pass_cycles(shape, which, operand, np.ones_like(bits), rows, 2, 3)
            assert (found.cycles, found.structural_cycles) == (cycles, full), (which, operand)
            assert found.ideal_cycles <= found.cycles <= full <= found.dense_cycles
            assert found.dense_cycles <= 3 * max(found.cycles, 1)
            made = streams(shape, which, operand, bits, 16, rows)
            sizes = [(len(part.base), len(part.offset), part.columns) for part in made]
            assert sizes == list(jobs(shape, which, operand, rows, 16))


@pytest.mark.parametrize(("rows", "zeros"), oracle.CURVE)
def test_the_curve_of_random_zeros(rows: int, zeros: float) -> None:
    speedup = oracle.CURVE[rows, zeros]
    part = oracle.bernoulli(zeros, 8, rows)
    cycles = stream_cycles(STANDARD, 16, part)[:, 0]
    assert 2048 * len(cycles) / cycles.sum() == pytest.approx(speedup, abs=0.02)


@pytest.mark.parametrize("lanes", [4, 16, 20, 64])
@pytest.mark.parametrize("lookahead", [1, 2, 3])
def test_kernels_and_numpy_agree(
    lanes: int, lookahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not FAMILY.kernels:
        pytest.skip("the library is not compiled")
    front = FrontEnd(lookahead=lookahead, lookaside=((1, -1), (1, 2), (lookahead, 1)))
    rng = np.random.default_rng(lanes)
    drawn = rng.integers(0, 2**63, 900, np.uint64) & rng.integers(0, 2**63, 900, np.uint64)
    words = (drawn & np.uint64((1 << lanes) - 1)).astype(np.uint16 if lanes <= 16 else np.uint64)
    base = np.append(rng.integers(0, 100, 27), -1).reshape(14, 2)
    part = Streams(words, base, rng.integers(0, 800, 50), 1)
    windows = drawn[:300].reshape(-1, lookahead + 1) & np.uint64((1 << lanes) - 1)
    found = [stream_cycles(front, lanes, part, kernel=k) for k in FAMILY.kernels.values()]
    scheduled = schedule(front, lanes, windows)
    monkeypatch.setattr("slipstream.native.family.library", lambda: None)
    assert FAMILY.library is None
    for cycles in found:
        np.testing.assert_array_equal(cycles, stream_cycles(front, lanes, part))
    for ours, other in zip(scheduled, schedule(front, lanes, windows), strict=True):
        np.testing.assert_array_equal(ours, other)


def issued(front: FrontEnd, lanes: int, rows: NDArray[np.uint64]) -> tuple[list[Any], int]:
    """Run one stream window by window; return the pairs (row, lane) issued, and the cycles."""
    depth, at, cycles, pairs = front.lookahead + 1, 0, 0, []
    rest = np.concatenate([rows, np.zeros(depth, np.uint64)])
    while at < len(rows):
        (selects,), (advance,) = schedule(front, lanes, rest[None, at : at + depth])
        for lane, option in enumerate(selects.tolist()):
            if option < len(front.options):
                row, distance = front.options[option]
                place = (lane + distance) % lanes
                pairs.append((at + row, place))
                rest[at + row] &= ~np.uint64(1 << place)
        at, cycles = at + int(advance), cycles + 1
    return pairs, cycles


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=12), st.integers(0, 2**16 - 1))
def test_every_effectual_pair_is_issued_exactly_once(values: list[int], other: int) -> None:
    """Two-sided scheduling skips at least as much as one-sided."""
    rows = np.array(values, np.uint64)
    pairs, cycles = issued(STANDARD, 16, rows)
    effectual = [(t, i) for t, value in enumerate(values) for i in range(16) if value >> i & 1]
    assert sorted(pairs) == effectual
    part = Streams(rows.astype(np.uint16), np.zeros((1, 1), np.int64), np.arange(len(rows)), 1)
    assert stream_cycles(STANDARD, 16, part)[0].tolist() == [cycles, len(pairs), len(pairs)]
    both = part.words & np.uint16(other)
    assert stream_cycles(STANDARD, 16, replace(part, words=both))[0, 0] <= cycles


def test_a_mask_of_another_shape_is_refused() -> None:
    shape = LayerShape(1, 3, 8, 9, 9, 3, 3)
    with pytest.raises(InvalidArgumentError, match=r"activation has shape \(1, 3, 4, 4\)"):
        simulate_pass(shape, Pass.FORWARD, {Operand.ACTIVATION: np.ones((1, 3, 4, 4), bool)}, CHIP)


def test_more_rows_that_advance_together_are_never_faster() -> None:
    part = oracle.bernoulli(0.6, 8, 1, 64)
    cycles = [
        stream_cycles(STANDARD, 16, replace(part, base=part.base.reshape(-1, r)))[:, 0].max()
        for r in (1, 2, 4, 8)
    ]
    assert cycles == sorted(cycles)


@pytest.mark.parametrize("which", Pass)
def test_sums_over_the_scheduled_pairs_are_the_results_of_the_layer(which: Pass) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(1, 5, 5, 4).double().relu(), torch.randn(3, 5, 3, 3).double()
    x.requires_grad_()
    w.requires_grad_()
    out = torch.nn.functional.conv2d(x, w, stride=2, padding=1)
    gradient = torch.randn_like(out).relu()
    out.backward(gradient)
    shape = LayerShape(1, 5, 3, 5, 4, 3, 3, (2, 2), (1, 1))
    tensors = {"activation": x, "weight": w, "gradient": gradient}
    values = [tensors[str(operand)].detach().numpy() for operand in OPERANDS[which]]
    parts = [
        list(oracle.pass_streams(shape, which, operand, value))
        for operand, value in zip(OPERANDS[which], values, strict=True)
    ]
    kernel = list(np.ndindex(3, 3))
    places = [positions for positions, _ in oracle.phases(shape, kernel)]
    expected = {Pass.FORWARD: out, Pass.INPUT: x.grad, Pass.WEIGHT: w.grad}[which]
    assert expected is not None
    result = np.zeros(expected.shape)
    for number, (((own,), _), ((other,), _)) in enumerate(zip(*parts, strict=True)):
        sums = np.array([[scheduled_sum(a, b) for b in other] for a in own])
        if which is Pass.INPUT:
            for position, row in zip(places[number], sums, strict=True):
                result[0, :, *position] = row
        else:
            result = (sums.T if which is Pass.FORWARD else sums).reshape(expected.shape)
    np.testing.assert_allclose(result, expected.detach().numpy(), rtol=1e-6, atol=1e-9)


def scheduled_sum(own: list[list[float]], other: list[list[float]]) -> float:
    """Return the inner product over the pairs that one-sided scheduling issues."""
    rows = np.packbits(np.array(own) != 0, axis=1, bitorder="little").view(np.uint16).ravel()
    pairs, _ = issued(STANDARD, 16, rows.astype(np.uint64))
    return float(sum(own[row][lane] * other[row][lane] for row, lane in pairs))
