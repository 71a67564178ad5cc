"""Ranks as forks of this process: each joins a process group, runs a function and returns."""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

LIMIT_S = 600.0


def run_ranks(count: int, work: Callable[[int], Any], missing: int | None = None) -> list[Any]:
    """Return the result of `work(rank)` on each rank, or its error; None if it was killed.

    None is left behind, however it ends.

    Args:
        missing: a rank that may stop itself; it is ended when all others have.
    """
    with tempfile.TemporaryDirectory() as folder:
        pids = [_fork(rank, count, work, Path(folder)) for rank in range(count)]
        until = time.monotonic() + LIMIT_S
        waiting = set(pids) - ({pids[missing]} if missing is not None else set())
        while waiting and time.monotonic() < until:
            for pid in list(waiting):
                if os.waitpid(pid, os.WNOHANG)[0]:
                    waiting.discard(pid)
            time.sleep(0.01)
        for pid in [*waiting, *([pids[missing]] if missing is not None else [])]:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        assert not waiting, "a rank did not end"
        answers = [Path(folder) / f"answer{rank}" for rank in range(count)]
        return [pickle.loads(a.read_bytes()) if a.exists() else None for a in answers]


def _fork(rank: int, count: int, work: Callable[[int], Any], folder: Path) -> int:
    # Import here, once, what DistributedDataParallel would import in every rank.
    importlib.import_module("torch._dynamo")
    pid = os.fork()
    if pid:
        return pid
    try:
        # The interface's address; the host's name may not resolve.
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        answer = _joined(rank, count, work, folder)
        partial = folder / f"partial{rank}"
        partial.write_bytes(pickle.dumps(answer))
        partial.rename(folder / f"answer{rank}")
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _joined(rank: int, count: int, work: Callable[[int], Any], folder: Path) -> Any:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=count,
        timeout=timedelta(seconds=60),
    )  # fmt: skip
    try:
        return work(rank)
    except Exception as error:
        return error
