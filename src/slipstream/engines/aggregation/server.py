"""The aggregator: a server that sums what the ranks of jobs send.

It admits a job once all of its ranks have joined, as long as slots are free, and serves datagrams
in native code. With a parent it sums the ranks below it, and sends the sums on: a tree.
"""

from __future__ import annotations

import contextlib
import ctypes
import secrets
import socket
import struct
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slipstream.arguments import as_integer
from slipstream.engines.aggregation.kernels import MAX_MEMBERS, Handle, Mismatch
from slipstream.engines.aggregation.protocol import (
    VERSION,
    Lines,
    for_datagrams,
    join,
    need_named,
    parse_address,
    proof,
    socket_address,
)
from slipstream.errors import InvalidArgumentError, SlipstreamError

JOIN_S = 60.0
"""Default time limit for all ranks of a job to join."""
_GREETING_S = 5.0
_MAX_CONNECTIONS = 512
_SERVE_MS = 50
_SEND_US = 50_000
_PORTS_TRIED = 20


class _RefusedError(Exception):
    def __init__(self, error: str, remedy: str | None = None, *, admission: bool = False) -> None:
        self.message = {"error": error, "remedy": remedy, "admission": admission}


@dataclass(eq=False)
class _Job:
    name: str
    world: int
    slots: int
    payload: int
    members: dict[tuple[int, ...], Lines] = field(default_factory=dict)
    joined: int = 0
    number: int = 0  # 0 until it runs
    answers: dict[tuple[int, ...], dict[str, Any]] = field(default_factory=dict)
    refused: _RefusedError | None = None
    parent: Lines | None = None

    def ranks(self) -> list[int]:
        return sorted(rank for member in self.members for rank in member)

    def tell(self, **message: Any) -> None:
        """Send a message to all members that are still there."""
        for lines in self.members.values():
            lines.try_send(**message)


