"""Programs of compiled functions: traced once, with one node per logical computation."""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, overload

import torch

from slipstream.engines.controller.layout import PARTIAL, REPLICATED, Box, Shape, Sharding
from slipstream.errors import (
    InvalidArgumentError,
    UnknownNameError,
    UsageError,
    WorkloadError,
)
from slipstream.units import with_article

_program: ContextVar[TracedProgram | None] = ContextVar("program", default=None)
_reduce: ContextVar[Callable[[torch.Tensor], torch.Tensor] | None] = ContextVar(
    "reduce", default=None
)


@dataclass(eq=False)
class DeviceSlice:
    """Virtual devices, bound to devices of hosts when a program first needs them.

    Attributes:
        name: for tables and errors.
        devices: number of devices.
        binding: (host, number of devices) in order; None while it is unbound.
    """

    name: str
    devices: int
    binding: tuple[tuple[int, int], ...] | None = None

    @property
    def hosts(self) -> list[int]:
        """Host of each device."""
        return [host for host, count in self.binding or () for _ in range(count)]


@dataclass(frozen=True, eq=False)
class TracedValue:
    """A logical tensor of a program, whatever its number of shards.

    Attributes:
        program: the program that computes it.
        number: index in the program.
        shape: of the whole tensor.
        dtype: such as ``"float32"``.
        on: its slice.
        sharding: its layout on the slice.
    """

    program: TracedProgram = field(repr=False)
    number: int
    shape: Shape
    dtype: str
    on: DeviceSlice
    sharding: Sharding

    def __str__(self) -> str:
        return f"{list(self.shape)}, torch.{self.dtype}, {self.sharding} on {self.on.name}"

    @property
    def shard_shape(self) -> Shape:
        return self.sharding.shard_shape(self.shape, self.on.devices, "a tensor")

    def box(self, device: int) -> Box:
        """Return the part of a device, as slices of the whole tensor."""
        return self.sharding.box(self.shape, self.on.devices, device)

    @property
    def shard_bytes(self) -> int:
        """Bytes on one device."""
        itemsize: int = getattr(torch, self.dtype).itemsize
        return math.prod(self.shard_shape) * itemsize


@dataclass(frozen=True, eq=False)
class TracedNode:
    """A computation, or a transfer where the layouts of producer and consumer differ.

    Attributes:
        name: function's name, ``"sum"`` or ``"move"``.
        function: ``file.py:name`` of a computation; empty for transfers.
        arguments: values, or constants as JSON.
        constants: keyword arguments as JSON.
        outputs: values.
        on: slice that runs it; a move's target is the slice of its output.
        sums: (shape, dtype) of each `all_reduce` within the function.
    """

    kind: Literal["compute", "sum", "move"]
    name: str
    function: str
    arguments: tuple[Any, ...]
    constants: Mapping[str, Any]
    outputs: tuple[TracedValue, ...]
    on: DeviceSlice
    sums: tuple[tuple[Shape, str], ...] = ()

    @property
    def inputs(self) -> tuple[TracedValue, ...]:
        return tuple(value for value in self.arguments if isinstance(value, TracedValue))


