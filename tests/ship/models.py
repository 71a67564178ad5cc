"""Models that tests of firmware run, and what other runtimes give for them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

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
    """Skip, or fail, without tflite-micro and LiteRT."""
    present = all(find_spec(name) for name in ("tflite_micro", "ai_edge_litert", "flatbuffers"))
    require("edge", present, "the extra [edge] is not installed")


def need_emulator(require: Require) -> None:
    """Skip, or fail, without a compiler and an emulator for Cortex-M."""
    present = all(map(shutil.which, ("arm-none-eabi-gcc", "qemu-system-arm")))
    require("cortex_m", present, "arm-none-eabi-gcc or qemu-system-arm is not installed")


def model_file(folder: Path, name: str) -> Path:
    """A model of the shared data."""
    return folder / name
