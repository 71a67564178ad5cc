"""Durations of untimed calls: from neighbours, and from the machine's limits."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.durations import Durations, durations, roofline
from slipstream.durations.fitted import fitted
from slipstream.durations.peaks import Peaks
from slipstream.durations.work import Work, work
from slipstream.graph import Call, TensorSpec
from slipstream.provenance import Provenance

MM = "aten::mm(Tensor self, Tensor mat2) -> Tensor"
NEG = "aten::neg(Tensor self) -> Tensor"
VIEW = "aten::view(Tensor(a) self, SymInt[] size) -> Tensor(a)"
EMBEDDING = (
    "aten::embedding(Tensor weight, Tensor indices, SymInt padding_idx=-1, "
    "bool scale_grad_by_freq=False, bool sparse=False) -> Tensor"
)
CONVOLUTION = (
    "aten::convolution(Tensor input, Tensor weight, Tensor? bias, SymInt[] stride, "
    "SymInt[] padding, SymInt[] dilation, bool transposed, SymInt[] output_padding, "
    "SymInt groups) -> Tensor"
)
LSTM = "aten::mkldnn_rnn_layer(Tensor input, Tensor weight0) -> Tensor"


def dense(*shape: int, dtype: str = "float32") -> TensorSpec:
    return TensorSpec(dtype, shape, tuple(torch.empty(shape).stride()))


def mm(m: int, k: int, n: int, dtype: str = "float32") -> Call:
    return Call(
        MM,
        (dense(m, k, dtype=dtype), dense(k, n, dtype=dtype)),
        (dense(m, n, dtype=dtype),),
    )


def neg(n: int) -> Call:
    return Call(NEG, (dense(n),), (dense(n),))


@pytest.mark.parametrize(
    ("call", "flops", "nbytes"),
    [
        (mm(2, 3, 5), 2 * 2 * 3 * 5, 4 * (6 + 15 + 10)),
        (mm(2, 3, 5, "bfloat16"), 60, 2 * 31),
        (neg(7), 0, 56),
        (Call(VIEW, (dense(2, 3), (6,)), (dense(6),)), 0, 0),
        # 1,000 rows of 8, of which four are read and written, and their four indices.
        (
            Call(EMBEDDING, (dense(1000, 8), dense(4, dtype="int64"), -1, False, False),
                 (dense(4, 8),)),
            0,
            2 * 4 * 8 * 4 + 4 * 8,
        ),
        # 6 x 6 pixels of 5 channels, each a product with 3 channels x 3 x 3.
        (
            Call(CONVOLUTION, (dense(1, 3, 8, 8), dense(5, 3, 3, 3), None, (1, 1), (0, 0), (1, 1),
                               False, (0, 0), 1), (dense(1, 5, 6, 6),)),
            2 * 36 * 5 * 27,
            4 * (192 + 135 + 180),
        ),
    ],
)  # fmt: skip
def test_work_follows_from_shapes(call: Call, flops: int, nbytes: int) -> None:
    found = work(call)
    assert found is not None
    assert (found.flops, found.nbytes) == (flops, nbytes)


def test_the_work_of_a_recurrent_layer_does_not_follow_from_shapes() -> None:
    assert work(Call(LSTM, (dense(2, 3), dense(4, 3)), (dense(2, 4),))) is None
    assert fitted(Call(LSTM, (dense(2, 3), dense(4, 3))), []) is None


@given(
    overhead=st.floats(0.1, 10.0),
    exponent=st.floats(0.3, 1.2),
    sizes=st.lists(st.integers(4, 4096), min_size=5, max_size=12, unique=True),
    at=st.floats(0.0, 1.0),
)
def test_a_power_law_is_followed(
    overhead: float, exponent: float, sizes: list[int], at: float
) -> None:
    def time(call: Call) -> float:
        amount = work(call)
        assert amount is not None
        return overhead * float(amount.nbytes) ** exponent

    timings = [(neg(n), time(neg(n))) for n in sizes]
    inside = neg(round(min(sizes) * (max(sizes) / min(sizes)) ** at))
    found = fitted(inside, timings)
    assert found is not None
    assert found.nanoseconds == pytest.approx(time(inside), rel=1e-6)
    assert found.spread < 1e-6


def test_too_few_distant_or_scattered_neighbours_predict_nothing() -> None:
    near = [(neg(n), float(n)) for n in (100, 200, 400, 800)]
    assert fitted(neg(300), near) is not None
    assert fitted(neg(300), near[:3]) is None
    assert fitted(neg(3300), near) is None
    assert fitted(mm(4, 4, 4), near) is None
    halved = [(neg(n), float(n) * 4.0 ** (i % 2)) for i, n in enumerate((100, 200, 400, 800))]
    assert fitted(neg(300), halved) is None
    other_dtype = [(mm(n, n, n, "bfloat16"), float(n**3)) for n in (8, 16, 32, 64)]
    assert fitted(mm(24, 24, 24), other_dtype) is None


def test_extrapolation_is_less_certain() -> None:
    timings = [
        (neg(n), float(n) * (1.1 if i % 2 else 1.0)) for i, n in enumerate((100, 200, 400, 800))
    ]
    inside, outside = fitted(neg(300), timings), fitted(neg(2400), timings)
    assert inside is not None
    assert outside is not None
    assert outside.spread > 1.5 * inside.spread > 0


def test_views_take_the_time_of_views() -> None:
    def view(n: int) -> Call:
        return Call(VIEW, (dense(n), (n,)), (dense(n),))

    found = fitted(view(10**6), [(view(n), 900.0 + n) for n in (10, 20, 30, 40)])
    assert found is not None
    assert 900 < found.nanoseconds < 950


def test_the_roof_is_the_higher_of_arithmetic_and_memory() -> None:
    limits = roofline.Limits({"float32": 1e11}, 1e10, 1000.0)
    assert limits.min_ns(Work(0, 10**7, "float32")) == pytest.approx(1000 + 1e6)
    assert limits.min_ns(Work(10**9, 10**6, "float32")) == pytest.approx(1000 + 1e7)
    assert limits.min_ns(Work(10**9, 10**9, "float32")) == pytest.approx(1000 + 1e8)
    # A dtype without timings has no prediction.
    assert limits.min_ns(Work(10**9, 10**6, "bfloat16")) is None


def test_bytes_move_at_the_best_rate_of_comparable_sweeps() -> None:
    peaks = Peaks({}, ((10**6, 1e11), (10**7, 4e10), (10**8, 1e10)), 0.0)
    for nbytes, rate in ((10**5, 1e11), (2 * 10**6, 1e11), (3 * 10**6, 4e10), (10**9, 1e10)):
        assert peaks.bytes_per_s(nbytes) == rate


class Benchmark:
    """A machine of 100 Gflop/s and 10 GB/s, on which calls of `broken` cannot run alone."""

    broken: frozenset[str] = frozenset()

    def __init__(self, name: str, **options: Any) -> None:
        pass

    def __enter__(self) -> Benchmark:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def call(self, function: str, *, calls: list[Any], **options: Any) -> list[dict[str, Any]]:
        limits = roofline.Limits({"float32": 1e11, "bfloat16": 2e11}, 1e10, 1000.0)
        found: list[dict[str, Any]] = []
        for call in map(Call.from_json, calls):
            if call.key in self.broken:
                found.append({"error": "not alone"})
                continue
            amount = work(call)
            assert amount is not None
            found.append({"nanoseconds": limits.min_ns(amount), "spread": 0.02})
        return found


@pytest.fixture
def known_durations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Durations:
    monkeypatch.setattr(durations, "Child", Benchmark)
    return Durations(1, tmp_path / "durations.db")


def test_a_ratio_uses_the_best_source_that_covers_both(
    known_durations: Durations, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, large = mm(64, 64, 64), mm(128, 128, 128)
    known_durations.measure([small, large])
    found = known_durations.ratio(small, large)
    assert found is not None
    assert found.provenance is Provenance.MICROBENCHMARK
    # 524,288 and 4,194,304 operations in addition to a call of 1,000 ns.
    assert found.value == pytest.approx((1000 + 41943.04) / (1000 + 5242.88))

    odd = mm(96, 96, 96)
    monkeypatch.setattr(Benchmark, "broken", frozenset({odd.key}))
    known_durations.measure([small, odd])
    found = known_durations.ratio(small, odd)
    assert found is not None
    # No neighbours yet, so the machine's limits, which were measured at the same time.
    assert found.provenance is Provenance.ROOFLINE
    assert found.value == pytest.approx((1000 + 17694.72) / (1000 + 5242.88), rel=0.01)
    assert found.spread == roofline.SPREAD

    known_durations.measure([mm(n, n, n) for n in (32, 48, 80, 112, 160)])
    found = known_durations.ratio(small, odd)
    assert found is not None
    assert found.provenance is Provenance.FITTED
    assert found.value == pytest.approx((1000 + 17694.72) / (1000 + 5242.88), rel=0.15)
    assert 0 < found.spread < 0.4
    # And again from the file alone.
    again = Durations(1, known_durations._path).ratio(small, odd)
    assert again is not None
    assert math.isclose(again.value, found.value)


def test_unknown_calls_have_no_prediction(known_durations: Durations) -> None:
    assert known_durations.ratio(mm(8, 8, 8), mm(16, 16, 16)) is None


def test_an_outlier_among_timings_of_one_size_is_ignored() -> None:
    sizes = (100, 200, 400, 800)
    timings = [(neg(n), n * slower) for n in sizes for slower in (1.0, 1.0, 50.0)]
    found = fitted(neg(300), timings)
    assert found is not None
    assert found.nanoseconds == pytest.approx(300)


def test_uncertainty_grows_per_factor_of_two_outside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # With equally spaced neighbours the error inside is the same everywhere.
    monkeypatch.setattr("slipstream.durations.fitted._nearness", lambda x, at: np.ones(len(x)))
    timings = [(neg(n), n * (1.02 if i % 2 else 1.0)) for i, n in enumerate((100, 200, 400, 800))]
    spreads = [price.spread for n in (800, 1600, 2400) if (price := fitted(neg(n), timings))]
    assert spreads == pytest.approx([spreads[0] * (1 + math.log2(n)) for n in (1, 2, 3)])
