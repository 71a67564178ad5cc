"""Bytes that a network interface sent and received."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path

import pytest

from slipstream.errors import UnknownNameError
from slipstream.measure import wire


def test_an_interface_counts_its_traffic():
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


def test_an_interface_is_read_during_traffic() -> None:
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
    # What leaves a loopback interface also enters it.
    assert samples.sent[-1] >= 20_000
    assert samples.received[-1] == samples.sent[-1]
    assert not [thread for thread in threading.enumerate() if thread.name == "slipstream-interface"]


def test_a_rate_over_a_step_is_the_mean_of_its_phases() -> None:
    # Steps of 1 s and 2 s, whose second halves carry 100 and 300 bytes.
    times, carried = [0.0, 0.5, 1.0, 2.0, 3.0], [0, 0, 100, 100, 400]
    found = wire.by_phase(times, carried, [0.0, 1.0, 3.0], bins=4)
    assert found == pytest.approx([0.0, 0.0, 400 / 1.5, 400 / 1.5])
    assert sum(found) / len(found) * 3.0 == pytest.approx(400)
