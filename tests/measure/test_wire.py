"""Bytes of collectives against the ring's formula, over real gloo ranks."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.child import Child
from slipstream.errors import MeasurementError, UnknownNameError
from slipstream.measure import wire

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
    assert wire.sent_by_rank("all_reduce", elements, ranks) == pytest.approx(mean)


@given(
    st.sampled_from(["all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce"]),
    st.integers(0, 10**9),
)
def test_one_rank_alone_sends_nothing(operation, size):
    assert wire.sent_by_rank(operation, size, 1) == 0


def test_an_unknown_collective_is_named():
    with pytest.raises(UnknownNameError, match="all_red"):
        wire.sent_by_rank("all_red", 1, 2)


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
                "workers:collectives", rank=rank, ranks=ranks, address=address, elements=999
            )
        answers = [child.finish_call(timeout_s=600) for child in children]
    share = (ranks - 1) / ranks
    for rank, answer in enumerate(answers):
        found = {operation: (step, sent) for operation, step, sent in answer["collectives"]}
        assert found["all_reduce"] == (0, pytest.approx(2 * share * n))
        assert found["broadcast"] == (1, pytest.approx(share * n))
        assert found["all_gather"] == (1, pytest.approx(share * ranks * n))
        assert found["reduce"][1] == pytest.approx(share * n)
        assert found["gather"][1] == (0 if rank == 0 else n)
        assert found["scatter"][1] == pytest.approx((ranks - 1) * n if rank == 0 else 0)
        assert found["all_to_all"][1] == pytest.approx(share * ranks * 40)
        assert ("send" in found) == (rank == 0)
        # DistributedDataParallel reduces one bucket of 32 x 64 gradients from C++.
        (ddp,) = answer["ddp"]
        assert ddp == ["all_reduce", pytest.approx(2 * share * 32 * 64 * 4)]


def test_counting_needs_a_process_group():
    with pytest.raises(MeasurementError, match="no process group"), wire.count_bytes():
        pass


def test_an_interface_counts_what_passes():
    if not Path("/proc/thread-self/net/dev").exists():
        pytest.skip("no interface counters here")
    import socket

    loopback = wire.Interface("lo")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver:
        receiver.bind(("127.0.0.1", 0))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            for _ in range(10):
                sender.sendto(b"x" * 1000, receiver.getsockname())
    assert loopback.sent_bytes >= 10_000
    assert loopback.received_bytes >= 10_000
    with pytest.raises(UnknownNameError, match="network interface 'nope0'"):
        wire.Interface("nope0")


def test_an_interface_is_read_while_it_carries_something() -> None:
    interface = wire.Interface("lo")
    with wire.sampled(interface, 0.002) as samples, socket.socket(type=socket.SOCK_DGRAM) as out:
        began = time.perf_counter()
        while len(samples.times_s) < 20 and time.perf_counter() - began < 20:
            out.sendto(bytes(1000), ("127.0.0.1", 9))
            time.sleep(0.001)
    assert len(samples.times_s) == len(samples.sent) == len(samples.received) >= 20
    assert samples.times_s == sorted(samples.times_s)
    assert samples.sent == sorted(samples.sent)
    assert samples.sent[0] == 0
    # What leaves a loopback interface comes in.
    assert samples.sent[-1] >= 20_000
    assert samples.received[-1] == samples.sent[-1]
    assert not [thread for thread in threading.enumerate() if thread.name == "slipstream-interface"]


def test_a_rate_over_a_step_is_the_mean_of_its_phases() -> None:
    # Steps of 1 s and of 2 s, whose second halves carry 100 and 300 bytes.
    times, carried = [0.0, 0.5, 1.0, 2.0, 3.0], [0, 0, 100, 100, 400]
    found = wire.by_phase(times, carried, [0.0, 1.0, 3.0], bins=4)
    assert found == pytest.approx([0.0, 0.0, 400 / 1.5, 400 / 1.5])
    assert sum(found) / len(found) * 3.0 == pytest.approx(400)
