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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch

from slipstream.child import describe_error
from slipstream.engines.controller.layout import Box, Shape, Sharding, pieces
from slipstream.engines.controller.tracing import CompiledFunction, reducing
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
        def wait() -> None:
            self.waits_for = host
            with self._named(host):
                work.wait(self._limit)
            # The message has used the tensor until here.
            used.clear()
            self.waits_for = None

        used = [tensor]
        with self._named(host):
            work = call([tensor], self._rank[host], tag % _TAGS)
        return wait

    @contextlib.contextmanager
    def _named(self, host: int) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            self.waits_for = None
            raise CommunicationError(
                f"a message between hosts {self.number} and {host} failed: "
                f"{str(error).splitlines()[0]}",
                ranks=(host,),
            ) from error

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


@dataclass(eq=False)
class _Value:
    shape: Shape
    dtype: str
    slice: int
    sharding: Sharding
    hosts: list[int]

    @property
    def shard(self) -> Shape:
        return self.sharding.shard_shape(self.shape, len(self.hosts), "a tensor")

    def zeros(self, host: int) -> list[torch.Tensor]:
        dtype = getattr(torch, self.dtype)
        return [torch.zeros(self.shard, dtype=dtype) for _ in range(self.hosts.count(host))]

    def box(self, device: int) -> Box:
        return self.sharding.box(self.shape, len(self.hosts), device)


@dataclass(eq=False)
class _Node:
    kind: str
    name: str
    function: CompiledFunction | None
    arguments: list[Message]
    constants: Message
    outputs: list[int]
    hosts: list[int]
    sums: list[tuple[Shape, str]]
    tag: int
    release: list[int]
    # Of a move. By receiving host, (device of this host, box within its part), each once; by
    # sending host, (box of the tensor, target devices); and within this host, both.
    sent: dict[int, list[tuple[int, Box]]] = field(default_factory=dict)
    received: dict[int, dict[Any, tuple[Box, list[int]]]] = field(default_factory=dict)
    local: list[tuple[int, Box, int, Box]] = field(default_factory=list)


class _Installed:
    """A program on this host."""

    def __init__(self, message: Message, number: int, group: HostGroup | None) -> None:
        spec = message["spec"]
        self.name, self.group, self.number = spec["name"], group, number
        slices = [[host for host, count in part for _ in range(count)] for part in spec["slices"]]
        self.values = [
            _Value(tuple(shape), dtype, at, Sharding(kind, dim), slices[at])
            for shape, dtype, at, kind, dim in spec["values"]
        ]
        self.outputs: dict[str, int] = spec["outputs"]
        self.nodes: list[_Node] = []
        tag = 0
        for at, (node, release) in enumerate(zip(spec["nodes"], spec["releases"], strict=True)):
            function = load_target(node["function"]) if node["function"] else None
            if function is not None and not isinstance(function, CompiledFunction):
                raise WorkloadError("it is not a compiled function", where=node["function"])
            made = _Node(
                node["kind"], f"{at} ({node['name']})", function, node["arguments"],
                node["constants"], node["outputs"], slices[node["slice"]],
                [(tuple(shape), dtype) for shape, dtype in node["sums"]], tag, release,
            )  # fmt: skip
            if made.kind == "move":
                self._split(made)
            self.nodes.append(made)
            tag += 1 + len(made.sums)

    def _split(self, node: _Node) -> None:
        source = self.values[node.arguments[0]["value"]]
        target = self.values[node.outputs[0]]
        for piece in pieces(
            source.shape, source.sharding, source.hosts, target.sharding, target.hosts
        ):
            sender, receiver = source.hosts[piece.source], target.hosts[piece.target]
            outer = source.box(piece.source)
            part = source.hosts[: piece.source].count(sender), _within(piece.box, outer)
            if sender == receiver == self.number:
                node.local.append((*part, piece.target, piece.box))
            elif receiver == self.number:
                parts = node.received.setdefault(sender, {})
                key = piece.source, *((own.start, own.stop) for own in piece.box)
                parts.setdefault(key, (piece.box, []))[1].append(piece.target)
            elif sender == self.number and part not in node.sent.setdefault(receiver, []):
                node.sent[receiver].append(part)

    def takes_part(self, node: _Node) -> bool:
        return self.number in node.hosts or self.number in self.values[node.outputs[0]].hosts


