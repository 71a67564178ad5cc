"""Worker processes that are the ranks of one group: started, asked all at once, ended together.

One launcher for all: what measures a network, what proves a technique, what a bench compares. A
rank is a `Child` on a `Host`, told what ``torchrun`` would tell it; ranks meet through a file,
which is seen from every network namespace of this machine. None is left behind, whatever happens.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from slipstream.child import Child
from slipstream.cluster.errors import ClusterError
from slipstream.errors import ChildError
from slipstream.files import temporary_folder

RANK_TIMEOUT_S = 60.0
"""How long a rank of `joined` waits in one communication, unless told otherwise."""
LIMIT_S = 300.0
"""How long a call of `joined` may take, unless told otherwise."""
# How long ranks may take to fail after the first one did, before they are ended.
_GRACE_S = 3.0


@dataclass(frozen=True)
class Host:
    """Where a rank runs.

    Attributes:
        prefix: words before its command, as ``nsenter -t 1234 -n``; they become the command in the
            same process.
        interface: that it communicates through.
    """

    prefix: tuple[str, ...] = ()
    interface: str = "lo"

    def environment(self, rank: int, ranks: int) -> dict[str, str]:
        """What a rank's process is told, as ``torchrun`` would."""
        return {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks), "GLOO_SOCKET_IFNAME": self.interface,
            "TP_SOCKET_IFNAME": self.interface,
        }  # fmt: skip


class WorkerProcesses:
    """One process for every rank. Use as a context manager.

    Args:
        name: of what they are ranks of, as errors call it.
        hosts: where each runs.
        environment: of all, beside what each is told of its rank.
        memory_limit_bytes: of all together; None: no limit.
    """

    def __init__(
        self, name: str, hosts: Sequence[Host], *, environment: Mapping[str, str],
        memory_limit_bytes: int | None = None,
    ) -> None:  # fmt: skip
        self.name, self._hosts, self._environment = name, hosts, environment
        self._limit = None if memory_limit_bytes is None else memory_limit_bytes // len(hosts)
        self._children: list[Child] = []

    def __enter__(self) -> WorkerProcesses:
        try:
            for rank, host in enumerate(self._hosts):
                variables = host.environment(rank, len(self._hosts))
                child = Child(
                    f"rank {rank} of {self.name}",
                    environment={**self._environment, **variables},
                    memory_limit_bytes=self._limit,
                    prefix=host.prefix,
                )
                self._children.append(child)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *ended: object) -> None:
        self.close()

    def close(self) -> None:
        """End all of them, at once: one that is asked first would wait for the others."""
        children, self._children = self._children, []
        for child in children:
            child.kill()
        for child in children:
            child.close()

    def call(
        self, function: str, timeout_s: float | None, of_rank: Callable[[int], Mapping[str, Any]]
    ) -> list[Any]:
        """What ``function(**of_rank(rank))`` answers on every rank, all at the same time.

        Args:
            function: an importable ``module:function``.
            timeout_s: the ranks are ended when one answers nothing for this long.

        Raises:
            SlipstreamError: of the rank that failed first, or died; all are ended.
        """
        if not self._children:
            raise ChildError(f"{self.name} is not running")
        pool = ThreadPoolExecutor(len(self._children), thread_name_prefix="slipstream-ranks")
        try:
            waiting = []
            for rank, child in enumerate(self._children):
                child.start_call(function, **of_rank(rank))
                waiting.append(pool.submit(child.finish_call, timeout_s=timeout_s))
            for done in as_completed(waiting):
                error = done.exception()
                if error is not None:
                    raise _cause(error, [one for one in waiting if one is not done])
            return [done.result() for done in waiting]
        except BaseException:
            # Their pipes end with them, and with those the threads that wait for an answer.
            for child in self._children:
                child.kill()
            raise
        finally:
            pool.shutdown(wait=True)


def _cause(error: BaseException, others: Sequence[Future[Any]]) -> BaseException:
    """A rank that died, where one did; else what failed first."""
    if isinstance(error, ChildError):
        return error
    with contextlib.suppress(TimeoutError):
        for done in as_completed(others, timeout=_GRACE_S):
            if isinstance(other := done.exception(), ChildError):
                return other
    return error


Call = Callable[[str, Mapping[str, Any]], list[Any]]
"""Calls an importable ``module:function`` with arguments, JSON, on every rank: their answers."""


@contextlib.contextmanager
def joined(
    hosts: Sequence[Host],
    *,
    name: str = "the measurement",
    limit_s: float = LIMIT_S,
    timeout_s: float = RANK_TIMEOUT_S,
) -> Iterator[Call]:
    """Ranks that have joined torch's default process group by their first call.

    Every rank computes on one thread.

    Args:
        hosts: where each rank runs.
        name: of what they are ranks of, as errors call it.
        limit_s: of each call.
        timeout_s: of each communication.

    Raises:
        ClusterError: from a call: a rank failed, died or took too long; it is named.
    """
    with (
        temporary_folder("ranks") as folder,
        WorkerProcesses(name, hosts, environment={"OMP_NUM_THREADS": "1"}) as processes,
    ):
        group = {
            "name": name, "ranks": len(hosts), "store": f"{folder}/store", "timeout_s": timeout_s,
        }  # fmt: skip

        def call(function: str, arguments: Mapping[str, Any]) -> list[Any]:
            asked = {"called": function, "arguments": dict(arguments), **group}
            try:
                return processes.call(
                    "slipstream.ranks.launch:answer_joined", limit_s,
                    lambda rank: {**asked, "rank": rank},
                )  # fmt: skip
            except ChildError as error:
                raise ClusterError(error.what, where=error.where, remedy=error.remedy) from error

        yield call


def join(rank: int, ranks: int, store: str, timeout_s: float) -> None:
    """Make the calling process one of torch's default process group, over gloo.

    Args:
        store: a file that no other group uses, through which the ranks find each other.
        timeout_s: after which a collective that somebody has not joined fails.
    """
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks,
        timeout=timedelta(seconds=timeout_s),
    )  # fmt: skip


# What follows runs in a rank's process.


def answer_joined(
    called: str, arguments: Mapping[str, Any], name: str, rank: int, ranks: int, store: str,
    timeout_s: float,
) -> Any:  # fmt: skip
    """What ``called(**arguments)`` answers, when this process has joined the others.

    Raises:
        ClusterError: it failed; this rank is named.
    """
    try:
        import torch
        import torch.distributed as dist

        if not dist.is_initialized():
            _count_niceness_everywhere()
            torch.set_num_threads(1)
            join(rank, ranks, store, timeout_s)
        module, _, function = called.partition(":")
        return getattr(importlib.import_module(module), function)(**arguments)
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise ClusterError(f"rank {rank} of {name} failed: {what}") from error


def _count_niceness_everywhere() -> None:
    """Make this process's niceness count against other sessions' processes.

    Where Linux groups them, sessions have equal shares, and niceness counts within one; every rank
    has its own.
    """
    with contextlib.suppress(OSError):
        niceness = os.getpriority(os.PRIO_PROCESS, 0)
        Path("/proc/self/autogroup").write_text(str(niceness), encoding="utf-8")
