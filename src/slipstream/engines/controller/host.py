"""A host: runs its part of installed programs, in the order in which launches arrive.

One thread prepares: it creates process groups, allocates what transfers receive, posts the receives
and calls the functions' own preparation, ahead of the second thread, which runs nodes one by one.
After an error a launch continues with zeros, so that hosts that wait for this one do not hang.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import queue
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch

from slipstream.child import describe_error
from slipstream.engines.controller.layout import Box, Shape, pieces
from slipstream.engines.controller.tracing import (
    CompiledFunction,
    TracedNode,
    TracedProgram,
    TracedValue,
    reducing,
)
from slipstream.errors import CommunicationError, WorkloadError
from slipstream.ranks.launch import Host
from slipstream.search.estimators import load_target

# Some of its classes and methods are missing from its stubs.
distributed: Any = torch.distributed
Message = dict[str, Any]
Event = tuple[Message, bytes]
_TAGS = 1 << 30
# Of a message between hosts; deadlocks are detected earlier, from where hosts wait.
_MESSAGE_S = 600.0
_CONNECT_S = 60.0


def to_bytes(tensor: torch.Tensor) -> bytes:
    """Return the elements of `tensor` in order."""
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return dense.reshape(-1).view(torch.uint8).numpy().tobytes()


def from_bytes(data: memoryview | bytes, shape: Shape, dtype: str) -> torch.Tensor:
    """Return a tensor of `shape` with a copy of `data`."""
    if not len(data):
        return torch.empty(shape, dtype=getattr(torch, dtype))
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return flat.view(getattr(torch, dtype)).reshape(shape)


class HostGroup:
    """Messages between the hosts of a program."""

    def __init__(
        self, folder: str, key: str, hosts: Sequence[int], number: int, timeout_s: float
    ) -> None:
        self._rank = {host: rank for rank, host in enumerate(hosts)}
        self.number, self._limit = number, timedelta(seconds=timeout_s)
        connect = timedelta(seconds=min(timeout_s, _CONNECT_S))
        self.waits_for: int | None = None
        # Destroyed right after its wait, a message spins until gloo's thread has left it.
        self.ended: deque[Any] = deque(maxlen=2)
        store = distributed.FileStore(f"{folder}/{key}", len(hosts))
        rank = self._rank[number]
        self._gloo = distributed.ProcessGroupGloo(store, rank, len(hosts), connect)

    def send(self, tensor: torch.Tensor, host: int, tag: int) -> Callable[[], None]:
        """Start to send a contiguous tensor; return a function that waits until it is sent."""
        return self._start(self._gloo.send, tensor, host, tag)

    def receive(self, tensor: torch.Tensor, host: int, tag: int) -> Callable[[], None]:
        """Start to receive into a contiguous tensor; return a function that waits for it."""
        return self._start(self._gloo.recv, tensor, host, tag)

    def _start(
        self, call: Callable[..., Any], tensor: torch.Tensor, host: int, tag: int
    ) -> Callable[[], None]:
        try:
            work = call([tensor], self._rank[host], tag % _TAGS)
        except RuntimeError as error:
            raise self._lost(host, error) from error
        return functools.partial(self._wait, work, host)

    def _wait(self, work: Any, host: int) -> None:
        self.waits_for = host
        try:
            work.wait(self._limit)
        except RuntimeError as error:
            raise self._lost(host, error) from error
        finally:
            self.waits_for = None
        self.ended.append(work)

    def _lost(self, host: int, error: RuntimeError) -> CommunicationError:
        reason = str(error).splitlines()[0]
        return CommunicationError(
            f"a message between hosts {self.number} and {host} failed: {reason}", ranks=(host,)
        )

    def sum(self, tensor: torch.Tensor, hosts: Sequence[int], tag: int) -> torch.Tensor:
        """Return the sum of the hosts' tensors, by a ring of reduce-scatter and all-gather."""
        count, at = len(hosts), hosts.index(self.number)
        if count == 1:
            return tensor
        after, before = hosts[(at + 1) % count], hosts[at - 1]
        if count == 2:
            # One message instead of two; a sum of two terms does not depend on the order.
            received = torch.empty_like(tensor := tensor.contiguous())
            for wait in (self.receive(received, after, tag), self.send(tensor, after, tag)):
                wait()
            return tensor + received
        flat = tensor.reshape(-1)
        size = -(-len(flat) // count)
        total = torch.zeros(size * count, dtype=flat.dtype)
        total[: len(flat)] = flat
        chunks = total.chunk(count)
        for step in range(2 * (count - 1)):
            away, here = chunks[(at - step) % count], chunks[(at - step - 1) % count]
            adds = step < count - 1
            target = torch.empty_like(here) if adds else here
            wait = self.receive(target, before, tag)
            sent = self.send(away, after, tag)
            wait()
            sent()
            if adds:
                here += target
        return total[: len(flat)].reshape(tensor.shape)


class _Operation:
    """A node on a host, with what does not depend on the launch."""

    def __init__(
        self, node: TracedNode, at: int, tag: int, release: list[int], number: int,
        group: HostGroup | None,
    ) -> None:  # fmt: skip
        self.node, self.at, self.tag, self.release = node, at, tag, release
        self.name = f"{at} ({node.name})"
        self._group, self._number = group, number
        self._ring = list(dict.fromkeys(node.on.hosts))
        self._devices = node.on.hosts.count(number)
        self._inputs = [value.number for value in node.inputs]
        self._results = [
            (value.number, value.shard_shape, getattr(torch, value.dtype)) for value in node.outputs
        ]
        self._function: Any = load_target(node.function) if node.function else None
        if node.function and not isinstance(self._function, CompiledFunction):
            raise WorkloadError("it is not a compiled function", where=node.function)
        hook = self._function and self._function.prepare
        self._hook: Callable[[], object] | None = hook
        # Of a move. By receiving host, (device of this host, box within its part), each once; by
        # sending host, (box of the tensor, target devices); and within this host, both.
        self._sent: dict[int, list[tuple[int, Box]]] = {}
        self._received: dict[int, dict[Any, tuple[Box, list[int]]]] = {}
        self._local: list[tuple[int, Box, int, Box]] = []
        self.run = {"compute": self._compute, "sum": self._sum, "move": self._move}[node.kind]
        if node.kind == "move":
            self._split()
        # Whether there is work ahead of `run`.
        self.prepares = bool(self._received) or hook is not None

    def _split(self) -> None:
        source, target = self.node.inputs[0], self.node.outputs[0]
        senders, receivers = source.on.hosts, target.on.hosts
        for piece in pieces(source.shape, source.sharding, senders, target.sharding, receivers):
            sender, receiver = senders[piece.source], receivers[piece.target]
            outer = source.box(piece.source)
            part = senders[: piece.source].count(sender), _within(piece.box, outer)
            if sender == receiver == self._number:
                self._local.append((*part, piece.target, piece.box))
            elif receiver == self._number:
                parts = self._received.setdefault(sender, {})
                key = piece.source, *((own.start, own.stop) for own in piece.box)
                parts.setdefault(key, (piece.box, []))[1].append(piece.target)
            elif sender == self._number and part not in self._sent.setdefault(receiver, []):
                self._sent[receiver].append(part)

    def prepare(self, launch: _Launch) -> None:
        """Post receives, and call the function's preparation."""
        value, received = self.node.outputs[0], launch.received.setdefault(self.at, [])
        for host, parts in self._received.items():
            count = sum(_numel(box) for box, _ in parts.values())
            flat = torch.zeros(count, dtype=getattr(torch, value.dtype))
            assert self._group is not None
            received.append((flat, self._group.receive(flat, host, launch.tag + self.tag)))
        if self._hook is not None:
            self._hook()

    def fill(self, store: dict[int, list[torch.Tensor]]) -> None:
        """Set missing outputs to zeros."""
        for value in self.node.outputs:
            store.setdefault(value.number, _zeros(value, self._number))

    def _total(self, tensor: torch.Tensor, tag: int) -> torch.Tensor:
        return tensor if self._group is None else self._group.sum(tensor, self._ring, tag)

    def _sum(self, launch: _Launch) -> None:
        own = functools.reduce(torch.add, launch.store[self._inputs[0]])
        whole = self._total(own, launch.tag + self.tag)
        launch.store[self._results[0][0]] = [whole] * self._devices

    def _compute(self, launch: _Launch) -> None:
        function, store, done = self._function, launch.store, 0
        tag = launch.tag + self.tag

        def reduce(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal done
            if self._devices > 1:
                raise WorkloadError(
                    f"{self.name} calls all_reduce on a host with several devices of its slice",
                    remedy="use one device per host, or declare out=PARTIAL instead",
                )
            done += 1
            return self._total(tensor, tag + done)

        try:
            if launch.failure is not None:
                return
            results: list[tuple[torch.Tensor, ...]] = []
            with reducing(reduce):
                for device in range(self._devices):
                    arguments = [
                        store[item.number][device] if isinstance(item, TracedValue) else item
                        for item in self.node.arguments
                    ]
                    found = function.function(*arguments, **self.node.constants)
                    results.append((found,) if function.single else tuple(found))
            for (number, shape, dtype), shards in zip(
                self._results, zip(*results, strict=True), strict=True
            ):
                for tensor in shards:
                    if tensor.shape != shape or tensor.dtype != dtype:
                        raise WorkloadError(
                            f"{self.name} of '{launch.program.name}' returned "
                            f"{list(tensor.shape)} of {tensor.dtype}, but {list(shape)} of {dtype} "
                            "when it was traced",
                            remedy="shapes must depend on shapes of inputs alone",
                        )
                store[number] = [tensor.detach() for tensor in shards]
        finally:
            # Other hosts wait for the sums of a function that failed here.
            for shape, kind in self.node.sums[done:]:
                done += 1
                with contextlib.suppress(CommunicationError):
                    self._total(torch.zeros(shape, dtype=getattr(torch, kind)), tag + done)

    def _move(self, launch: _Launch) -> None:
        own, value = launch.store.get(self._inputs[0], []), self.node.outputs[0]
        for host, keys in self._sent.items():
            flat = torch.cat([own[device][box].reshape(-1) for device, box in keys])
            assert self._group is not None
            launch.sends.append(self._group.send(flat, host, launch.tag + self.tag))
        number, shape, _ = self._results[0]
        shards: dict[int, torch.Tensor] = {}

        def put(device: int, box: Box, part: torch.Tensor) -> None:
            if part.shape == shape:
                shards[device] = part
                return
            if device not in shards:
                shards[device] = torch.empty(shape, dtype=part.dtype)
            shards[device][_within(box, value.box(device))] = part

        for index, inner, device, box in self._local:
            put(device, box, own[index][inner])
        failure: CommunicationError | None = None
        received = launch.received.get(self.at, [])
        for (flat, wait), parts in zip(received, self._received.values(), strict=False):
            try:
                wait()
            except CommunicationError as error:
                failure = error
            offset = 0
            for box, devices in parts.values():
                part = flat[offset : offset + _numel(box)]
                offset += part.numel()
                for device in devices:
                    put(device, box, part.view([own.stop - own.start for own in box]))
        launch.store[number] = [
            shards[device] for device, host in enumerate(value.on.hosts) if host == self._number
        ]
        if failure is not None:
            raise failure


class _Installed:
    """A program on a host, as a flat list of the operations of this host."""

    def __init__(self, message: Message, number: int, group: HostGroup | None) -> None:
        program, tag = TracedProgram.from_json(message["spec"]), 0
        self.name, self.values, self.group = program.name, program.values, group
        self.outputs = {
            name: value.number for name, value in program.outputs.items()
            if number in value.on.hosts
        }  # fmt: skip
        self.operations: list[_Operation] = []
        for at, (node, release) in enumerate(zip(program.nodes, program.releases(), strict=True)):
            if number in node.on.hosts or number in node.outputs[0].on.hosts:
                self.operations.append(_Operation(node, at, tag, release, number, group))
            tag += 1 + len(node.sums)


@dataclass(eq=False)
class _Launch:
    """A launch on this host; operations that need preparation wait for their event."""

    number: int
    program: _Installed
    tag: int
    message: Message
    store: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    ready: dict[int, threading.Event] = field(default_factory=dict)
    received: dict[int, list[tuple[torch.Tensor, Callable[[], None]]]] = field(default_factory=dict)
    sends: list[Callable[[], None]] = field(default_factory=list)
    failure: Message | None = None


class HostRuntime:
    """The programs, values and threads of a host.

    Args:
        number: of the host.
        folder: visible to all hosts; they meet through files in it.
        emit: receives each event, with its payload; called from several threads.
    """

    runs_here = False
    """Whether this process is a host."""

    def __init__(self, number: int, folder: str, emit: Callable[[Message, bytes], None]) -> None:
        self.number, self._folder, self._emit = number, folder, emit
        os.environ["GLOO_SOCKET_IFNAME"] = Host().interface
        HostRuntime.runs_here = True
        self._groups: dict[str, HostGroup] = {}
        self._programs: dict[int, _Installed] = {}
        self._broken: dict[int, Message] = {}
        self._kept: dict[str, list[torch.Tensor]] = {}
        self._kept_bytes = 0
        self._inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._queue: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._at: tuple[int, str] | None = None
        self._steps = 0
        for loop in (self._prepare_all, self._run_all):
            threading.Thread(target=_or_exit, args=(loop,), daemon=True).start()

    def post(self, message: Message, payload: bytes = b"") -> None:
        """Accept a message; returns at once."""
        if message["do"] == "status":
            waits = (group.waits_for for group in self._groups.values())
            waits_for = next((host for host in waits if host is not None), None)
            status = {"at": self._at, "steps": self._steps, "waits_for": waits_for}
            self._emit({"event": "status", **status}, b"")
        else:
            self._inbox.put((message, payload))

    def _prepare_all(self) -> None:
        while True:
            message, payload = self._inbox.get()
            do = message["do"]
            if do == "install":
                self._install(message)
            elif do == "launch":
                self._prepare(message, payload)
            elif do == "fetch":
                self._queue.put(functools.partial(self._fetch, message))
            else:
                self._queue.put(functools.partial(self._free, message))

    def _run_all(self) -> None:
        torch.set_num_threads(1)
        while True:
            self._queue.get()()

    def _install(self, message: Message) -> None:
        number, hosts, key = message["program"], message["hosts"], message["group"]
        try:
            if len(hosts) > 1 and key not in self._groups:
                self._groups[key] = HostGroup(self._folder, key, hosts, self.number, _MESSAGE_S)
            self._programs[number] = _Installed(message, self.number, self._groups.get(key))
            self._broken.pop(number, None)
        except Exception as error:
            self._broken[number] = describe_error(error)

    def _prepare(self, message: Message, payload: bytes) -> None:
        self._queue.put(functools.partial(self._free, message))
        if (failure := self._broken.get(message["program"])) is not None:
            self._report_failure(message["launch"], "?", failure, [])
            self._emit(launch_done(message["launch"]), b"")
            return
        program = self._programs[message["program"]]
        launch = _Launch(message["launch"], program, message["tag"], message)
        offset = 0
        for item in message["inputs"]:
            value = program.values[item["value"]]
            if "bytes" in item:
                count = value.on.hosts.count(self.number)
                # A replicated input is sent once per host.
                sent = 1 if value.sharding.kind == "replicated" else count
                parts = []
                for _ in range(sent):
                    data = memoryview(payload)[offset : offset + item["bytes"]]
                    parts.append(from_bytes(data, value.shard_shape, value.dtype))
                    offset += item["bytes"]
                launch.store[item["value"]] = parts * (count // sent)
        ahead = [operation for operation in program.operations if operation.prepares]
        launch.ready = {operation.at: threading.Event() for operation in ahead}
        self._queue.put(functools.partial(self._run, launch))
        for operation in ahead:
            try:
                operation.prepare(launch)
            except Exception as error:
                self._fail(launch, operation.name, error)
            launch.ready[operation.at].set()

    def _fail(self, launch: _Launch, node: str, error: Exception) -> None:
        """Report a launch's first error; the launch then continues with zeros."""
        if launch.failure is None:
            launch.failure = describe_error(error)
            lost = list(error.ranks) if isinstance(error, CommunicationError) else []
            self._report_failure(launch.number, node, launch.failure, lost)

    def _report_failure(self, launch: int, node: str, error: Message, lost: list[int]) -> None:
        message = {"event": "failed", "launch": launch, "node": node, "error": error, "lost": lost}
        self._emit(message, b"")

    def _run(self, launch: _Launch) -> None:
        program, store, began = launch.program, launch.store, time.perf_counter_ns()
        spans: list[tuple[int, int, int]] = []
        self._take_kept(launch)
        held = peak = self._kept_bytes + sum(map(_nbytes, store.values()))
        for operation in program.operations:
            self._at = launch.number, operation.name
            if (ready := launch.ready.get(operation.at)) is not None:
                ready.wait()
            start = time.perf_counter_ns()
            try:
                operation.run(launch)
            except Exception as error:
                self._fail(launch, operation.name, error)
            if launch.failure is not None:
                operation.fill(store)
            spans.append((operation.at, start, time.perf_counter_ns()))
            self._steps += 1
            held += sum(_nbytes(store[value.number]) for value in operation.node.outputs)
            peak = max(peak, held)
            for number in operation.release:
                held -= _nbytes(store.pop(number, []))
        for wait in launch.sends:
            try:
                wait()
            except CommunicationError as error:
                self._fail(launch, program.operations[-1].name, error)
        self._at = None
        if launch.failure is None:
            for name, number in program.outputs.items():
                self._kept[f"{launch.number}.{name}"] = store[number]
                self._kept_bytes += _nbytes(store[number])
        shown = spans if launch.message["trace"] else []
        self._emit(launch_done(launch.number, time.perf_counter_ns() - began, peak, shown), b"")
        if program.group is not None:
            program.group.ended.clear()

    def _take_kept(self, launch: _Launch) -> None:
        for item in launch.message["inputs"]:
            if "kept" not in item:
                continue
            number, program = item["value"], launch.program
            found = self._kept.get(item["kept"])
            if found is None:
                error = WorkloadError(
                    f"the launch that computes input {number} failed", where=program.name
                )
                self._fail(launch, program.operations[0].name, error)
                found = _zeros(program.values[number], self.number)
            launch.store[number] = found

    def _fetch(self, message: Message) -> None:
        # Of a replicated output the controller joins one part, of a host's devices.
        parts = self._kept.get(message["output"], [])[: 1 if message["first"] else None]
        answer = {"event": "fetched", "fetch": message["fetch"], "parts": len(parts)}
        self._emit(answer, b"".join(map(to_bytes, parts)))

    def _free(self, message: Message) -> None:
        for key in message["free"]:
            self._kept_bytes -= _nbytes(self._kept.pop(key, []))


def _or_exit(loop: Callable[[], None]) -> None:
    """Run a thread of the host; end the process with it, so that the controller notices."""
    try:
        loop()
    except BaseException:
        traceback.print_exc()
        os._exit(70)


def launch_done(
    launch: int, busy_ns: int = 0, peak_bytes: int = 0, spans: Sequence[tuple[int, int, int]] = ()
) -> Message:
    """Return the event that ends a launch on a host."""
    return {
        "event": "done", "launch": launch, "busy_ns": busy_ns, "peak_bytes": peak_bytes,
        "spans": spans,
    }  # fmt: skip


def _zeros(value: TracedValue, host: int) -> list[torch.Tensor]:
    dtype = getattr(torch, value.dtype)
    return [torch.zeros(value.shard_shape, dtype=dtype) for _ in range(value.on.hosts.count(host))]


def _nbytes(parts: Sequence[torch.Tensor]) -> int:
    return sum(part.nbytes for part in parts)


def _within(box: Box, outer: Box) -> Box:
    """Return `box` in coordinates of `outer`, which includes it."""
    return tuple(
        slice(own.start - other.start, own.stop - other.start)
        for own, other in zip(box, outer, strict=True)
    )


def _numel(box: Box) -> int:
    return math.prod(own.stop - own.start for own in box)