@dataclass(eq=False)
class _Launch:
    """A launch on this host; nodes that need preparation wait for their event."""

    number: int
    program: _Installed
    tag: int
    message: Message
    store: dict[int, list[torch.Tensor]]
    ready: dict[int, threading.Event] = field(default_factory=dict)
    received: dict[int, list[tuple[torch.Tensor, Callable[[], None]]]] = field(default_factory=dict)
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
        launch = _Launch(message["launch"], program, message["tag"], message, {})
        offset = 0
        for item in message["inputs"]:
            value = program.values[item["value"]]
            if "bytes" in item:
                count = value.hosts.count(self.number)
                # A replicated input is sent once per host.
                sent = 1 if value.sharding.kind == "replicated" else count
                parts = []
                for _ in range(sent):
                    data = memoryview(payload)[offset : offset + item["bytes"]]
                    parts.append(from_bytes(data, value.shard, value.dtype))
                    offset += item["bytes"]
                launch.store[item["value"]] = parts * (count // sent)
        nodes = [
            at for at, node in enumerate(program.nodes)
            if program.takes_part(node) and (node.received or _hook(node))
        ]  # fmt: skip
        launch.ready = {at: threading.Event() for at in nodes}
        self._queue.put(functools.partial(self._run, launch))
        for at in nodes:
            node = program.nodes[at]
            try:
                self._receive(launch, at)
                if (hook := _hook(node)) is not None:
                    hook()
            except Exception as error:
                self._fail(launch, node, error)
            launch.ready[at].set()

    def _receive(self, launch: _Launch, at: int) -> None:
        """Allocate what a node receives, and post its receives."""
        node, program = launch.program.nodes[at], launch.program
        launch.received[at] = []
        for host, parts in node.received.items():
            value = program.values[node.outputs[0]]
            count = sum(_numel(box) for box, _ in parts.values())
            flat = torch.zeros(count, dtype=getattr(torch, value.dtype))
            assert program.group is not None
            wait = program.group.receive(flat, host, launch.tag + node.tag)
            launch.received[at].append((flat, wait))

    def _fail(self, launch: _Launch, node: _Node, error: Exception) -> None:
        """Report a launch's first error; the launch then continues with zeros."""
        if launch.failure is not None:
            return
        launch.failure = describe_error(error)
        lost = list(error.ranks) if isinstance(error, CommunicationError) else []
        self._report_failure(launch.number, node.name, launch.failure, lost)

    def _report_failure(self, launch: int, node: str, error: Message, lost: list[int]) -> None:
        message = {"event": "failed", "launch": launch, "node": node, "error": error, "lost": lost}
        self._emit(message, b"")

    def _run(self, launch: _Launch) -> None:
        program, store, began = launch.program, launch.store, time.perf_counter_ns()
        spans: list[tuple[int, int, int]] = []
        sends: list[Callable[[], None]] = []
        self._take_kept(launch)
        peak = 0
        for at, node in enumerate(program.nodes):
            if not program.takes_part(node):
                continue
            self._at = launch.number, node.name
            if at in launch.ready:
                launch.ready[at].wait()
            start = time.perf_counter_ns()
            try:
                self._step(launch, at, node, sends)
            except Exception as error:
                self._fail(launch, node, error)
            for number in node.outputs:
                if len(store.get(number, ())) != program.values[number].hosts.count(self.number):
                    store[number] = program.values[number].zeros(self.number)
            spans.append((at, start, time.perf_counter_ns()))
            self._steps += 1
            values = sum(part.nbytes for parts in store.values() for part in parts)
            peak = max(peak, values + self._kept_bytes)
            for number in node.release:
                store.pop(number, None)
        for wait in sends:
            try:
                wait()
            except CommunicationError as error:
                self._fail(launch, program.nodes[-1], error)
        self._at = None
        if launch.failure is None:
            for name, number in program.outputs.items():
                if self.number in program.values[number].hosts:
                    self._kept[f"{launch.number}.{name}"] = store[number]
                    self._kept_bytes += sum(part.nbytes for part in store[number])
        shown = spans if launch.message["trace"] else []
        self._emit(launch_done(launch.number, time.perf_counter_ns() - began, peak, shown), b"")

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
                self._fail(launch, program.nodes[0], error)
                found = program.values[number].zeros(self.number)
            launch.store[number] = found

    def _step(self, launch: _Launch, at: int, node: _Node, sends: list[Callable[[], None]]) -> None:
        store, group, tag = launch.store, launch.program.group, launch.tag + node.tag
        if node.kind == "move":
            self._move(launch, at, node, sends)
        elif node.kind == "sum":
            own = functools.reduce(torch.add, store[node.arguments[0]["value"]])
            whole = _sum(group, own, node.hosts, tag)
            store[node.outputs[0]] = [whole] * node.hosts.count(self.number)
        else:
            self._compute(launch, node, tag + 1)

    def _compute(self, launch: _Launch, node: _Node, tag: int) -> None:
        assert node.function is not None
        program, store, done = launch.program, launch.store, 0

        def reduce(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal done
            if node.hosts.count(self.number) > 1:
                raise WorkloadError(
                    f"{node.name} calls all_reduce on a host with several devices of its slice",
                    remedy="use one device per host, or declare out=PARTIAL instead",
                )
            done += 1
            return _sum(program.group, tensor, node.hosts, tag + done - 1)

        try:
            if launch.failure is not None:
                return
            results: list[tuple[torch.Tensor, ...]] = []
            for device in range(node.hosts.count(self.number)):
                arguments = [
                    store[item["value"]][device] if "value" in item else item["constant"]
                    for item in node.arguments
                ]
                with reducing(reduce):
                    found = node.function.function(*arguments, **node.constants)
                results.append((found,) if node.function.single else tuple(found))
            for number, shards in zip(node.outputs, zip(*results, strict=True), strict=True):
                value = program.values[number]
                for tensor in shards:
                    if tuple(tensor.shape) != value.shard or str(tensor.dtype) != (
                        f"torch.{value.dtype}"
                    ):
                        raise WorkloadError(
                            f"{node.name} of '{program.name}' returned {list(tensor.shape)} of "
                            f"{tensor.dtype}, but {list(value.shard)} of torch.{value.dtype} when "
                            "it was traced",
                            remedy="shapes must depend on shapes of inputs alone",
                        )
                store[number] = [tensor.detach() for tensor in shards]
        finally:
            # Other hosts wait for the sums of a function that failed here.
            for shape, dtype in node.sums[done:]:
                done += 1
                with contextlib.suppress(CommunicationError):
                    zeros = torch.zeros(shape, dtype=getattr(torch, dtype))
                    _sum(program.group, zeros, node.hosts, tag + done - 1)

    def _move(self, launch: _Launch, at: int, node: _Node, sends: list[Callable[[], None]]) -> None:
        program, store = launch.program, launch.store
        own, value = store.get(node.arguments[0]["value"], []), program.values[node.outputs[0]]
        for host, keys in node.sent.items():
            flat = torch.cat([own[device][box].reshape(-1) for device, box in keys])
            assert program.group is not None
            sends.append(program.group.send(flat, host, launch.tag + node.tag))
        shards: dict[int, torch.Tensor] = {}

        def put(device: int, box: Box, part: torch.Tensor) -> None:
            if tuple(part.shape) == value.shard:
                shards[device] = part
                return
            if device not in shards:
                shards[device] = torch.empty(value.shard, dtype=part.dtype)
            shards[device][_within(box, value.box(device))] = part

        for index, inner, device, box in node.local:
            put(device, box, own[index][inner])
        failure: CommunicationError | None = None
        received = launch.received.get(at, [])
        for (flat, wait), parts in zip(received, node.received.values(), strict=False):
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
        store[node.outputs[0]] = [
            shards[device] for device, host in enumerate(value.hosts) if host == self.number
        ]
        if failure is not None:
            raise failure

    def _fetch(self, message: Message) -> None:
        # Of a replicated output the controller joins one part, of a host's devices.
        parts = self._kept.get(message["output"], [])[: 1 if message["first"] else None]
        answer = {"event": "fetched", "fetch": message["fetch"], "parts": len(parts)}
        self._emit(answer, b"".join(map(to_bytes, parts)))

    def _free(self, message: Message) -> None:
        for key in message["free"]:
            self._kept_bytes -= sum(part.nbytes for part in self._kept.pop(key, ()))


def _or_exit(loop: Callable[[], None]) -> None:
    """Run a thread of the host; end the process with it, so that the controller notices."""
    try:
        loop()
    except BaseException:
        traceback.print_exc()
        os._exit(70)


def _hook(node: _Node) -> Callable[[], object] | None:
    return None if node.function is None else node.function.prepare


def launch_done(
    launch: int, busy_ns: int = 0, peak_bytes: int = 0, spans: Sequence[tuple[int, int, int]] = ()
) -> Message:
    """Return the event that ends a launch on a host."""
    return {
        "event": "done", "launch": launch, "busy_ns": busy_ns, "peak_bytes": peak_bytes,
        "spans": spans,
    }  # fmt: skip


def _sum(
    group: HostGroup | None, tensor: torch.Tensor, hosts: Sequence[int], tag: int
) -> torch.Tensor:
    ring = list(dict.fromkeys(hosts))
    return tensor if group is None else group.sum(tensor, ring, tag)


def _within(box: Box, outer: Box) -> Box:
    """Return `box` in coordinates of `outer`, which includes it."""
    return tuple(
        slice(own.start - other.start, own.stop - other.start)
        for own, other in zip(box, outer, strict=True)
    )


def _numel(box: Box) -> int:
    return math.prod(own.stop - own.start for own in box)
