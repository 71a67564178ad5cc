"""Firmware for microcontrollers: from a .tflite model to C99 that runs without an interpreter.

    made = export_firmware("person_detect.tflite", device="cortex-m4")
    made.write(Path("fw"))                                 # model.c, model.h, kernels, memory.svg
    verify_firmware(read_firmware(Path("fw"))).equal       # every byte as tflite-micro's

A network (`read_network`) is lowered to steps, each one call of a kernel with all its constants
(`lower`); one arena is planned for what they compute (`plan_arena`). Back ends print the steps as
calls (`emit`), or as numbers that an interpreter reads from the model's metadata
(`planned_model`, `emit_interpreter`).
"""

from slipstream.ship.firmware.arena import Arena, Region, plan_arena
from slipstream.ship.firmware.build import ImageSize, Run, run_emulated, run_here
from slipstream.ship.firmware.emit_c import emit
from slipstream.ship.firmware.emit_interpreter import emit_interpreter
from slipstream.ship.firmware.firmware import (
    BACKENDS,
    Exported,
    Firmware,
    export_firmware,
    read_firmware,
)
from slipstream.ship.firmware.forecast import Forecast, forecast
from slipstream.ship.firmware.interface import Interface, Port
from slipstream.ship.firmware.lowering import lower
from slipstream.ship.firmware.network import Network, Operator, Quantization, Tensor
from slipstream.ship.firmware.plan import planned_model
from slipstream.ship.firmware.planner import Buffer, Plan, greedy_plan, plan_memory
from slipstream.ship.firmware.program import Program, Step
from slipstream.ship.firmware.targets import Target, target, targets
from slipstream.ship.firmware.tflite import parse_network, read_network
from slipstream.ship.firmware.verify import (
    Place,
    Verified,
    other_outputs,
    random_inputs,
    verify_firmware,
)

__all__ = [
    "BACKENDS",
    "Arena",
    "Buffer",
    "Exported",
    "Firmware",
    "Forecast",
    "ImageSize",
    "Interface",
    "Network",
    "Operator",
    "Place",
    "Plan",
    "Port",
    "Program",
    "Quantization",
    "Region",
    "Run",
    "Step",
    "Target",
    "Tensor",
    "Verified",
    "emit",
    "emit_interpreter",
    "export_firmware",
    "forecast",
    "greedy_plan",
    "lower",
    "other_outputs",
    "parse_network",
    "plan_arena",
    "plan_memory",
    "planned_model",
    "random_inputs",
    "read_firmware",
    "read_network",
    "run_emulated",
    "run_here",
    "target",
    "targets",
    "verify_firmware",
]
