"""Export PyTorch models to int8 .tflite, without TensorFlow.

network = quantize_model(model, calibration_batches)
Path("model.tflite").write_bytes(write_network(network))
"""

from slipstream.ship.export.modules import export_module
from slipstream.ship.export.noise import LayerNoise, layer_noise, noise_table
from slipstream.ship.export.quantize import quantize_model
from slipstream.ship.firmware.writer import write_network

__all__ = [
    "LayerNoise",
    "export_module",
    "layer_noise",
    "noise_table",
    "quantize_model",
    "write_network",
]
