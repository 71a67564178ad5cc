"""Accelerators that one can only describe: what a recorded step would take on them."""

from slipstream.capture.masks import MaskRecorder
from slipstream.hardware.accelerator import Accelerator, Area, Array, Energy, FrontEnd, Memory
from slipstream.hardware.layers import LayerShape, Operand, Pass
from slipstream.hardware.mapping import Chips
from slipstream.hardware.predict import AcceleratorStep, LayerCost, accelerate
from slipstream.hardware.simulate import PassCost, simulate_layer, simulate_masks, simulate_pass

__all__ = [
    "Accelerator",
    "AcceleratorStep",
    "Area",
    "Array",
    "Chips",
    "Energy",
    "FrontEnd",
    "LayerCost",
    "LayerShape",
    "MaskRecorder",
    "Memory",
    "Operand",
    "Pass",
    "PassCost",
    "accelerate",
    "simulate_layer",
    "simulate_masks",
    "simulate_pass",
]