class CompiledFunction:
    """A function whose shapes and layout are known before it runs; see `compiled`.

    Outside of a program, calling it runs it in this process.
    """

    def __init__(
        self, function: Callable[..., Any], inputs: Sequence[Sharding],
        out: Sharding | Sequence[Sharding], prepare: Callable[[], object] | None,
    ) -> None:  # fmt: skip
        self.function, self.inputs, self.prepare = function, tuple(inputs), prepare
        self.out = (out,) if isinstance(out, Sharding) else tuple(out)
        self.single = isinstance(out, Sharding)
        self.name = function.__name__
        self.__doc__ = function.__doc__

    def target(self) -> str:
        """Return ``file.py:name`` or ``module:name``, which hosts import.

        Raises:
            InvalidArgumentError: the function is not an attribute of a module.
        """
        module, name = self.function.__module__, self.function.__qualname__
        owner = sys.modules.get(module)
        if getattr(owner, name, None) is not self:
            raise InvalidArgumentError(
                "function", f"{name} is not defined at module level, so hosts cannot import it",
                where=inspect.getsourcefile(self.function),
                remedy="decorate a def at the top level of a file",
            )  # fmt: skip
        file = getattr(owner, "__file__", None)
        return (
            f"{Path(file).resolve()}:{name}" if file and "." not in module else f"{module}:{name}"
        )

    def __call__(self, *arguments: Any, on: DeviceSlice | None = None, **constants: Any) -> Any:
        """Add the function to the program that is being traced, and return its values.

        Args:
            arguments: values of the program, or numbers, strings and booleans.
            on: slice that runs it; by default that of the first value.
            constants: keyword arguments of the function, as JSON.

        Raises:
            InvalidArgumentError: an argument is not allowed, or a layout does not divide.
            WorkloadError: the function fails with tensors of the declared shapes.
        """
        program = _program.get()
        if program is None:
            return self.function(*arguments, **constants)
        return program.add(self, arguments, on, constants)


@overload
def compiled(function: Callable[..., Any]) -> CompiledFunction: ...


@overload
def compiled(
    *, inputs: Sequence[Sharding] = (), out: Sharding | Sequence[Sharding] = REPLICATED,
    prepare: Callable[[], object] | None = None,
) -> Callable[[Callable[..., Any]], CompiledFunction]: ...  # fmt: skip


def compiled(
    function: Callable[..., Any] | None = None, *, inputs: Sequence[Sharding] = (),
    out: Sharding | Sequence[Sharding] = REPLICATED, prepare: Callable[[], object] | None = None,
) -> Any:  # fmt: skip
    """Declare a function of tensors as a node of programs.

    Every device of the slice runs it on its parts. Shapes of results must follow from shapes of
    inputs: it is traced with tensors that have no data. Hosts import it from its file.

    Args:
        inputs: layout of each tensor argument; REPLICATED for the remaining ones.
        out: layout of the result, or of each result of a tuple.
        prepare: work on the host that does not need the inputs. It runs ahead, on another thread.
    """
    if function is None:
        return lambda inner: CompiledFunction(inner, inputs, out, prepare)
    return CompiledFunction(function, inputs, out, prepare)


