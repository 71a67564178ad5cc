"""The interpreter equals tflite-micro on a model in flash, and refuses invalid files."""

from __future__ import annotations

import ctypes
import struct
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from models import MICRO_SPEECH, PERSON_DETECT, mutants, need_emulator, need_runtimes
from random_networks import RandomNetwork

from slipstream.errors import UnknownNameError
from slipstream.ship.export import write_network
from slipstream.ship.firmware import (
    Firmware,
    emit,
    export_firmware,
    random_inputs,
    read_firmware,
    run_emulated,
    verify_firmware,
)

Require = Callable[[str, bool, str], None]
STATUS = ("ok", "no model", "no plan", "bad plan", "no kernel", "no arena")
SANITIZERS = ("-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
# Reads models as length and bytes; each, and its arena, is in an allocation of exactly its size.
MAIN = """
#include <stdio.h>
#include <stdlib.h>
#include "model.h"
extern const slip_kernel kernels[SLIP_KERNELS];
int main(void) {
  uint32_t bytes;
  while (fread(&bytes, 4, 1, stdin) == 1) {
    uint8_t *file = malloc(bytes); /* aligned to 16, without a spare byte */
    slip_model model;
    if (fread(file, 1, bytes, stdin) != bytes) return 9;
    slip_status status = slip_open(&model, file, bytes, kernels);
    if (!status && model.arena_bytes <= 1 << 20) {
      uint8_t *arena = malloc(model.arena_bytes);
      memset(arena, 0x5A, model.arena_bytes);
      if (model.arena_bytes && slip_invoke(&model, arena, model.arena_bytes - 1) != SLIP_NO_ARENA) {
        return 8;
      }
      status = slip_invoke(&model, arena, model.arena_bytes);
      free(arena);
    }
    printf("%d\\n", status);
    free(file);
  }
  return 0;
}
"""


def interpreted(data: bytes | Path, device: str = "cortex-m4") -> Firmware:
    """Return firmware with the interpreter."""
    return export_firmware(data, name="model", device=device, backend="interpreter")


@pytest.mark.parametrize(("depth", "copied"), [(64, 0), (62, 12 * 64)])
def test_weights_are_copied_only_if_their_rows_are_padded(
    depth: int, copied: int, tmp_path: Path, require: Require
) -> None:
    need_runtimes(require)
    random = RandomNetwork(3)
    x = random.input((2, depth))
    w, b, grid = random.weights((10, depth), 0, x, depth=depth)
    random.step("fully_connected", (x, w, b), (2, 10), grid, activation="none", weights_format=0)
    firmware = interpreted(write_network(random.network(0)))
    # Ten channels fill three groups of four, whose biases and pairs of rescaling are 12 bytes each.
    assert f"holds {copied + 12 * 12:,} B" in firmware.tables()[0].notes[-1]
    firmware.write(tmp_path)
    assert verify_firmware(read_firmware(tmp_path), sets=5, emulate=False).equal


@pytest.mark.parametrize("name", [PERSON_DETECT, MICRO_SPEECH])
def test_a_model_in_flash_equals_tflite_micro(
    name: str, shared_data: Path, tmp_path: Path, require: Require
) -> None:
    need_runtimes(require)
    firmware = interpreted(shared_data / name)
    firmware.write(tmp_path)
    written = read_firmware(tmp_path)
    assert verify_firmware(written, sets=5, emulate=False).equal
    # Most of the model is read in place: the plan takes less than a fifth of its size.
    assert len(firmware.model) < 1.2 * (shared_data / name).stat().st_size + 2000
    # The file with the plan is still a valid model.
    from tflite_micro import runtime

    (inputs,) = random_inputs(firmware.interface, 1)
    outputs = []
    for data in (written.model, (shared_data / name).read_bytes()):
        interpreter = runtime.Interpreter.from_bytes(data, arena_size=1 << 20)
        interpreter.set_input(inputs[0], 0)
        interpreter.invoke()
        outputs.append(interpreter.get_output(0).tobytes())
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("device", ["cortex-m4", "cortex-m55"])
def test_interprets_random_operators(device: str, tmp_path: Path, require: Require) -> None:
    need_runtimes(require)
    interpreted(write_network(RandomNetwork(3).network(24)), device).write(tmp_path)
    found = verify_firmware(read_firmware(tmp_path), sets=4, emulate=False)
    assert found.equal, found.places[0].first


@pytest.mark.parametrize("device", ["cortex-m4", "cortex-m55"])
def test_a_step_costs_at_most_sixty_more_instructions(
    device: str, shared_data: Path, tmp_path: Path, require: Require
) -> None:
    need_emulator(require)
    firmware = interpreted(shared_data / MICRO_SPEECH, device)
    inputs = random_inputs(firmware.interface, 1)
    # Straight-line calls of the same kernels.
    straight = emit(firmware.program, firmware.arena)
    plain, ours = (
        run_emulated(sources, firmware.interface, inputs, tmp_path / str(number), firmware.target)
        for number, sources in enumerate((straight, firmware.sources))
    )
    assert [a.tobytes() for a in plain.outputs[0]] == [b.tobytes() for b in ours.outputs[0]]
    more = ours.instructions[0] - plain.instructions[0]
    assert 0 < more <= 60 * len(firmware.program.steps)
    assert plain.size is not None
    assert ours.size is not None
    # Only the open model is stored, and the core is small.
    assert ours.size.ram - plain.size.ram <= 40
    assert ours.size.allocators == ()
    assert ours.size.code - plain.size.code <= 6 * 1024


def program(folder: Path, firmware: Firmware) -> Path:
    """Build a program that reads models and prints the status of each, with sanitizers."""
    sources = {**firmware.sources, "main.c": MAIN}
    sources["model.c"] = sources["model.c"].replace("static const slip_kernel", "const slip_kernel")
    for name, text in sources.items():
        (folder / name).write_text(text)
    paths = [str(path) for path in folder.glob("*.c")]
    out = folder / "program"
    subprocess.run(["gcc", "-std=c11", "-O1", *SANITIZERS, "-o", str(out), *paths], check=True)
    return out


def statuses(program: Path, models: list[bytes]) -> list[str]:
    """Return the interpreter's status for each model."""
    stdin = b"".join(struct.pack("<I", len(model)) + model for model in models)
    ran = subprocess.run([str(program)], input=stdin, capture_output=True, check=False, timeout=500)
    assert (ran.returncode, ran.stderr[:2000]) == (0, b"")
    return [STATUS[int(line)] for line in ran.stdout.split()]


def hostile(folder: Path, count: int, seed: int) -> Counter[str]:
    firmware = interpreted(write_network(RandomNetwork(4).network(16)))
    ours = program(folder, firmware)
    assert statuses(ours, [firmware.model]) == ["ok"]
    # Mostly in tables and plan.
    plan = firmware.model.index(b"SLP1")
    regions = ((0, 600), (plan, 1500), (plan, 200), (0, len(firmware.model)))
    found = statuses(ours, list(mutants(firmware.model, count, seed, regions)))
    assert len(found) == count
    return Counter(found)


def test_hostile_models_are_refused_or_stay_within_their_memory(
    tmp_path: Path, require: Require
) -> None:
    need_runtimes(require)
    found = hostile(tmp_path, 160, 0)
    assert {"no model", "bad plan", "ok"} <= set(found)


@pytest.mark.full
def test_thousands_of_hostile_models(tmp_path: Path, require: Require) -> None:
    need_runtimes(require)
    assert len(hostile(tmp_path, 4000, 1)) >= 5


def test_refuses_misaligned_arenas_and_missing_kernels(tmp_path: Path, require: Require) -> None:
    need_runtimes(require)
    firmware = interpreted(write_network(RandomNetwork(5).network(6)))
    for name, text in firmware.sources.items():
        (tmp_path / name).write_text(text)
    library = tmp_path / "model.so"
    sources = [str(path) for path in tmp_path.glob("*.c")]
    subprocess.run(["gcc", "-O1", "-shared", "-fPIC", "-o", str(library), *sources], check=True)
    code = ctypes.CDLL(str(library))
    memory = ctypes.create_string_buffer(firmware.arena.size + 32)
    start = ctypes.addressof(memory) + -ctypes.addressof(memory) % 16
    assert code.model_invoke(ctypes.c_void_p(start)) == STATUS.index("ok")
    assert code.model_invoke(ctypes.c_void_p(start + 4)) == STATUS.index("no arena")
    model, nothing = (ctypes.c_uint8 * 64)(), (ctypes.c_void_p * 8)()
    file = ctypes.addressof((ctypes.c_uint8 * len(firmware.model)).in_dll(code, "model_model"))
    size = ctypes.c_uint32(len(firmware.model))
    opened = code.slip_open(model, ctypes.c_void_p(file), size, nothing)
    assert opened == STATUS.index("no kernel")


def test_refuses_an_unknown_back_end(shared_data: Path) -> None:
    with pytest.raises(UnknownNameError, match="straight"):
        export_firmware(shared_data / MICRO_SPEECH, backend="both")
