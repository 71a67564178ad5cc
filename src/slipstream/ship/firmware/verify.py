"""Compare the output bytes of firmware with those of another runtime."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.errors import MissingExtraError, UnknownNameError
from slipstream.runtimes.taps import LiteRTTap
from slipstream.ship.firmware.build import FirmwareRun, ImageSize, run_emulated, run_here
from slipstream.ship.firmware.firmware import FirmwareFolder
from slipstream.ship.firmware.interface import Interface
from slipstream.ship.firmware.network import Array
from slipstream.tables import Field, Table

Sets = Sequence[Sequence[Array]]

# Arena of runtimes that require a size.
_ARENA_BYTES = 8 << 20


@dataclass(frozen=True)
class Place:
    """A target that firmware ran on, and the comparison of its outputs.

    Attributes:
        name: name of the target.
        differing: number of output bytes that differ from the other runtime's.
        compared: number of output bytes.
        first: (set of inputs, output, index) of the first difference; None if there is none.
        instructions: maximum of an inference; 0 if not counted.
        ram: bytes of arena, variables and stack; 0 if the stack is not measured.
        size: size of the image; None if none was linked.
    """

    name: str
    differing: int
    compared: int
    first: tuple[int, int, int] | None
    instructions: int = 0
    ram: int = 0
    size: ImageSize | None = None

    def to_json(self) -> dict[str, Any]:
        """Return all fields."""
        return {
            "target": self.name, "differing": self.differing, "compared": self.compared,
            "first": self.first, "instructions": self.instructions or None,
            "ram_bytes": self.ram or None,
            "flash_bytes": self.size.flash if self.size else None,
            "code_bytes": self.size.code if self.size else None,
        }  # fmt: skip


@dataclass(frozen=True)
class VerificationResult:
    """Result of `verify_firmware`."""

    model: str
    against: str
    sets: int
    places: tuple[Place, ...]

    @property
    def equal(self) -> bool:
        """Whether all bytes are equal."""
        return all(place.differing == 0 for place in self.places)

    def to_json(self) -> dict[str, Any]:
        """Return all fields."""
        places = [place.to_json() for place in self.places]
        return {
            "model": self.model, "against": self.against, "inputs": self.sets,
            "equal": self.equal, "places": places,
        }  # fmt: skip

    def tables(self) -> list[Table]:
        """Return a table with a row per target."""

        def number(value: int) -> str:
            return f"{value:,}" if value else "-"

        fields: list[Field[Place]] = [
            Field.of("ran on", lambda place: place.name),
            Field.number("bytes compared", lambda place: f"{place.compared:,}"),
            Field.number("differing", lambda place: f"{place.differing:,}"),
            Field.number("instructions", lambda place: number(place.instructions)),
            Field.number("RAM", lambda place: number(place.ram)),
            Field.number("flash", lambda place: number(place.size.flash if place.size else 0)),
        ]
        notes = [f"{self.sets} inputs, compared with {self.against}"]
        if any(place.instructions for place in self.places):
            notes.append("instructions of an emulated processor, not cycles")
        notes += [
            f"{place.name}: first difference at input {place.first[0]}, output {place.first[1]}, "
            f"element {place.first[2]}"
            for place in self.places
            if place.first
        ]
        return [Table.of(self.places, fields, self.model, notes)]


def verify_firmware(
    exported: FirmwareFolder, *, against: str = "tflite-micro", sets: int = 20, seed: int = 0,
    inputs: Sets | None = None, emulate: bool | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> VerificationResult:  # fmt: skip
    """Compile firmware, run it on inputs (random by default), and compare every output byte.

    Args:
        against: ``tflite-micro`` or ``litert`` (reference kernels).
        sets: number of sets of random inputs.
        seed: seed of the random inputs.
        inputs: sets to run instead: an int8 array per input of the model.
        emulate: whether to run on the target's emulated board, too; None if the target has one.

    Raises:
        ToolchainError: a compiler or the emulator is missing.
        MissingExtraError: the other runtime is not installed.
    """
    interface = exported.interface
    inputs = random_inputs(interface, sets, seed) if inputs is None else inputs
    report(f"running {against}")
    expected = reference_outputs(exported.model, interface, inputs, against)
    places = []
    with tempfile.TemporaryDirectory() as folder:
        report("running on this machine")
        host = run_here(exported.sources, interface, inputs, Path(folder))
        places.append(_compare("host", interface, expected, host))
        if exported.target.board and emulate is not False:
            report(f"running on the emulated {exported.target.name}")
            emulated = run_emulated(
                exported.sources, interface, inputs, Path(folder), exported.target
            )
            places.append(_compare(exported.target.name, interface, expected, emulated))
    return VerificationResult(interface.name, against, len(inputs), tuple(places))


def reference_outputs(
    model: bytes, interface: Interface, inputs: Sets, against: str = "tflite-micro"
) -> Sets:
    """Return outputs of another runtime for sets of inputs: an int8 array per output of the model.

    Raises:
        UnknownNameError: there is no such runtime.
        MissingExtraError: it is not installed.
    """
    if against not in _RUNTIMES:
        raise UnknownNameError("runtime", against, _RUNTIMES)
    return _RUNTIMES[against](model, inputs, len(interface.outputs))


def random_inputs(interface: Interface, sets: int, seed: int = 0) -> list[list[Array]]:
    """Return sets of inputs with uniformly distributed codes."""
    rng = np.random.default_rng(seed)
    return [
        [rng.integers(-128, 128, port.shape).astype(np.int8) for port in interface.inputs]
        for _ in range(sets)
    ]


def _compare(name: str, interface: Interface, expected: Sets, ran: FirmwareRun) -> Place:
    differing = compared = 0
    first = None
    for number, (references, outputs) in enumerate(zip(expected, ran.outputs, strict=True)):
        for output, (a, b) in enumerate(zip(references, outputs, strict=True)):
            places = np.flatnonzero(a.reshape(-1) != b.reshape(-1))
            compared += a.size
            differing += len(places)
            if len(places) and first is None:
                first = (number, output, int(places[0]))
    ram = interface.arena_bytes + ran.stack + ran.size.ram if ran.size else 0
    return Place(name, differing, compared, first, max(ran.instructions, default=0), ram, ran.size)


def _tflite_micro(model: bytes, inputs: Sets, outputs: int) -> Sets:
    try:
        from tflite_micro import runtime
    except ImportError as error:
        raise MissingExtraError("verification", "tflite-micro", "edge") from error
    interpreter = runtime.Interpreter.from_bytes(model, arena_size=_ARENA_BYTES)
    answers = []
    for arrays in inputs:
        for number, values in enumerate(arrays):
            interpreter.set_input(values, number)
        interpreter.invoke()
        answers.append([interpreter.get_output(number).copy() for number in range(outputs)])
    return answers


def _litert(model: bytes, inputs: Sets, outputs: int) -> Sets:
    tap = LiteRTTap(model, reference=True)
    return [tap.plain(arrays)[:outputs] for arrays in inputs]


_RUNTIMES: dict[str, Callable[[bytes, Sets, int], Sets]] = {
    "tflite-micro": _tflite_micro,
    "litert": _litert,
}
