"""Models, skips and mutations for tests of firmware."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np

Require = Callable[[str, bool, str], None]

PERSON_DETECT = "mcu/person_detect.tflite"
MICRO_SPEECH = "mcu/micro_speech_quantized.tflite"
INT8 = (
    PERSON_DETECT,
    MICRO_SPEECH,
    *(
        f"mlperf_tiny/{name}.tflite"
        for name in (
            "ad01_int8", "kws_ref_model", "pretrainedResnet_large_int8", "pretrainedResnet_quant",
            "str_ww_ref_model", "vww_96_int8",
        )
    ),
)  # fmt: skip
FLOAT = tuple(
    f"mlperf_tiny/{name}.tflite"
    for name in (
        "ad01_fp32", "kws_ref_model_float32", "pretrainedResnet", "pretrainedResnet_large_float",
        "vww_96_float",
    )
)  # fmt: skip


def need_runtimes(require: Require) -> None:
    """Skip or fail without tflite-micro and LiteRT."""
    present = all(find_spec(name) for name in ("tflite_micro", "ai_edge_litert", "flatbuffers"))
    require("edge", present, "the extra [edge] is not installed")


def need_emulator(require: Require) -> None:
    """Skip or fail without a compiler and an emulator for Cortex-M."""
    present = all(map(shutil.which, ("arm-none-eabi-gcc", "qemu-system-arm")))
    require("cortex_m", present, "arm-none-eabi-gcc or qemu-system-arm is not installed")


def model_file(folder: Path, name: str) -> Path:
    """A model of the shared data."""
    return folder / name


def mutants(
    model: bytes, count: int, seed: int, regions: Sequence[tuple[int, int]]
) -> Iterator[bytes]:
    """Yield models with flipped bits, replaced words or a missing end, in alternating regions
    (start, bytes).
    """
    rng = np.random.default_rng(seed)
    for number in range(count):
        mutant = bytearray(model)
        start, size = regions[number % len(regions)]
        for _ in range(int(rng.integers(1, 4))):
            place = min(start + int(rng.integers(size)), len(mutant) - 4)
            if rng.random() < 0.5:
                mutant[place] ^= 1 << int(rng.integers(8))
            else:
                word = int(rng.choice([0, 1, 255, 65535, 2**31 - 1, 2**31, 2**32 - 1, len(model)]))
                mutant[place // 4 * 4 : place // 4 * 4 + 4] = struct.pack("<I", word)
        yield bytes(mutant[: rng.integers(8, len(mutant))] if rng.random() < 0.1 else mutant)