def all_reduce(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of `tensor` over the devices of the slice, within a compiled function.

    The slice must have one device per host. Outside of a program, returns `tensor`.
    """
    reduce = _reduce.get()
    return tensor if reduce is None else reduce(tensor)


@contextlib.contextmanager
def reducing(reduce: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Let `all_reduce` call `reduce` in the block."""
    token = _reduce.set(reduce)
    try:
        yield
    finally:
        _reduce.reset(token)


class TracedProgram:
    """A graph of compiled functions on slices; the number of nodes does not depend on shards.

    Use as a context manager: functions that are called in the block are added, not run.

    Attributes:
        name: for tables and errors.
        values, nodes: in order of the calls; transfers are inserted before their consumers.
        inputs: name and value of each input.
        outputs: name and value of each output.
        examples: tensors with which an input is launched by default.
        carried: inputs that the previous launch computes; see `carry`.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.values: list[TracedValue] = []
        self.nodes: list[TracedNode] = []
        self.inputs: dict[str, TracedValue] = {}
        self.outputs: dict[str, TracedValue] = {}
        self.examples: dict[str, torch.Tensor] = {}
        self.carried: list[str] = []
        self._placed: dict[tuple[int, DeviceSlice, Sharding], TracedValue] = {}
        self._token: Any = None

    def __enter__(self) -> TracedProgram:
        if _program.get() is not None:
            raise UsageError(
                f"program '{self.name}' begins within another one",
                remedy="end the outer block first",
            )
        self._token = _program.set(self)
        return self

    def __exit__(self, *raised: object) -> None:
        _program.reset(self._token)

    def input(
        self, name: str, example: torch.Tensor, on: DeviceSlice, sharding: Sharding = REPLICATED
    ) -> TracedValue:
        """Declare an input with the shape and dtype of `example`, its default.

        Raises:
            InvalidArgumentError: the name is used, the layout does not divide or is partial, or the
                tensor is not dense and on the CPU.
        """
        self._need_new(name, self.inputs)
        need_dense(name, example)
        if sharding == PARTIAL:
            raise InvalidArgumentError("sharding", f"input '{name}' cannot be partial")
        sharding.shard_shape(tuple(example.shape), on.devices, f"input '{name}'")
        self.examples[name] = example.detach()
        self.inputs[name] = self._value(tuple(example.shape), example.dtype, on, sharding)
        return self.inputs[name]

    def output(self, name: str, value: TracedValue) -> None:
        """Keep `value` after a launch, under `name`.

        Raises:
            InvalidArgumentError: the name is used, or the value is not of this program.
        """
        self._need_new(name, self.outputs)
        self._need_own(value)
        self.outputs[name] = value

    def carry(self, name: str, value: TracedValue) -> None:
        """Keep `value` as the input `name` of the next launch; see `LaunchFuture.carried`.

        Raises:
            UnknownNameError: the program has no such input.
            InvalidArgumentError: the value has another shape, dtype, slice or layout.
        """
        if name not in self.inputs:
            raise UnknownNameError("input", name, self.inputs, where=self.name)
        into = self.inputs[name]
        if str(value) != str(into) or value.on is not into.on:
            raise InvalidArgumentError("value", f"it is {value}, unlike input '{name}', {into}")
        self.output(name, value)
        self.carried.append(name)

    @property
    def slices(self) -> list[DeviceSlice]:
        return list(dict.fromkeys(value.on for value in self.values))

    @property
    def hosts(self) -> list[int]:
        """Hosts of all slices, in ascending order; empty while they are unbound."""
        return sorted({host for part in self.slices for host, _ in part.binding or ()})

    @property
    def transfers(self) -> int:
        """Number of nodes that may communicate, plus sums within functions."""
        return sum(1 + len(node.sums) for node in self.nodes)

    def need_nodes(self) -> None:
        """Raise a `UsageError` if the program is empty."""
        if not self.nodes:
            raise UsageError(
                f"program '{self.name}' is empty",
                remedy="call compiled functions in its with block",
            )

    def releases(self) -> list[list[int]]:
        """Return, for each node, the values that nothing needs after it."""
        last: dict[int, int] = {}
        for at, node in enumerate(self.nodes):
            last |= {value.number: at for value in (*node.outputs, *node.inputs)}
        outputs = {value.number for value in self.outputs.values()}
        freed: list[list[int]] = [[] for _ in self.nodes]
        for number, at in last.items():
            if number not in outputs:
                freed[at].append(number)
        return freed

    def peak_bytes(self) -> dict[DeviceSlice, int]:
        """Return the peak of values that one device of each slice holds."""
        live = dict.fromkeys(self.slices, 0)
        for value in self.inputs.values():
            live[value.on] += value.shard_bytes
        peak = dict(live)
        for node, freed in zip(self.nodes, self.releases(), strict=True):
            for value in node.outputs:
                live[value.on] += value.shard_bytes
                peak[value.on] = max(peak[value.on], live[value.on])
            for number in freed:
                live[self.values[number].on] -= self.values[number].shard_bytes
        return peak

    def to_json(self) -> dict[str, Any]:
        """Return the program with its slices' bindings, as JSON for hosts."""
        slices = self.slices
        index = {part: number for number, part in enumerate(slices)}
        return {
            "name": self.name,
            "slices": [part.binding for part in slices],
            "values": [
                [value.shape, value.dtype, index[value.on], value.sharding.kind, value.sharding.dim]
                for value in self.values
            ],
            "nodes": [
                {
                    "kind": node.kind, "name": node.name, "function": node.function,
                    "arguments": [
                        {"value": item.number} if isinstance(item, TracedValue)
                        else {"constant": item}
                        for item in node.arguments
                    ],
                    "constants": node.constants, "sums": node.sums, "slice": index[node.on],
                    "outputs": [value.number for value in node.outputs],
                }
                for node in self.nodes
            ],
            "outputs": {name: value.number for name, value in self.outputs.items()},
        }  # fmt: skip

    @classmethod
    def from_json(cls, spec: Mapping[str, Any]) -> TracedProgram:
        """Return the program of `to_json`, as hosts run it: without names of its inputs."""
        program = cls(spec["name"])
        slices = [
            DeviceSlice(str(number), sum(count for _, count in binding), binding)
            for number, binding in enumerate(spec["slices"])
        ]
        values = program.values
        for shape, dtype, at, kind, dim in spec["values"]:
            program._value(tuple(shape), dtype, slices[at], Sharding(kind, dim))
        for node in spec["nodes"]:
            arguments = tuple(
                values[item["value"]] if "value" in item else item["constant"]
                for item in node["arguments"]
            )
            outputs = tuple(values[number] for number in node["outputs"])
            sums = tuple((tuple(shape), dtype) for shape, dtype in node["sums"])
            program.nodes.append(TracedNode(
                node["kind"], node["name"], node["function"], arguments, node["constants"], outputs,
                slices[node["slice"]], sums,
            ))  # fmt: skip
        program.outputs = {name: values[number] for name, number in spec["outputs"].items()}
        return program

    def add(
        self, function: CompiledFunction, arguments: Sequence[Any], on: DeviceSlice | None,
        constants: Mapping[str, Any],
    ) -> Any:  # fmt: skip
        """Add a call, and transfers of its inputs if needed; see `CompiledFunction.__call__`."""
        where = f"{function.name} in program '{self.name}'"
        first = next((value.on for value in arguments if isinstance(value, TracedValue)), None)
        slice_ = on or first
        if slice_ is None:
            raise InvalidArgumentError("on", "the function has no inputs", where=where,
                                       remedy="pass on=SLICE")  # fmt: skip
        layouts = iter((*function.inputs, *[REPLICATED] * len(arguments)))
        placed = [
            self._moved(value, slice_, next(layouts), where)
            if isinstance(value, TracedValue) else _need_constant(value, where)
            for value in arguments
        ]  # fmt: skip
        for value in constants.values():
            _need_constant(value, where)
        target = function.target()
        found, sums = _run_without_data(function, placed, constants, where)
        outputs = []
        for number, (tensor, sharding) in enumerate(zip(found, function.out, strict=True)):
            what = f"result {number} of {where}"
            shape = sharding.full_shape(tuple(tensor.shape), slice_.devices, what)
            outputs.append(self._value(shape, tensor.dtype, slice_, sharding))
        self.nodes.append(
            TracedNode("compute", function.name, target, tuple(placed), dict(constants),
                       tuple(outputs), slice_, sums)
        )  # fmt: skip
        return outputs[0] if function.single else tuple(outputs)

    def _value(
        self, shape: Shape, dtype: torch.dtype | str, on: DeviceSlice, sharding: Sharding
    ) -> TracedValue:
        text = str(dtype).removeprefix("torch.")
        value = TracedValue(self, len(self.values), shape, text, on, sharding)
        self.values.append(value)
        return value

    def _moved(
        self, value: TracedValue, on: DeviceSlice, sharding: Sharding, where: str
    ) -> TracedValue:
        """Return `value` on a slice with a layout, by a transfer if it is elsewhere."""
        self._need_own(value)
        if value.on is on and value.sharding == sharding:
            return value
        key = value.number, on, sharding
        if key in self._placed:
            return self._placed[key]
        if sharding == PARTIAL:
            raise InvalidArgumentError("inputs", f"a tensor that is {value.sharding} cannot become "
                                       "partial", where=where)  # fmt: skip
        if value.sharding == PARTIAL:
            whole = self._value(value.shape, value.dtype, value.on, REPLICATED)
            self.nodes.append(TracedNode("sum", "sum", "", (value,), {}, (whole,), value.on))
            found = self._moved(whole, on, sharding, where)
        else:
            sharding.shard_shape(value.shape, on.devices, f"an input of {where}")
            found = self._value(value.shape, value.dtype, on, sharding)
            self.nodes.append(TracedNode("move", "move", "", (value,), {}, (found,), value.on))
        self._placed[key] = found
        return found

    def _need_own(self, value: Any) -> None:
        if not isinstance(value, TracedValue) or value.program is not self:
            raise InvalidArgumentError(
                "value", f"it is not a value of program '{self.name}'",
                remedy="pass values of this program; pass others as inputs of a launch",
            )  # fmt: skip

    def _need_new(self, name: str, names: Mapping[str, Any]) -> None:
        if name in names:
            raise InvalidArgumentError("name", f"'{name}' is used twice in '{self.name}'")


def need_dense(name: str, tensor: Any) -> None:
    """Raise an `InvalidArgumentError` unless input `name` is a dense tensor on the CPU."""
    if not isinstance(tensor, torch.Tensor):
        raise InvalidArgumentError(
            name, f"it is {with_article(type(tensor).__name__)}, not a tensor"
        )
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        raise InvalidArgumentError(
            name, f"it is a {str(tensor.layout).removeprefix('torch.')} tensor on {tensor.device}",
            remedy="pass a dense tensor on the CPU, for example x.to_dense().cpu()",
        )  # fmt: skip


def _need_constant(value: Any, where: str) -> Any:
    if isinstance(value, torch.Tensor):
        raise InvalidArgumentError(
            "arguments", "a tensor is not a value of the program", where=where,
            remedy="declare it with program.input(name, tensor, slice)",
        )  # fmt: skip
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        raise InvalidArgumentError(
            "arguments", f"{type(value).__name__} cannot be sent to hosts", where=where,
            remedy="pass numbers, strings, booleans or lists of these",
        ) from None  # fmt: skip
    return value


def _run_without_data(
    function: CompiledFunction, arguments: Sequence[Any], constants: Mapping[str, Any], where: str
) -> tuple[tuple[torch.Tensor, ...], tuple[tuple[Shape, str], ...]]:
    """Return one device's results as tensors without data, and the sums within the function."""
    from torch._subclasses.fake_tensor import DataDependentOutputException as NeedsData
    from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicShape
    from torch._subclasses.fake_tensor import FakeTensorMode

    sums: list[tuple[Shape, str]] = []

    def record(tensor: torch.Tensor) -> torch.Tensor:
        sums.append((tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")))
        return tensor.clone()

    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        with FakeTensorMode(), reducing(record):
            parts = [
                torch.empty(value.shard_shape, dtype=getattr(torch, value.dtype))
                if isinstance(value, TracedValue) else value
                for value in arguments
            ]  # fmt: skip
            found = function.function(*parts, **constants)
    except (NeedsData, DynamicShape) as error:
        raise WorkloadError(
            f"a shape or branch of {where} depends on values of tensors ({error})",
            where=inspect.getsourcefile(function.function),
            remedy="return a tensor of fixed shape, for example padded to a bound",
        ) from error
    except Exception as error:
        raise WorkloadError(
            f"{where} failed with tensors of its shapes: {type(error).__name__}: {error}",
            where=inspect.getsourcefile(function.function),
        ) from error
    finally:
        log.setLevel(level)
    results = (found,) if function.single else found
    tensors = isinstance(results, (tuple, list)) and all(
        isinstance(tensor, torch.Tensor) for tensor in results
    )
    if not tensors or len(results) != len(function.out):
        raise WorkloadError(
            f"{where} must return {len(function.out)} tensor(s), one per layout in out=",
            where=inspect.getsourcefile(function.function),
        )
    return tuple(results), tuple(sums)
