"""Firmware for microcontrollers: compile a .tflite model to C99, with or without an interpreter.

    firmware = export_firmware("person_detect.tflite", device="cortex-m4")
    firmware.write(Path("fw"))                             # model.c, model.h, kernels, memory.svg
    verify_firmware(read_firmware(Path("fw"))).equal       # same bytes as tflite-micro

A network (`read_network`) is lowered to steps, each a kernel call with its constants (`lower`);
one arena is planned for their outputs (`plan_arena`). Back ends emit the steps as C calls (`emit`),
or as a plan in the model's metadata that an interpreter reads (`model_with_plan`,
`emit_interpreter`).
"""

from slipstream.ship.firmware.arena import Arena, Region, plan_arena
from slipstream.ship.firmware.build import FirmwareRun, ImageSize, run_emulated, run_here
from slipstream.ship.firmware.emit_c import emit
from slipstream.ship.firmware.emit_interpreter import emit_interpreter
from slipstream.ship.firmware.firmware import (
    BACKENDS,
    Firmware,
    FirmwareFolder,
    export_firmware,
    read_firmware,
)
from slipstream.ship.firmware.forecast import Forecast, forecast
from slipstream.ship.firmware.interface import Interface, Port
from slipstream.ship.firmware.lowering import lower
from slipstream.ship.firmware.network import Network, Operator, Quantization, Tensor
from slipstream.ship.firmware.plan import model_with_plan
from slipstream.ship.firmware.planner import Buffer, MemoryPlan, greedy_plan, plan_memory
from slipstream.ship.firmware.program import KernelCall, Program
from slipstream.ship.firmware.targets import Target, target, targets
from slipstream.ship.firmware.tflite import parse_network, read_network
from slipstream.ship.firmware.verify import (
    Place,
    VerificationResult,
    random_inputs,
    reference_outputs,
    verify_firmware,
)

__all__ = [
    "BACKENDS",
    "Arena",
    "Buffer",
    "Firmware",
    "FirmwareFolder",
    "FirmwareRun",
    "Forecast",
    "ImageSize",
    "Interface",
    "KernelCall",
    "MemoryPlan",
    "Network",
    "Operator",
    "Place",
    "Port",
    "Program",
    "Quantization",
    "Region",
    "Target",
    "Tensor",
    "VerificationResult",
    "emit",
    "emit_interpreter",
    "export_firmware",
    "forecast",
    "greedy_plan",
    "lower",
    "model_with_plan",
    "parse_network",
    "plan_arena",
    "plan_memory",
    "random_inputs",
    "read_firmware",
    "read_network",
    "reference_outputs",
    "run_emulated",
    "run_here",
    "target",
    "targets",
    "verify_firmware",
]