class AggregationServer:
    """A server on one address. Use as a context manager.

    Args:
        listen: ``HOST:PORT`` of one interface; port 0 is any free one.
        token: secret that ranks must have; None for a new one.
        slots: pieces in progress, of all jobs together. A slot takes the bytes of a datagram per
            member.
        parent: address of the aggregator that sums further; None at the root.
        members: ranks or aggregators that join here per job; None for all ranks of the job.
        join_s: time limit for all ranks of a job to join.

    Attributes:
        address: ``HOST:PORT`` that ranks pass to `attach`.
        token: the token.

    Raises:
        InvalidArgumentError: an address or number is not allowed.
        SlipstreamError: the address cannot be listened on.
    """

    def __init__(
        self, listen: str = "127.0.0.1:0", *, token: str | None = None, slots: int = 1024,
        parent: str | None = None, members: int | None = None, join_s: float = JOIN_S,
    ) -> None:  # fmt: skip
        host, port = parse_address(listen, "listen")
        need_named(host, "listen")
        if parent is not None:
            parse_address(parent, "parent")
            if members is None:
                raise InvalidArgumentError(
                    "members", "is required with a parent", remedy="pass the ranks below it"
                )
        self.slots = as_integer("slots", slots, 2)
        self._below = None if members is None else as_integer("members", members, 1)
        self.token = token or secrets.token_urlsafe(18)
        self._parent, self._join_s = parent, join_s
        self._listening, self._datagrams = _sockets(host, port)
        host, port = self._listening.getsockname()[:2]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._native = Handle("aggregator", self._datagrams.fileno())
        self._changed = threading.Condition()
        self._jobs: dict[str, _Job] = {}
        self._connections: set[Lines] = set()
        self._closed = threading.Event()
        self._threads = [
            threading.Thread(target=work, name="slipstream-aggregator", daemon=True)
            for work in (self._serve, self._accept)
        ]

    def __enter__(self) -> AggregationServer:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *ended: object) -> None:
        self.close()

    def close(self) -> None:
        """End all jobs, whose ranks continue with the ring."""
        self._closed.set()
        with contextlib.suppress(OSError):  # ends `accept`
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        with self._changed:
            connections = list(self._connections)
            self._changed.notify_all()
        for lines in connections:
            lines.close()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(5.0)
        self._datagrams.close()

    def counts(self) -> dict[str, int]:
        """Return numbers of datagrams received, refused and repeated, and pieces summed."""
        counts = (ctypes.c_int64 * 4)()
        self._native.call("counts", counts)
        return dict(zip(("received", "refused", "repeated", "summed"), counts, strict=True))

    # Datagrams.

    def _serve(self) -> None:
        found = Mismatch()
        while not self._closed.is_set():
            if self._native.call("serve", _SERVE_MS, ctypes.byref(found)) != 1:
                continue
            with self._changed:
                for job in self._jobs.values():
                    if job.number == found.job:
                        self._native.call("remove", job.number)
                        job.tell(error=_mismatch(job, found))

    # Connections.

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._listening.accept()
            except OSError:
                if self._closed.is_set():
                    return
                time.sleep(0.05)  # out of file descriptors, or a connection that ended already
                continue
            with self._changed:
                if len(self._connections) >= _MAX_CONNECTIONS:
                    connection.close()
                    continue
                lines = Lines(connection)
                self._connections.add(lines)
            threading.Thread(target=self._converse, args=(lines,), daemon=True).start()

    def _converse(self, lines: Lines) -> None:
        job: _Job | None = None
        member: tuple[int, ...] = ()
        try:
            job, member = self._admit(lines)
            lines.send(**self._answer(job, member))
            lines.connection.settimeout(None)
            last = lines.receive() or {}
            if not last.get("bye"):
                self._report_left(job, member, last)
        except _RefusedError as error:
            lines.try_send(**error.message)
        except OSError:
            if job is not None:
                self._report_left(job, member, {})
        finally:
            with self._changed:
                self._connections.discard(lines)
                if job is not None:
                    self._leave(job, member)
            lines.close()

    def _report_left(self, job: _Job, member: tuple[int, ...], last: dict[str, Any]) -> None:
        """Tell all others of the job that a member left it, and its error if it sent one."""
        message = {"error": last["error"]} if _is_error(last) else {"left": list(member)}
        if isinstance(last.get("left"), list):  # by an aggregator below
            message = {"left": [int(rank) for rank in last["left"] if isinstance(rank, int)]}
        with self._changed:
            job.tell(**message)
            if job.parent is not None:
                job.parent.try_send(**message)

    def _admit(self, lines: Lines) -> tuple[_Job, tuple[int, ...]]:
        """Greet a rank; return its job, which it has joined, and its ranks."""
        challenge = secrets.token_hex(16)
        lines.connection.settimeout(_GREETING_S)
        lines.send(slipstream_aggregation=VERSION, challenge=challenge)
        request = lines.receive() or {}
        shown = str(request.pop("proof", ""))
        if not secrets.compare_digest(
            shown.encode(), proof(self.token, challenge, request).encode()
        ):
            raise _RefusedError(
                "the token is wrong", "pass the token that the aggregator printed when it started"
            )
        name, member, world, slots, payload = _parse(request)
        lines.connection.settimeout(self._join_s + _GREETING_S)
        with self._changed:
            job = self._jobs.get(name)
            if job is None:
                free = self.slots - sum(other.slots for other in self._jobs.values())
                if slots > free:
                    raise _RefusedError(
                        f"it needs {slots} slots, but {max(free, 0)} of {self.slots} are free",
                        "start the aggregator with more --slots, or wait for another job to end",
                        admission=True,
                    )
                job = self._jobs[name] = _Job(name, world, slots, payload)
            if taken := sorted(set(job.ranks()) & set(member)):
                raise _RefusedError(
                    f"rank {taken[0]} of job '{name}' has joined already",
                    "give every process its own rank, and every run its own job name",
                )
            if job.number or job.refused or job.world != world:
                raise _RefusedError(
                    f"job '{name}' has {job.world} ranks and "
                    f"{'runs already' if job.number else 'is starting'}, but rank {member[0]} "
                    f"says {world}", "give every run its own job name",
                )  # fmt: skip
            job.members[member] = lines
            job.slots, job.payload = min(job.slots, slots), min(job.payload, payload)
            return job, member

    def _answer(self, job: _Job, member: tuple[int, ...]) -> dict[str, Any]:
        """Wait for all ranks of the job; the last one starts it."""
        with self._changed:
            job.joined += 1
            complete = (
                job.joined == self._below if self._below is not None
                else len(job.ranks()) == job.world
            )  # fmt: skip
        if complete:
            try:
                self._start(job)
            except _RefusedError as error:
                job.refused = error
            except SlipstreamError as error:
                job.refused = _RefusedError(error.what, error.remedy)
            with self._changed:
                self._changed.notify_all()
        with self._changed:
            self._changed.wait_for(
                lambda: job.answers or job.refused or self._closed.is_set(), self._join_s
            )
            if job.refused:
                raise job.refused
            if not job.answers:
                missing = sorted(set(range(job.world)) - set(job.ranks()))
                job.refused = _RefusedError(
                    f"rank {', '.join(map(str, missing))} of job '{job.name}' did not join within "
                    f"{self._join_s:g} s", "check the last output of that rank",
                )  # fmt: skip
                self._changed.notify_all()
                raise job.refused
            return job.answers[member]

    def _start(self, job: _Job) -> None:
        # By rank, so that sums do not depend on which rank joined first.
        members = sorted(job.members)
        if len(members) > MAX_MEMBERS:
            raise _RefusedError(
                f"{len(members)} ranks are more than {MAX_MEMBERS}",
                "start an aggregator per rack with --parent and --members",
            )
        number, above = secrets.randbits(31) | 1, b""
        above_member, above_key, groups = 0, 0, [list(member) for member in members]
        if self._parent is not None:
            request = {
                "job": job.name, "ranks": job.ranks(), "world": job.world, "slots": job.slots,
                "payload": job.payload,
            }  # fmt: skip
            who = f"job '{job.name}' at {self.address}"
            job.parent, answer = join(self._parent, self.token, request, who, self._join_s)
            number, above_member = int(answer["number"]), int(answer["member"])
            above_key = int(answer["key"], 16)
            job.slots, job.payload = int(answer["slots"]), int(answer["payload"])
            above = socket_address(self._datagrams, parse_address(self._parent))
            threading.Thread(target=self._follow, args=(job, job.parent), daemon=True).start()
        keys = [secrets.randbits(64) for _ in members]
        with self._changed:
            taken = any(other.number == number for other in self._jobs.values())
            if taken or self._native.call(
                "add", number, len(members), job.slots, job.payload,
                (ctypes.c_uint64 * len(keys))(*keys), above or None, len(above), above_member,
                above_key,
            ):  # fmt: skip
                raise _RefusedError(f"{job.slots} slots of {job.payload} bytes are not possible")
            job.number = number
            for at, (member, key) in enumerate(zip(members, keys, strict=True)):
                job.answers[member] = {
                    "number": number, "member": at, "key": f"{key:x}", "slots": job.slots,
                    "payload": job.payload, "groups": groups,
                }  # fmt: skip

    def _follow(self, job: _Job, parent: Lines) -> None:
        """Pass on what the parent reports, until one of the two connections ends."""
        while (message := parent.receive()) is not None:
            with self._changed:
                job.tell(**message)
        with self._changed:
            if self._jobs.get(job.name) is job:
                job.tell(failed=f"the aggregator at {self._parent} ended")

    def _leave(self, job: _Job, member: tuple[int, ...]) -> None:
        job.members.pop(member, None)
        if job.members or self._jobs.get(job.name) is not job:
            return
        del self._jobs[job.name]
        if job.number:
            self._native.call("remove", job.number)
        if job.parent is not None:
            job.parent.try_send(bye=True)
            job.parent.close()


