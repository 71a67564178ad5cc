"""One rank's side of a job: it sends vectors to the aggregators and receives their sums."""

from __future__ import annotations

import ctypes
import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from slipstream.engines.aggregation.kernels import (
    ABORTED,
    DONE,
    DTYPES,
    HEADER_BYTES,
    SILENT,
    TOO_LARGE,
    WAITING,
    Handle,
    SumReport,
)
from slipstream.engines.aggregation.protocol import (
    AggregationError,
    for_datagrams,
    join,
    parse_address,
    path_mtu,
)
from slipstream.errors import CommunicationError, InvalidArgumentError

SILENT_S = 1.5
"""Default time without any answer after which an aggregator counts as dead."""
WINDOW = 32
"""Default largest number of a rank's datagrams without a result."""
MAX_MTU = 9000
"""Largest default packet, in bytes: Ethernet's jumbo frames."""
_MIN_MTU = 576
_IP_AND_UDP_BYTES = {socket.AF_INET: 28, socket.AF_INET6: 48}


class AggregatorLostError(AggregationError):
    """The aggregator, or the job there, ended; the ring can go on."""


class JobMember:
    """A rank of a job at one or several aggregators, each of which sums its part of every vector.

    Args:
        addresses: aggregators, in the same order on all ranks.
        job: name of the job, the same on all ranks.
        rank, world: this rank, of how many.
        token: the aggregators' token.
        mtu: bytes of the largest packet; None for that of the path, at most `MAX_MTU`.
        fragments: whether IP may split packets that are larger than the path's MTU; 9,000 bytes
            are then the default.
        window: largest number of datagrams without a result, of all aggregators together.
        join_s: time limit for all ranks to join.
        silent_s: time without any answer after which an aggregator counts as dead.
        timeout_s: time limit for other ranks to send what is summed.
        on_lost: called once, from another thread, when the job has ended.

    Raises:
        AggregationError: an aggregator does not answer, or refuses; names rank and job.
        InvalidArgumentError: a number is not allowed.
    """

    def __init__(
        self, addresses: list[str], job: str, rank: int, world: int, token: str, *,
        mtu: int | None = None, fragments: bool = False, window: int = WINDOW, join_s: float = 60.0,
        silent_s: float = SILENT_S, timeout_s: float = 20.0,
        on_lost: Callable[[], object] = lambda: None,
    ) -> None:  # fmt: skip
        if not addresses:
            raise InvalidArgumentError("addresses", "is empty")
        if mtu is not None and not _MIN_MTU <= mtu <= 65507:
            raise InvalidArgumentError("mtu", f"{mtu} is not from {_MIN_MTU} to 65507 bytes")
        if not 1 <= window <= 4096:
            raise InvalidArgumentError("window", f"{window} is not from 1 to 4096 datagrams")
        self.job, self.rank, self.silent_s, self.timeout_s = job, rank, silent_s, timeout_s
        self.reports: list[Any] = [SumReport() for _ in addresses]
        self._lost: str | None = None
        self._failure: CommunicationError | None = None
        self._closed = threading.Event()
        self._on_lost = on_lost
        self._changed = threading.Lock()
        self._trees: list[_Tree] = []
        self._pool = ThreadPoolExecutor(len(addresses), thread_name_prefix="slipstream-sum")
        each = max(1, window // len(addresses))
        try:
            for at, address in enumerate(addresses):
                who = f"rank {rank} of job '{job}'"
                name = job if len(addresses) == 1 else f"{job}/{at}"
                self._trees.append(
                    _Tree(address, name, rank, world, token, mtu, fragments, each, join_s, who)
                )
        except BaseException:
            self.close()
            raise
        for tree in self._trees:
            threading.Thread(target=self._watch, args=(tree,), daemon=True).start()

    def sum(self, vector: torch.Tensor, out: torch.Tensor) -> None:
        """Write the sum of all ranks' vectors to `out`, in a fixed order of ranks.

        Args:
            vector, out: [n], contiguous, float32, float64 or int32, on CPU.

        Raises:
            AggregatorLostError: an aggregator or a rank left the job; `out` is undefined.
            CommunicationError: ranks sum different vectors, or some do not send theirs in time.
        """
        code = _need_summable(vector, out)
        length, width = vector.numel(), vector.element_size()
        share = -(-length // len(self._trees))
        parts = [
            (min(at * share, length), min((at + 1) * share, length))
            for at in range(len(self._trees))
        ]

        def sum_part(at: int) -> int:
            begin, end = parts[at]
            return self._trees[at].native.call(
                "sum", code, vector.data_ptr() + begin * width, out.data_ptr() + begin * width,
                end - begin, self.silent_s, self.timeout_s, ctypes.byref(self.reports[at]),
            )  # fmt: skip

        self.need_alive()
        if len(parts) == 1:
            statuses = [sum_part(0)]
        else:
            statuses = list(self._pool.map(sum_part, range(len(parts))))
        if all(status == DONE for status in statuses):
            return
        for at, status in enumerate(statuses):
            if status not in (DONE, ABORTED):
                self._end(*self._explain(at, status))
        self.need_alive()

    def need_alive(self) -> None:
        """Raise the error of `sum` if the job has ended."""
        if self._failure is not None:
            raise self._failure
        if self._lost is not None or self._closed.is_set():
            raise AggregatorLostError(self._lost or "it was closed", where=f"job '{self.job}'")

    def close(self, *, clean: bool = True) -> None:
        """Leave the job. Unless `clean`, other ranks stop waiting for this one's data."""
        self._closed.set()
        for tree in self._trees:
            tree.native.call("abort")
            if clean:
                tree.lines.try_send(bye=True)
            tree.lines.close()
        self._pool.shutdown(wait=False)

    def _explain(self, at: int, status: int) -> tuple[str | None, CommunicationError | None]:
        """Return why a sum ended: the job is lost, or else an error."""
        tree, report = self._trees[at], self.reports[at]
        if status == SILENT:
            return f"the aggregator at {tree.address} did not answer for {self.silent_s:g} s", None
        who = f"rank {self.rank} of job '{self.job}'"
        if status == WAITING:
            missing = tree.missing(report)
            named = f"rank {', '.join(map(str, missing))}" if missing else "another rank"
            return None, AggregationError(
                f"{named} of job '{self.job}' did not send its vector within {self.timeout_s:g} s",
                ranks=missing, where=who, remedy="check that all ranks run the same steps",
            )  # fmt: skip
        if status == TOO_LARGE:
            return None, AggregationError(
                f"packets of {tree.mtu} bytes are larger than the MTU of the path from {who} to "
                f"{tree.address}", ranks=(self.rank,),
                remedy="raise the MTU of the interfaces, pass fragments=True, or "
                f"mtu={path_mtu(tree.datagrams)}",
            )  # fmt: skip
        return f"datagrams to {tree.address} failed: {os.strerror(report.detail)}", None

    def _watch(self, tree: _Tree) -> None:
        """Follow what the aggregator reports, until its connection ends."""
        try:
            message = tree.lines.receive()
        except OSError:
            message = None
        if self._closed.is_set():
            return
        if message is None:
            self._end(f"the aggregator at {tree.address} ended", None)
        elif found := message.get("error"):
            self._end(None, AggregationError(
                found["what"], ranks=tuple(found["ranks"]), remedy=found["remedy"]
            ))  # fmt: skip
        elif "left" in message:
            left = ", ".join(map(str, message["left"]))
            self._end(f"rank {left} left the job", None)
        else:
            self._end(str(message.get("failed", "the job ended")), None)
        self._on_lost()

    def _end(self, lost: str | None, failure: CommunicationError | None) -> None:
        with self._changed:
            first = self._lost is None and self._failure is None
            if first:
                self._lost, self._failure = lost, failure
        if not first:
            return
        if failure is not None:
            for tree in self._trees:
                tree.report(failure)
        self.close(clean=False)


class _Tree:
    """Membership at one aggregator."""

    def __init__(
        self, address: str, job: str, rank: int, world: int, token: str, mtu: int | None,
        fragments: bool, window: int, join_s: float, who: str,
    ) -> None:  # fmt: skip
        self.address, self._rank = address, rank
        host, port = parse_address(address)
        try:
            family, *_, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
            self.datagrams = socket.socket(family, socket.SOCK_DGRAM)
            for_datagrams(self.datagrams, fragments=fragments)
            self.datagrams.connect(target)
        except OSError as error:
            raise AggregationError(
                f"{who} cannot send to {address}: {error.strerror or error}",
                remedy="check the address",
            ) from error
        overhead = _IP_AND_UDP_BYTES[family] + HEADER_BYTES
        self.mtu = mtu or (MAX_MTU if fragments else min(path_mtu(self.datagrams), MAX_MTU))
        request = {
            "job": job, "ranks": [rank], "world": world, "slots": 2 * window,
            "payload": (self.mtu - overhead) // 8 * 8,
        }  # fmt: skip
        self.lines, answer = join(address, token, request, who, join_s)
        self._groups: list[list[int]] = answer["groups"]
        self.mtu = int(answer["payload"]) + overhead
        self.native = Handle(
            "member", self.datagrams.fileno(), int(answer["number"]), int(answer["member"]),
            int(answer["key"], 16), int(answer["slots"]), int(answer["payload"]),
        )  # fmt: skip

    def report(self, failure: CommunicationError) -> None:
        """Send other ranks an error, so that they raise it too."""
        error = {"what": failure.what, "ranks": list(failure.ranks), "remedy": failure.remedy}
        self.lines.try_send(error=error)

    def missing(self, report: Any) -> tuple[int, ...]:
        """Return ranks that did not send; empty if they join at another aggregator."""
        if report.above:
            return ()
        groups = [group for at, group in enumerate(self._groups) if report.missing >> at & 1]
        return tuple(rank for group in groups for rank in group)


def _need_summable(vector: torch.Tensor, out: torch.Tensor) -> int:
    name = str(vector.dtype).removeprefix("torch.")
    for argument, tensor in (("vector", vector), ("out", out)):
        if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.dim() != 1:
            raise InvalidArgumentError(
                argument, f"is {list(tensor.shape)} on {tensor.device}",
                remedy="pass a contiguous tensor of one dimension on the CPU",
            )  # fmt: skip
    if name not in DTYPES or out.dtype is not vector.dtype or out.numel() != vector.numel():
        raise InvalidArgumentError(
            "vector", f"{vector.numel()} values of {vector.dtype}, with an output of "
            f"{out.numel()} of {out.dtype}", remedy="both are one of " + ", ".join(DTYPES),
        )  # fmt: skip
    return DTYPES.index(name)
