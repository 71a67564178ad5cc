"""The launcher of ranks: worker processes that form one group.

A rank is a `Child` on a `Host` with the environment that ``torchrun`` would set. Ranks meet through
a file, which is visible from every network namespace of this machine. All ranks are ended with the
launcher.
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
"""Default time-out of one communication between ranks of `joined`."""
LIMIT_S = 300.0
"""Default time-out of a call of `joined`."""
# Time for other ranks to fail after the first one, before they are ended.
_GRACE_S = 3.0


@dataclass(frozen=True)
class Host:
    """Place in which a rank runs.

    Attributes:
        prefix: words before its command that replace themselves by it, such as
            ``nsenter -t 1234 -n``.
        interface: network interface of its communication.
    """

    prefix: tuple[str, ...] = ()
    interface: str = "lo"

    def environment(self, rank: int, ranks: int) -> dict[str, str]:
        """Return the variables that ``torchrun`` would set for a rank."""
        return {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks), "GLOO_SOCKET_IFNAME": self.interface,
            "TP_SOCKET_IFNAME": self.interface,
        }  # fmt: skip


class WorkerProcesses:
    """A process per rank. Use as a context manager.

    Args:
        name: name of the group in errors.
        hosts: host of each rank.
        environment: variables of all ranks, in addition to those of each rank.
        memory_limit_bytes: limit of all ranks together; None for no limit.
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
        """Kill all ranks simultaneously, since a rank that exits normally could wait for others."""
        children, self._children = self._children, []
        for child in children:
            child.kill()
        for child in children:
            child.close()

    def call(
        self, function: str, timeout_s: float | None, of_rank: Callable[[int], Mapping[str, Any]]
    ) -> list[Any]:
        """Call ``function(**of_rank(rank))`` on all ranks simultaneously; return their results.

        Args:
            function: an importable ``module:function``.
            timeout_s: maximum time without a message of a rank, after which all are killed.

        Raises:
            SlipstreamError: of the rank that died, or else failed first; all are killed.
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
                    raise _cause(error, [future for future in waiting if future is not done])
            return [done.result() for done in waiting]
        except BaseException:
            # This closes their pipes, which ends the threads that wait for an answer.
            for child in self._children:
                child.kill()
            raise
        finally:
            pool.shutdown(wait=True)


def _cause(error: BaseException, others: Sequence[Future[Any]]) -> BaseException:
    """Return the error of a rank that died, or else the first error."""
    if isinstance(error, ChildError):
        return error
    with contextlib.suppress(TimeoutError):
        for done in as_completed(others, timeout=_GRACE_S):
            if isinstance(other := done.exception(), ChildError):
                return other
    return error


Call = Callable[[str, Mapping[str, Any]], list[Any]]
"""Function that calls ``module:function`` with JSON arguments on all ranks; returns results."""


@contextlib.contextmanager
def joined(
    hosts: Sequence[Host],
    *,
    name: str = "the measurement",
    limit_s: float = LIMIT_S,
    timeout_s: float = RANK_TIMEOUT_S,
) -> Iterator[Call]:
    """Yield a function that calls functions on ranks of torch's default process group.

    Every rank computes on one thread.

    Args:
        hosts: host of each rank.
        name: name of the group in errors.
        limit_s: time-out of each call.
        timeout_s: time-out of each communication.

    Raises:
        ClusterError: a rank failed, died or took too long in a call; names the rank.
    """
    with (
        temporary_folder("ranks") as folder,
        WorkerProcesses(name, hosts, environment={"OMP_NUM_THREADS": "1"}) as processes,
    ):
        group = {
            "name": name, "ranks": len(hosts), "store": f"{folder}/store", "timeout_s": timeout_s,
        }  # fmt: skip

        def call(function: str, arguments: Mapping[str, Any]) -> list[Any]:
            request = {"called": function, "arguments": dict(arguments), **group}
            try:
                return processes.call(
                    "slipstream.ranks.launch:answer_joined", limit_s,
                    lambda rank: {**request, "rank": rank},
                )  # fmt: skip
            except ChildError as error:
                raise ClusterError(error.what, where=error.where, remedy=error.remedy) from error

        yield call


def join(rank: int, ranks: int, store: str, timeout_s: float) -> None:
    """Join torch's default process group over gloo.

    Args:
        store: file of this group through which the ranks meet.
        timeout_s: time after which a collective fails that some rank has not joined.
    """
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks,
        timeout=timedelta(seconds=timeout_s),
    )  # fmt: skip


# The code below runs in a rank's process.


def answer_joined(
    called: str, arguments: Mapping[str, Any], name: str, rank: int, ranks: int, store: str,
    timeout_s: float,
) -> Any:  # fmt: skip
    """Join the group if necessary, and return ``called(**arguments)``.

    Raises:
        ClusterError: the call failed; names this rank.
    """
    try:
        import torch
        import torch.distributed as dist

        if not dist.is_initialized():
            count_niceness_everywhere()
            torch.set_num_threads(1)
            join(rank, ranks, store, timeout_s)
        module, _, function = called.partition(":")
        return getattr(importlib.import_module(module), function)(**arguments)
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise ClusterError(f"rank {rank} of {name} failed: {what}") from error


def count_niceness_everywhere() -> None:
    """Apply this process's niceness across sessions.

    With autogroups Linux gives sessions equal shares, and niceness counts within a session; every
    rank has its own.
    """
    with contextlib.suppress(OSError):
        niceness = os.getpriority(os.PRIO_PROCESS, 0)
        Path("/proc/self/autogroup").write_text(str(niceness), encoding="utf-8")
