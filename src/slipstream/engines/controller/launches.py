"""Launches of programs: their inputs, outputs and errors."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from slipstream.engines.controller.host import Message, to_bytes
from slipstream.engines.controller.scheduling import QueuedClient
from slipstream.engines.controller.tracing import TracedProgram, TracedValue, need_dense
from slipstream.errors import (
    CommunicationError,
    InvalidArgumentError,
    SlipstreamError,
    UnknownNameError,
    UsageError,
)


@dataclass(frozen=True, eq=False)
class KeptValue:
    """An output that stays on its devices, to be an input of another launch."""

    future: LaunchFuture
    name: str

    @property
    def value(self) -> TracedValue:
        return self.future.program.outputs[self.name]

    @property
    def key(self) -> str:
        return f"{self.future.number}.{self.name}"


Input = torch.Tensor | KeptValue


class LaunchFuture:
    """The outputs of one launch. They stay on the devices until this object is released.

    Attributes:
        program, number: the launched program, and the number of the launch.
        sent: whether the hosts were sent the launch.
        busy_ns: time for which each host ran it, once it has ended.
        spans: by host, (node, start, end) in ns of the machine's clock, if requested.
        binding: host of each device, by slice.
    """

    def __init__(
        self, program: TracedProgram, number: int,
        fetch: Callable[[KeptValue, float | None], torch.Tensor],
        forget: Callable[[LaunchFuture], None],
    ) -> None:  # fmt: skip
        self.program, self.number, self._fetch, self._forget = program, number, fetch, forget
        self.sent = self.released = False
        self.busy_ns: dict[int, int] = {}
        self.spans: dict[int, list[tuple[int, int, int]]] = {}
        self.binding = {part: part.hosts for part in program.slices}
        self._error: SlipstreamError | None = None
        self._ended = threading.Event()

    def done(self) -> bool:
        """Whether the launch has ended or failed."""
        return self._ended.is_set()

    def end(self, error: SlipstreamError | None = None) -> None:
        """Set the outcome; the first one counts."""
        if not self._ended.is_set():
            self._error = error
            self._ended.set()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the end of the launch.

        Raises:
            CommunicationError: a host died or is deadlocked, or `timeout_s` passed; names hosts.
            WorkloadError: a function failed; names function and host.
        """
        if not self._ended.wait(timeout_s):
            raise CommunicationError(
                f"launch {self.number} of '{self.program.name}' did not end within {timeout_s:g} s",
                ranks=tuple(self.program.hosts),
                remedy="raise timeout_s, or check its functions for an endless loop",
            )
        if self._error is not None:
            raise self._error

    def output(self, name: str) -> KeptValue:
        """Return an output, on its devices; also before the launch has ended.

        Raises:
            UnknownNameError: the program has no such output.
            UsageError: the outputs were released.
        """
        if name not in self.program.outputs:
            raise UnknownNameError("output", name, self.program.outputs)
        if self.released:
            raise UsageError(
                f"the outputs of launch {self.number} of '{self.program.name}' were released",
                remedy="use them before release()",
            )
        return KeptValue(self, name)

    def carried(self) -> dict[str, Input]:
        """Return the inputs of the next launch that this one computes; see `carry`."""
        return {name: self.output(name) for name in self.program.carried}

    def result(self, name: str | None = None, timeout_s: float | None = None) -> torch.Tensor:
        """Return an output, by default the first, as one tensor of this process.

        Raises:
            SlipstreamError: as for `wait` and `output`.
        """
        output = self.output(next(iter(self.program.outputs), "") if name is None else name)
        self.wait(timeout_s)
        return self._fetch(output, timeout_s)

    def release(self) -> None:
        """Free the outputs on the devices."""
        if not self.released:
            self.released = True
            self._forget(self)

    def __del__(self) -> None:
        self.release()


@dataclass(eq=False)
class LaunchRequest:
    """A launch from its call until all hosts have ended it.

    Attributes:
        hosts: hosts that it occupies.
        needs, keeps: by host, bytes of values at the peak, and of outputs.
        pending: hosts that have not ended it.
        charged: device time that the client was charged in advance.
    """

    future: LaunchFuture
    hosts: list[int]
    inputs: dict[str, Input]
    client: QueuedClient[LaunchRequest]
    needs: Mapping[int, int]
    keeps: Mapping[int, int]
    traced: bool
    since: float = field(default_factory=time.monotonic)
    pending: set[int] = field(default_factory=set)
    charged: float = 0.0
    problem: SlipstreamError | None = None

    @property
    def program(self) -> TracedProgram:
        return self.future.program

    @property
    def has_inputs(self) -> bool:
        """Whether the launches of its inputs were sent, so that this one may be."""
        earlier = (item.future for item in self.inputs.values() if isinstance(item, KeptValue))
        return all(future.sent or future.done() for future in earlier)

    def message(self, host: int) -> tuple[list[Message], bytes]:
        """Return the inputs for one host, and the bytes of its parts."""
        items: list[Message] = []
        payload = bytearray()
        for name, value in self.program.inputs.items():
            devices = [device for device, other in enumerate(value.on.hosts) if other == host]
            item = self.inputs[name]
            if isinstance(item, KeptValue):
                items += [{"value": value.number, "kept": item.key}] * bool(devices)
                continue
            items += [{"value": value.number, "bytes": value.shard_bytes}] * bool(devices)
            # A replicated input is sent once per host.
            for device in devices[:1] if value.sharding.kind == "replicated" else devices:
                payload += to_bytes(item[value.box(device)])
        return items, bytes(payload)


def check_inputs(program: TracedProgram, inputs: Mapping[str, Any]) -> None:
    """Check that tensors and outputs of other launches fit the inputs of a program.

    Raises:
        UnknownNameError: the program has no such input.
        InvalidArgumentError: one has another shape, dtype, slice or layout, or is not dense and on
            the CPU.
        UsageError: one was released.
    """
    for name, item in inputs.items():
        if name not in program.inputs:
            raise UnknownNameError("input", name, program.inputs, where=program.name)
        value = program.inputs[name]
        expected, found, same = f"{list(value.shape)}, torch.{value.dtype}", "", True
        if isinstance(item, KeptValue):
            other = item.future.output(item.name).value
            expected, found, same = str(value), str(other), other.on is value.on
        elif isinstance(item, torch.Tensor):
            need_dense(name, item)
            found = f"{list(item.shape)}, {item.dtype}"
        else:
            found = f"a {type(item).__name__}"
        if found != expected or not same:
            raise InvalidArgumentError(
                name, f"it is {found}, not {expected}",
                remedy="pass a value like the one that the program was traced with",
            )  # fmt: skip
