"""Bytes of collectives against the ring's formula, over real gloo ranks."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.child import Child
from slipstream.errors import MeasurementError, UnknownNameError
from slipstream_bench.payload import count_bytes, sent_by_rank

HERE = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path[1:]])}


def ring_all_reduce(elements, ranks):
    """Elements every rank sends in the two rounds of a ring, simulated chunk by chunk."""
    chunk = [elements // ranks + (i < elements % ranks) for i in range(ranks)]
    sent = [0] * ranks
    for _ in ("reduce-scatter", "all-gather"):
        for step in range(ranks - 1):
            for rank in range(ranks):
                sent[rank] += chunk[(rank - step) % ranks]
    return sent


@given(st.integers(1, 10_000), st.integers(2, 16))
def test_all_reduce_is_what_a_ring_sends(elements, ranks):
    sent = ring_all_reduce(elements, ranks)
    mean = sum(sent) / ranks
    assert sent_by_rank("all_reduce", elements, ranks) == pytest.approx(mean)


@given(
    st.sampled_from(["all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce"]),
    st.integers(0, 10**9),
)
def test_one_rank_alone_sends_nothing(operation, size):
    assert sent_by_rank(operation, size, 1) == 0


def test_an_unknown_collective_is_named():
    with pytest.raises(UnknownNameError, match="all_red"):
        sent_by_rank("all_red", 1, 2)


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.full), 3])
def test_collectives_over_gloo_are_counted_by_rank_and_step(ranks, tmp_path):
    n = 4 * 999  # bytes
    address = f"file://{tmp_path}/rendezvous"
    with contextlib.ExitStack() as stack:
        children = [
            stack.enter_context(Child(f"rank {rank}", environment=HERE)) for rank in range(ranks)
        ]
        for rank, child in enumerate(children):
            child.start_call(
                "payload_rank:collectives", rank=rank, ranks=ranks, address=address, elements=999
            )
        answers = [child.finish_call(timeout_s=600) for child in children]
    share = (ranks - 1) / ranks
    for rank, answer in enumerate(answers):
        found = dict(answer["collectives"])
        assert found["all_reduce"] == pytest.approx(2 * share * n)
        assert found["broadcast"] == pytest.approx(share * n)
        assert found["all_gather"] == pytest.approx(share * ranks * n)
        assert found["reduce"] == pytest.approx(share * n)
        assert found["gather"] == (0 if rank == 0 else n)
        assert found["scatter"] == pytest.approx((ranks - 1) * n if rank == 0 else 0)
        assert found["all_to_all"] == pytest.approx(share * ranks * 40)
        assert ("send" in found) == (rank == 0)
        # DistributedDataParallel reduces one bucket of 32 x 64 gradients from C++.
        (ddp,) = answer["ddp"]
        assert ddp == ["all_reduce", pytest.approx(2 * share * 32 * 64 * 4)]


def test_counting_needs_a_process_group():
    with pytest.raises(MeasurementError, match="no process group"), count_bytes():
        pass