def _mismatch(job: _Job, found: Any) -> dict[str, Any]:
    groups = job.answers[next(iter(job.answers))]["groups"]
    ranks, other = groups[found.member], groups[found.other]
    reason = (
        f"{found.values:,} values, but rank {other[0]} {found.other_values:,}"
        if found.same_dtype or found.values != found.other_values
        else f"another dtype than rank {other[0]}"
    )
    return {
        "what": f"rank {ranks[0]} of job '{job.name}' sums {reason}; nothing was summed",
        "ranks": ranks, "remedy": "sum equal tensors in the same order on all ranks",
    }  # fmt: skip


def _is_error(message: Mapping[str, Any]) -> bool:
    error = message.get("error")
    return (
        isinstance(error, dict)
        and isinstance(error.get("what"), str)
        and isinstance(error.get("remedy"), str)
        and isinstance(error.get("ranks"), list)
        and all(isinstance(rank, int) for rank in error["ranks"])
    )


def _parse(request: Mapping[str, Any]) -> tuple[str, tuple[int, ...], int, int, int]:
    """Return job, ranks, world, slots and payload of a request that had the token."""
    try:
        name, ranks = str(request["job"])[:200], tuple(sorted({int(r) for r in request["ranks"]}))
        world, slots, payload = (int(request[key]) for key in ("world", "slots", "payload"))
    except (KeyError, TypeError, ValueError):
        raise _RefusedError("the request is malformed") from None
    if not ranks or ranks[0] < 0 or ranks[-1] >= world:
        raise _RefusedError(f"rank {ranks[-1] if ranks else '?'} is not one of {world}")
    if slots < 2 or not 64 <= payload <= 65000 or payload % 8:
        raise _RefusedError(f"{slots} slots of {payload} bytes are not possible")
    return name, ranks, world, slots, payload


def _sockets(host: str, port: int) -> tuple[socket.socket, socket.socket]:
    """Return a stream and a datagram socket on the same port."""
    last: OSError | None = None
    for _ in range(1 if port else _PORTS_TRIED):
        streams = datagrams = None
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            streams = socket.create_server((host, port), family=family, backlog=128)
            datagrams = socket.socket(family, socket.SOCK_DGRAM)
            datagrams.bind(streams.getsockname())
            for_datagrams(datagrams, fragments=True)
            # A member whose path is blocked must not stop the others for long.
            limit = struct.pack("ll", 0, _SEND_US)
            datagrams.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            return streams, datagrams
        except OSError as error:
            last = error
            for opened in (streams, datagrams):
                if opened is not None:
                    opened.close()
    assert last is not None
    raise SlipstreamError(
        f"{host}:{port} cannot be listened on: {last.strerror or last}",
        remedy="name an address of this machine and a free port",
    ) from last
