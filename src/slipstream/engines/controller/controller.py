"""The controller: launches programs on hosts, with one message per host, in one order for all.

Source: Barham et al., "Pathways: Asynchronous Distributed Dataflow for ML", MLSys 2022.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from slipstream.arguments import as_integer
from slipstream.engines.controller.engine import Engine, engine_by_name
from slipstream.engines.controller.host import HostRuntime, Message, from_bytes
from slipstream.engines.controller.launches import (
    Input,
    KeptValue,
    LaunchFuture,
    LaunchRequest,
    check_inputs,
)
from slipstream.engines.controller.scheduling import FairQueue, QueuedClient
from slipstream.engines.controller.tracing import DeviceSlice, TracedProgram
from slipstream.engines.controller.watching import HostWatch
from slipstream.errors import (
    ChildError,
    CommunicationError,
    InvalidArgumentError,
    UsageError,
    WorkloadError,
)
from slipstream.units import format_bytes

ControlClient = QueuedClient[LaunchRequest]
_MAX_WAITING = 1024
_POLL_S, _STATUS_S = 0.2, 1.0
_MANY_FREES = 256


class Controller:
    """A pool of devices on hosts, and the only process that decides what they run.

    Use as a context manager.

    Attributes:
        messages: number of messages by kind, sent and received.
        busy_ns: device time by client's name, summed over hosts.
        peak_bytes: by host, the peak of values that it held.

    Args:
        hosts: number of host processes.
        devices: devices per host.
        engine: ``"local"``, ``"ray"``, ``"monarch"``, ``"sim"``, or an engine.
        device_bytes: memory of a device for values of programs; None for no limit.
        depth: launches per host that are sent before earlier ones have ended.
        stall_s: time for which hosts must wait for each other without progress until they count as
            deadlocked.

    Raises:
        InvalidArgumentError: a number is not an integer or below 1, or `stall_s` is not positive.
        UsageError: this process is a host.
        MissingExtraError: the engine is not installed.
        SlipstreamError: a host cannot be started.
    """

    def __init__(
        self, hosts: int = 2, devices: int = 1, engine: str | Engine = "local", *,
        device_bytes: int | None = None, depth: int = 4, stall_s: float = 20.0,
    ) -> None:  # fmt: skip
        self._count, self._devices = as_integer("hosts", hosts), as_integer("devices", devices)
        self._depth = as_integer("depth", depth)
        if device_bytes is not None:
            device_bytes = as_integer("device_bytes", device_bytes)
        if not stall_s > 0.0:
            raise InvalidArgumentError("stall_s", f"{stall_s} is not a positive number")
        if HostRuntime.runs_here:
            raise UsageError(
                "the script starts a controller when a host imports it for its functions",
                remedy='start it below `if __name__ == "__main__":`',
            )
        self._engine = engine_by_name(engine) if isinstance(engine, str) else engine
        self._host_bytes = None if device_bytes is None else device_bytes * devices
        self.messages: Counter[str] = Counter()
        self.busy_ns: Counter[str] = Counter()
        self.peak_bytes: Counter[int] = Counter()
        self._slices: list[DeviceSlice] = []
        self._dead: dict[int, str] = {}
        self._lives: Counter[int] = Counter()
        # By program: its number on hosts, its installed state, and its last device time.
        self._numbers: dict[TracedProgram, int] = {}
        self._installed: dict[TracedProgram, object] = {}
        self._cost: dict[TracedProgram, float] = {}
        self._queue: FairQueue[LaunchRequest] = FairQueue()
        self._running: dict[int, LaunchRequest] = {}
        self._reserved: Counter[int] = Counter()
        self._kept: dict[int, Any] = {}
        self._forgotten: deque[LaunchFuture] = deque()
        self._frees: dict[int, list[str]] = {host: [] for host in range(hosts)}
        self._fetched: dict[tuple[int, int], tuple[Message, bytes]] = {}
        self._watch = HostWatch(stall_s, self._program_name)
        self._next_watch = 0.0
        self._launches, self._fetches = itertools.count(), itertools.count()
        self._tag = 0
        self._closed = False
        # Reentrant: a future may be collected, and so released, while this thread holds it.
        self._changed = threading.Condition(threading.RLock())
        self._default = self.client("default")
        try:
            self._engine.start(range(hosts))
        except BaseException:
            self._engine.stop()
            raise
        self._threads = [
            threading.Thread(target=self._guard, args=(loop,), daemon=True, name="slipstream")
            for loop in (self._schedule, self._collect)
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Controller:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """End all hosts; launches that have not ended fail."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._engine.stop()
        self._end_all("the controller was closed before the launch ended")

    def _end_all(self, reason: str) -> None:
        with self._changed:
            self._closed = True
            for request in [*self._running.values(), *self._queue.remove(lambda request: True)]:
                request.future.end(UsageError(reason))
            self._changed.notify_all()

    def _guard(self, loop: Callable[[], None]) -> None:
        """Run a thread; nothing waits for it forever if it fails."""
        try:
            loop()
        except BaseException as error:
            self._end_all(f"the controller failed: {type(error).__name__}: {error}")
            raise

    def slice(self, devices: int, name: str = "") -> DeviceSlice:
        """Return virtual devices; they are bound at the first launch, to the least used ones.

        Raises:
            InvalidArgumentError: there are not as many devices.
        """
        total = self._count * self._devices
        if not 1 <= as_integer("devices", devices, None) <= total:
            raise InvalidArgumentError(
                "devices", f"a slice of {devices} devices, but the pool has {total}: "
                f"{self._count} hosts with {self._devices} each",
                remedy="start the controller with more hosts or devices, or request fewer",
            )  # fmt: skip
        self._slices.append(DeviceSlice(name or f"slice{len(self._slices)}", devices))
        return self._slices[-1]

    def program(self, name: str) -> TracedProgram:
        """Return an empty program; functions called in its ``with`` block are added to it."""
        return TracedProgram(name)

    def client(self, name: str, weight: float = 1.0) -> ControlClient:
        """Return a client that gets device time in proportion to `weight`, for `launch`.

        Raises:
            InvalidArgumentError: the weight is not positive.
        """
        if not 0.0 < weight < float("inf"):
            raise InvalidArgumentError("weight", f"{weight} is not a positive number")
        with self._changed:
            self._queue.clients.append(QueuedClient(name, weight))
            return self._queue.clients[-1]

    def bind(self, program: TracedProgram) -> None:
        """Bind the program's unbound slices; a launch does it, too.

        Raises:
            InvalidArgumentError: a slice of the program is of another controller.
            CommunicationError: too few devices are alive.
        """
        with self._changed:
            for part in program.slices:
                if part not in self._slices:
                    raise InvalidArgumentError(
                        "program", f"its slice {part.name} is of another controller",
                        remedy="build the program with slices of this controller",
                    )  # fmt: skip
                if part.binding is None:
                    self._bind(part)

    def rebind(self, part: DeviceSlice) -> None:
        """Bind a slice again, to hosts that are alive; restarts dead ones if these do not suffice.

        Programs on the slice are installed again by their next launch. Outputs of earlier launches
        on the slice are lost.

        Raises:
            SlipstreamError: a host cannot be restarted.
        """
        with self._changed:
            part.binding = None
            missing = part.devices - (self._count - len(self._dead)) * self._devices
            restarted = list(self._dead)[: max(-(-missing // self._devices), 0)]
        if restarted:
            self._engine.start(restarted)
        with self._changed:
            for host in restarted:
                del self._dead[host]
                self._lives[host] += 1
            self._bind(part)

    def _bind(self, part: DeviceSlice) -> None:
        used = Counter(host for other in self._slices for host in other.hosts)
        alive = [host for host in range(self._count) if host not in self._dead]
        if len(alive) * self._devices < part.devices:
            raise CommunicationError(
                f"{part.name} needs {part.devices} devices, but only "
                f"{len(alive) * self._devices} are alive",
                ranks=tuple(self._dead), remedy="rebind(slice) restarts dead hosts",
            )  # fmt: skip
        counts: list[tuple[int, int]] = []
        remaining = part.devices
        for host in sorted(alive, key=lambda host: (used[host], host)):
            if remaining:
                counts.append((host, min(self._devices, remaining)))
                remaining -= counts[-1][1]
        part.binding = tuple(sorted(counts))

    def launch(
        self, program: TracedProgram, inputs: Mapping[str, Input] | None = None, *,
        client: ControlClient | None = None, traced: bool = False,
    ) -> LaunchFuture:  # fmt: skip
        """Launch a program; returns before it runs.

        Args:
            inputs: tensors, or outputs of other launches; by default those that it was traced with.
            client: whose share it uses.
            traced: whether to record when each node runs.

        Raises:
            UnknownNameError: the program has no such input.
            InvalidArgumentError: an input has another shape, dtype, slice or layout, is not a dense
                tensor on the CPU, the values of the program exceed the memory of a device, or a
                slice is of another controller.
            UsageError: the program is empty, or the controller is closed.
            CommunicationError: a host of the program is dead; names it.
        """
        program.need_nodes()
        check_inputs(program, inputs or {})
        client = client or self._default
        with self._changed:
            while len(client.waiting) >= _MAX_WAITING and not self._closed:
                self._changed.wait(_POLL_S)
            if self._closed:
                raise UsageError("the controller is closed", remedy="launch within its with block")
            self.bind(program)
            self._need_alive(program.hosts)
            needs, keeps = self._sizes(program)
            future = LaunchFuture(program, next(self._launches), self._fetch, self._forget)
            values = {**program.examples, **(inputs or {})}
            request = LaunchRequest(future, program.hosts, values, client, needs, keeps, traced)
            self._queue.add(client, request)
            self._changed.notify_all()
        return future

    def _need_alive(self, hosts: Collection[int]) -> None:
        if dead := [host for host in hosts if host in self._dead]:
            raise CommunicationError(
                f"host {dead[0]} is dead: {self._dead[dead[0]]}", ranks=tuple(dead),
                remedy="controller.rebind(slice) moves a slice to other hosts or restarts them",
            )  # fmt: skip

    def _sizes(self, program: TracedProgram) -> tuple[Counter[int], Counter[int]]:
        """Return bytes by host of a launch: at its peak, and of its outputs."""
        needs: Counter[int] = Counter()
        keeps: Counter[int] = Counter()
        if self._host_bytes is None:
            return needs, keeps
        for part, peak in program.peak_bytes().items():
            for host, count in part.binding or ():
                needs[host] += peak * count
        for value in set(program.outputs.values()):
            for host, count in value.on.binding or ():
                keeps[host] += value.shard_bytes * count
        host, need = max(needs.items(), key=lambda item: item[1])
        if need > self._host_bytes:
            raise InvalidArgumentError(
                "device_bytes", f"program '{program.name}' needs {format_bytes(need)} on host "
                f"{host}, which has {format_bytes(self._host_bytes)}",
                remedy="use more devices, or split the program",
            )  # fmt: skip
        return needs, keeps

    # The thread that sends launches.

    def _schedule(self) -> None:
        while not self._closed:
            with self._changed:
                if (request := self._next()) is None:
                    self._changed.wait(_POLL_S)
                    continue
                client, program = request.client, request.program
                request.charged = self._cost.get(program, 0.0) / client.weight
                client.time += request.charged
                request.pending = set(request.hosts)
                self._running[request.future.number] = request
                self._reserved.update(request.needs)
                self._changed.notify_all()
            self._dispatch(request)
            # The future may be collected once its launch has ended.
            del request

    def _next(self) -> LaunchRequest | None:
        self._free_forgotten()
        found = self._queue.take(self._admits)
        if found is None and not self._running:
            # Nothing will end, so only the user could free memory.
            for request in self._queue.remove(lambda r: r.has_inputs and not self._fits(r)):
                held = format_bytes(max(self._reserved.values(), default=0))
                request.future.end(InvalidArgumentError(
                    "device_bytes", f"program '{request.program.name}' does not fit next to {held} "
                    "of outputs of earlier launches",
                    remedy="release futures that are not needed, or raise device_bytes",
                ))  # fmt: skip
        return found

    def _admits(self, request: LaunchRequest) -> bool:
        loads = Counter(host for running in self._running.values() for host in running.pending)
        free = all(loads[host] < self._depth for host in request.hosts)
        return free and request.has_inputs and self._fits(request)

    def _fits(self, request: LaunchRequest) -> bool:
        limit = self._host_bytes
        return limit is None or all(
            self._reserved[host] + need <= limit for host, need in request.needs.items()
        )

    def _dispatch(self, request: LaunchRequest) -> None:
        program, future = request.program, request.future
        self._install(program)
        for host in request.hosts:
            items, payload = request.message(host)
            with self._changed:
                frees, self._frees[host] = self._frees[host], []
            self._send(host, {
                "do": "launch", "launch": future.number, "program": self._numbers[program],
                "tag": self._tag, "inputs": items, "free": frees, "trace": request.traced,
            }, payload)  # fmt: skip
        self._tag += program.transfers
        future.sent = True
        request.inputs.clear()

    def _install(self, program: TracedProgram) -> None:
        """Send a program to its hosts, unless they have it with the same binding."""
        hosts, lives = program.hosts, [self._lives[host] for host in program.hosts]
        state = hosts, lives, [part.binding for part in program.slices]
        if self._installed.get(program) == state:
            return
        self._installed[program] = state
        message = {
            "do": "install", "program": self._numbers.setdefault(program, len(self._numbers)),
            "spec": program.to_json(), "hosts": hosts,
            "group": "-".join(f"{h}.{life}" for h, life in zip(hosts, lives, strict=True)),
        }  # fmt: skip
        for host in hosts:
            self._send(host, message)

    def _send(self, host: int, message: Message, payload: bytes = b"") -> None:
        self.messages[f"{message['do']} sent"] += 1
        if host not in self._dead:
            self._engine.send(host, message, payload)

    # Outputs on devices.

    def _fetch(self, output: KeptValue, timeout_s: float | None = None) -> torch.Tensor:
        number, future, value = next(self._fetches), output.future, output.value
        until = None if timeout_s is None else time.monotonic() + timeout_s
        replicated = value.sharding.kind == "replicated"
        hosts = set(future.binding[value.on][:1] if replicated else future.binding[value.on])
        with self._changed:
            fetch = {"do": "fetch", "fetch": number, "output": output.key, "first": replicated}
            for host in hosts:
                self._send(host, fetch)
            while any((number, host) not in self._fetched for host in hosts):
                self._need_alive(hosts)
                if self._closed or (until is not None and time.monotonic() > until):
                    raise CommunicationError(
                        f"output '{output.name}' of launch {future.number} did not arrive",
                        ranks=tuple(hosts), remedy="raise timeout_s",
                    )  # fmt: skip
                self._changed.wait(_POLL_S)
            answers = [self._fetched.pop((number, host)) for host in sorted(hosts)]
        parts: list[torch.Tensor] = []
        for message, payload in answers:
            size = value.shard_bytes
            for at in range(message["parts"]):
                data = payload[at * size : (at + 1) * size]
                parts.append(from_bytes(data, value.shard_shape, value.dtype))
        if not parts:
            raise CommunicationError(
                f"output '{output.name}' of launch {future.number} was lost with its host, or has "
                "no value on this engine",
                ranks=tuple(hosts), remedy="launch the program again",
            )  # fmt: skip
        if value.sharding.kind == "shard":
            return torch.cat(parts, value.sharding.dim)
        # Of a replicated value there is one part.
        return sum(parts[1:], parts[0])

    def _forget(self, future: LaunchFuture) -> None:
        """Free a launch's outputs on its hosts, with a later message."""
        with self._changed:
            self._forgotten.append(future)
            self._changed.notify_all()

    def _free_forgotten(self) -> None:
        for future in [self._forgotten.popleft() for _ in range(len(self._forgotten))]:
            if not future.done():
                self._forgotten.append(future)
            elif future.number in self._kept:
                self._reserved.subtract(self._kept.pop(future.number))
                self._free(future)
        for host, keys in self._frees.items():
            waits = self._host_bytes is not None or not self._running
            if keys and (waits or len(keys) >= _MANY_FREES):
                self._frees[host] = []
                self._send(host, {"do": "free", "free": keys})

    def _free(self, future: LaunchFuture) -> None:
        for name, value in future.program.outputs.items():
            for host in set(future.binding[value.on]):
                self._frees[host].append(f"{future.number}.{name}")

    # The thread that receives events.

    def _collect(self) -> None:
        while not self._closed:
            frames = self._engine.gather(_POLL_S)
            with self._changed:
                for host, frame in frames:
                    if isinstance(frame, ChildError):
                        self._lose(host, frame.what)
                    else:
                        self._handle(host, *frame)
                self._check_progress(time.monotonic())
                self._changed.notify_all()

    def _handle(self, host: int, message: Message, payload: bytes) -> None:
        event = message.pop("event")
        self.messages[f"{event} received"] += 1
        if event == "status":
            self._watch.answer(host, message, time.monotonic())
        elif event == "fetched":
            self._fetched[message["fetch"], host] = message, payload
        elif (request := self._running.get(message["launch"])) is None:
            return
        elif event == "failed":
            self._fail(host, request, message)
        else:
            request.future.busy_ns[host] = message["busy_ns"]
            request.future.spans[host] = [tuple(span) for span in message["spans"]]
            self.peak_bytes[host] = max(self.peak_bytes[host], message["peak_bytes"])
            self._finish(host, request)

    def _fail(self, host: int, request: LaunchRequest, message: Message) -> None:
        error = message["error"]
        if message["lost"]:
            # The end of the lost host, which has the cause, is about to be reported.
            request.problem = request.problem or CommunicationError(
                error["what"], ranks=tuple(message["lost"])
            )
            return
        request.problem = WorkloadError(
            f"node {message['node']} of '{request.program.name}' failed on host {host}: "
            f"{error['what']}",
            where=error["where"], remedy=error["remedy"],
        )  # fmt: skip
        request.future.end(request.problem)

    def _finish(self, host: int, request: LaunchRequest) -> None:
        """Count a host as done with a launch, and end the launch after the last one."""
        request.pending.discard(host)
        future, client = request.future, request.client
        if request.pending or future.number not in self._running:
            return
        del self._running[future.number]
        busy = float(sum(future.busy_ns.values()))
        self._cost[request.program] = busy
        client.time += busy / client.weight - request.charged
        self.busy_ns[client.name] += int(busy)
        self._reserved.subtract(request.needs)
        if request.problem is None:
            self._reserved.update(request.keeps)
            self._kept[future.number] = request.keeps
        else:
            # Hosts on which no node failed have kept their outputs.
            self._free(future)
        future.end(request.problem)

    def _lose(self, host: int, reason: str) -> None:
        """Mark a host as dead, and fail what needs it."""
        if host in self._dead:
            return
        self._dead[host] = reason
        running = [request for request in self._running.values() if host in request.hosts]
        waiting = self._queue.remove(lambda request: host in request.hosts)
        for request in [*running, *waiting]:
            request.problem = CommunicationError(
                f"host {host} died during launch {request.future.number} of "
                f"'{request.program.name}': {reason}",
                ranks=(host,), remedy="controller.rebind(slice), then launch again",
            )  # fmt: skip
            request.future.end(request.problem)
            self._finish(host, request)

    def _program_name(self, launch: int) -> str:
        return self._running[launch].program.name if launch in self._running else "?"

    def _check_progress(self, now: float) -> None:
        """Ask the hosts of old launches where they are; end those that will not continue."""
        for hosts, reason in list(self._watch.stuck(now)):
            self._engine.stop(hosts)
            for host in hosts:
                self._lose(host, reason)
        if now >= self._next_watch:
            self._next_watch = now + _STATUS_S
            old = [r for r in self._running.values() if now - r.since > _STATUS_S]
            pending = {host for request in old for host in request.pending} - self._dead.keys()
            for host in self._watch.ask(pending, now):
                self._send(host, {"do": "status"})
