"""Worker processes of one group: started together, asked once, and none left behind."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from slipstream.cluster.errors import ClusterError
from slipstream.cluster.samples import Operation, Sample
from slipstream.measure.wire import Interface

_LIMIT_S = 300.0
WARMUP = 2
_PR_SET_PDEATHSIG = 1
RANK_TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True)
class Rank:
    """How to start a process, and where it is.

    Attributes:
        prefix: words before the command, as ``nsenter -t 1234 -n``.
        interface: that it communicates through.
    """

    prefix: tuple[str, ...] = ()
    interface: str = "lo"


def run_operations(
    ranks: Sequence[Rank],
    operations: Sequence[Operation],
    *,
    rounds: int = 1,
    address: str = "127.0.0.1",
    port: int | None = None,
    limit_s: float = _LIMIT_S,
) -> tuple[list[Sample], str]:
    """Times of all operations, and the version of torch.

    Args:
        rounds: how often all are timed, one after the other; a machine that is slow for a while is
            then slow for all of them. Repeats of all rounds are one sample.
        address: of rank 0, as the others see it.
        port: free at that address; by default one that is free on this machine.

    Raises:
        ClusterError: a rank failed or took too long; none is left behind.
    """
    asked = {
        "operations": [
            {"kind": o.kind, "nbytes": o.nbytes, "ranks": list(o.ranks),
             "repeats": o.repeats, "warmup": WARMUP, "pause_s": o.pause_ns / 1e9,
             "in_a_row": o.in_a_row}
            for o in [*operations] * rounds
        ],
    }  # fmt: skip
    answers = run_ranks(
        ranks, "slipstream.ranks.operations", asked, address=address, port=port, limit_s=limit_s
    )
    samples = [sample_of(o, n, answers) for n, o in enumerate([*operations] * rounds)]
    count = len(operations)
    return [_pooled(samples[n::count]) for n in range(count)], str(answers[0]["torch"])


def run_ranks(
    ranks: Sequence[Rank],
    module: str,
    asked: Mapping[str, Any],
    *,
    address: str = "127.0.0.1",
    port: int | None = None,
    limit_s: float = _LIMIT_S,
) -> list[dict[str, Any]]:
    """What each rank answers: the last line that ``python -m module`` prints, JSON.

    Args:
        module: reads from standard input `asked` with ``parent``, ``rank``, ``world``,
            ``address`` and ``port`` besides.

    Raises:
        ClusterError: a rank failed or took too long; none is left behind.
    """
    chosen = _free_port() if port is None else port
    processes: list[subprocess.Popen[str]] = []
    try:
        for number, rank in enumerate(ranks):
            environment = {
                **os.environ, "GLOO_SOCKET_IFNAME": rank.interface, "OMP_NUM_THREADS": "1",
                "TP_SOCKET_IFNAME": rank.interface,
            }  # fmt: skip
            process = subprocess.Popen(
                [*rank.prefix, sys.executable, "-m", module],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                text=True, env=environment, start_new_session=True,
            )  # fmt: skip
            processes.append(process)
            where = {
                "parent": os.getpid(), "rank": number, "world": len(ranks),
                "address": address, "port": chosen,
            }  # fmt: skip
            assert process.stdin is not None
            # One that failed at once is reported below, with what it said.
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(json.dumps({**asked, **where}))
                process.stdin.close()
            process.stdin = None
        return _collect(processes, limit_s)
    finally:
        for process in processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def join(asked: Mapping[str, Any], timeout: timedelta = RANK_TIMEOUT) -> None:
    """Make the calling process the rank that `run_ranks` asked it to be, on one thread.

    Args:
        timeout: of each of its communications.
    """
    _end_with(asked["parent"])
    _as_nice_a_session()
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{asked['address']}:{asked['port']}",
        rank=asked["rank"],
        world_size=asked["world"],
        timeout=timeout,
    )


def answer(found: Any) -> NoReturn:
    """Tell `run_ranks` what was found, as ``{"found": ..}``, and end this process.

    It does not wait for threads that communicate.
    """
    json.dump({"found": found}, sys.stdout)
    sys.stdout.flush()
    os._exit(0)


def own_interface() -> Interface:
    """Counts what goes over the calling rank's interface from now on."""
    return Interface(os.environ.get("GLOO_SOCKET_IFNAME", "lo"))


def _as_nice_a_session() -> None:
    """Make this process's niceness count against other sessions' processes.

    Where Linux groups them, sessions have equal shares, and niceness counts within one; every rank
    has its own.
    """
    with contextlib.suppress(OSError):
        niceness = os.getpriority(os.PRIO_PROCESS, 0)
        Path("/proc/self/autogroup").write_text(str(niceness), encoding="utf-8")


def _end_with(parent: int) -> None:
    """The kernel ends this process when that one ends, however it ends."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("whoever asked has gone")


def _collect(processes: list[subprocess.Popen[str]], limit_s: float) -> list[dict[str, Any]]:
    """All are read at once: one that fails would leave the others waiting for it."""
    outputs: list[tuple[str, str]] = [("", "")] * len(processes)
    failed = threading.Event()

    def read(number: int) -> None:
        outputs[number] = processes[number].communicate()
        if processes[number].returncode:
            failed.set()

    threads = [threading.Thread(target=read, args=(n,), daemon=True) for n in range(len(processes))]
    for thread in threads:
        thread.start()
    waited = 0.0
    while any(thread.is_alive() for thread in threads):
        if failed.wait(0.1):
            break
        waited += 0.1
        if waited > limit_s:
            raise ClusterError(f"the measurement took more than {limit_s:.0f} s", remedy="less")
    for number, process in enumerate(processes):
        if process.poll():
            lines = outputs[number][1].strip().splitlines()
            raise ClusterError(
                f"rank {number} of the measurement failed", where=lines[-1] if lines else None
            )
    for thread in threads:
        thread.join()
    return [json.loads(out[out.index("{") :]) for out, _ in outputs]


def sample_of(operation: Operation, number: int, answers: list[dict[str, Any]]) -> Sample:
    """Of the operation `number`, from every rank's ``times_s``: (began, took) of each repeat."""
    columns = [np.array(answer["times_s"][number]) for answer in answers]
    # Per rank and repeat: when it began, and how long it took.
    table = np.array([column for column in columns if column.size]) * 1e9
    slowest, began = table[:, :, 1].max(axis=0), table[:, :, 0].min(axis=0)
    if operation.kind == "p2p":
        slowest = slowest / 2
    return Sample(
        operation, float(np.median(slowest)), tuple(slowest.tolist()), tuple(began.tolist())
    )


def _pooled(rounds: Sequence[Sample]) -> Sample:
    repeats = tuple(took for sample in rounds for took in sample.repeats_ns)
    began = tuple(when for sample in rounds for when in sample.began_ns)
    return Sample(rounds[0].operation, float(np.median(repeats)), repeats, began)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
