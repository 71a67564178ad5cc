"""Ranks and network labs: timed operations, named failures, complete cleanup."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.cluster import ClusterError
from slipstream.cluster.fitting import fit
from slipstream.cluster.quantity import NOT_GIVEN
from slipstream.cluster.samples import Operation
from slipstream.errors import InvalidArgumentError
from slipstream.provenance import Provenance
from slipstream.ranks import Netlab, calibrate, calibration, operations, why_no_netlab
from slipstream.ranks.calibration import run_operations
from slipstream.ranks.launch import Host, joined


@pytest.fixture
def lab_here(require: Callable[[str, bool, str], None]) -> None:
    """This test needs root, for network namespaces."""
    require("netlab", why_no_netlab() is None, why_no_netlab() or "")


def test_computing_is_timed_alone_and_during_messages() -> None:
    samples, _ = run_operations([Host(), Host()], calibration.computing_operations(2, 3))
    assert all(sample.duration_ns > 1e6 and len(sample.repeats_ns) == 3 for sample in samples)
    alone, concurrent = samples
    slower = replace(concurrent, duration_ns=1.25 * alone.duration_ns)
    penalty = calibration.overlap_penalty([alone, slower], "here")
    assert penalty.value == pytest.approx(0.25)
    assert penalty.provenance is Provenance.FITTED
    faster = replace(concurrent, duration_ns=0.9 * alone.duration_ns)
    assert calibration.overlap_penalty([alone, faster], "here").value == 0.0
    assert calibration.overlap_penalty([alone], "here") == NOT_GIVEN
    with pytest.raises(ClusterError, match=r"\b\d samples\b.*too few"):
        fit(samples)


def test_ranks_request_a_higher_priority_and_work_without(monkeypatch: pytest.MonkeyPatch) -> None:
    requested: list[int] = []

    def refuse(thread: int, policy: int, parameters: object) -> None:
        requested.append(thread)
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", refuse, raising=False)
    monkeypatch.setattr(os, "listdir", lambda path: ["11", "12"])
    operations.raise_priority()
    assert requested == [11]
    monkeypatch.setattr(os, "sched_setscheduler", lambda *arguments: requested.append(arguments[0]))
    operations.raise_priority()
    assert requested == [11, 11, 12]


def test_more_ranks_than_cores_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "cores", lambda: 2)
    with pytest.raises(ClusterError, match=r"\b3 ranks\b.*\b2 cores\b") as caught:
        calibrate(3)
    assert "oversubscribe" in (caught.value.remedy or "")
    with pytest.raises(InvalidArgumentError, match=r"\b1\b.*\b2\b") as fewer:
        calibrate(1)
    assert fewer.value.argument == "ranks"


def test_real_ranks_respond_and_a_calibration_is_saved(tmp_path: Path) -> None:
    operations = [Operation("p2p", 2**k, (0, 1), 3) for k in (10, 16, 20)]
    operations += [
        Operation(kind, 2**16, (0, 1), 3, in_a_row=4)
        for kind in ("p2p", "all_reduce", "all_gather", "reduce_scatter", "add")
    ]
    samples, torch = run_operations([Host(), Host()], operations)
    assert [s.operation for s in samples] == operations
    assert all(s.duration_ns > 0.0 and len(s.repeats_ns) == 3 for s in samples)
    assert torch
    (pooled,), _ = run_operations([Host(), Host()], [Operation("p2p", 4096, (0, 1), 3)], rounds=2)
    assert len(pooled.repeats_ns) == len(pooled.began_ns) == 6
    assert pooled.duration_ns == np.median(pooled.repeats_ns)
    assert sorted(pooled.began_ns) == list(pooled.began_ns)


def test_a_failing_rank_is_reported_and_none_is_left() -> None:
    with pytest.raises(ClusterError, match=r"rank [01]\b"):
        run_operations([Host(), Host()], [Operation("nonsense", 4, (0, 1))], limit_s=600)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
def test_ranks_end_with_their_parent_even_if_it_is_killed() -> None:
    ask = (
        "from slipstream.cluster.samples import Operation; "
        "from slipstream.ranks.calibration import Host, run_operations; "
        "run_operations([Host()] * 2, [Operation('p2p', 4, (0, 1), 10**9)])"
    )
    asking = subprocess.Popen([sys.executable, "-c", ask], start_new_session=True)
    try:
        ranks: list[int] = []
        until = time.monotonic() + 60
        while len(ranks) < 2 and time.monotonic() < until:
            ranks = children_of(asking.pid)
            time.sleep(0.02)
        assert len(ranks) == 2
    finally:
        asking.kill()
        asking.wait()
    until = time.monotonic() + 60
    while any(Path(f"/proc/{rank}").exists() for rank in ranks) and time.monotonic() < until:
        time.sleep(0.02)
    left = [rank for rank in ranks if Path(f"/proc/{rank}").exists()]
    assert not left


def children_of(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                # After the name in parentheses: state, parent.
                after = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(after[1]) == pid:
                    found.append(int(entry.name))
    return found


def test_a_lab_validates_its_arguments() -> None:
    with pytest.raises(InvalidArgumentError, match="hosts: 0"):
        Netlab(0, 1e6)
    with pytest.raises(InvalidArgumentError, match="bytes_per_s"):
        Netlab(2, 0.0)
    with pytest.raises(InvalidArgumentError, match="racks: 3 hosts"):
        Netlab(3, 1e6, racks=2)
    with pytest.raises(InvalidArgumentError, match="between_bytes_per_s"):
        Netlab(4, 1e6, racks=2, between_bytes_per_s=float("nan"))


def test_without_root_there_is_a_clear_one_line_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ClusterError, match="needs root"), Netlab(2, 1e6):
        pass


def test_a_rank_that_dies_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "at_fault.py").write_text(
        "import os, signal\n"
        "def die(): os.environ['RANK'] == '1' and os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    killed = pytest.raises(ClusterError, match=r"rank 1\b.*killed")
    with killed, joined([Host(), Host()]) as call:
        call("at_fault:die", {})


@pytest.mark.usefixtures("lab_here")
def test_a_lab_shapes_and_counts_traffic_and_leaves_nothing() -> None:
    with Netlab(2, 25e6) as lab:
        pids = list(lab.pids)
        operations = [Operation("p2p", size, (0, 1), 3) for size in (2**18, 2**20)]
        before = lab.counters()
        samples, _ = run_operations(lab.ranks(), operations)
        sent = [after[1] - b[1] for after, b in zip(lab.counters(), before, strict=True)]
    # 25 MB/s less 4 % of headers, the same in each direction; five round trips of each size.
    assert samples[1].duration_ns >= 2**20 / 25e6 * 1e9 * 0.99
    assert min(sent) > 5 * (2**18 + 2**20)
    assert not any(_alive(pid) for pid in pids)


@pytest.mark.usefixtures("lab_here")
def test_a_command_on_every_host(capfd: Any) -> None:
    with Netlab(3, 1e6) as lab:
        assert lab.run(["sh", "-c", "echo $RANK of $WORLD_SIZE; exit $RANK"]) == [0, 1, 2]
    assert sorted(capfd.readouterr().out.split("\n"))[1:] == ["0 of 3", "1 of 3", "2 of 3"]


@pytest.mark.usefixtures("lab_here")
def test_pacing_of_hosts_does_not_depend_on_this_machine(capfd: Any) -> None:
    with Netlab(2, 1e6) as lab:
        assert lab.run(["cat", "/proc/sys/net/ipv4/tcp_congestion_control"]) == [0, 0]
    assert capfd.readouterr().out.split() == ["reno", "reno"]


@pytest.mark.usefixtures("lab_here")
def test_racks_are_joined_by_a_separate_link() -> None:
    """One host of each rack sends to the other, over the link between, for some seconds."""
    script = (
        "import os, socket, sys, time\n"
        "rank = int(os.environ['RANK']); data = bytes(1 << 18)\n"
        "if rank == 3:\n"
        "    one = socket.create_server(('', 4000)).accept()[0]\n"
        "    while one.recv(1 << 16): pass\n"
        "elif rank == 0:\n"
        "    for _ in range(600):\n"
        "        try: one = socket.create_connection(('10.77.0.4', 4000)); break\n"
        "        except OSError: time.sleep(0.1)\n"
        "    one.sendall(data)\n"
    )
    with Netlab(4, 1e9, racks=2, between_bytes_per_s=1e6) as lab:
        began = time.monotonic()
        assert lab.run([sys.executable, "-S", "-c", script]) == [0] * 4
        elapsed_s = time.monotonic() - began
        received = [counted[0] for counted in lab.counters()]
        with lab.unshaped():
            pass
    assert received[3] > 1 << 18
    # The tokens of two buckets pass immediately, the remainder at a megabyte per second.
    assert elapsed_s >= ((1 << 18) - 2 * 8192) / 1e6


@pytest.mark.usefixtures("lab_here")
def test_a_killed_lab_leaves_nothing() -> None:
    code = (
        "import os, signal; from slipstream.ranks import Netlab\n"
        "lab = Netlab(2, 1e6).__enter__(); print(*lab.pids, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    import sys
    import time

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 3
    until = time.monotonic() + 600.0
    while any(_alive(pid) for pid in pids) and time.monotonic() < until:
        time.sleep(0.02)
    assert not any(_alive(pid) for pid in pids)


def _alive(pid: int) -> bool:
    try:
        return "(sleep) Z" not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
